"""Draw the state machines into docs/design.md from their tables, for `scripts/states` and a test that compares."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from refitd.commit import rank_state
from refitd.commit.decision import ROWS, Phase
from refitd.commit.rank_state import Bond, RankStep
from refitd.commit.target_state import LIVES, LIVES_IN_PLACE, STEPS, Live, Step

DOCUMENT = Path(__file__).parents[2] / "docs" / "design.md"

# (event, state) -> the states that may follow
Table = Mapping[tuple[type, enum.Enum], Sequence[enum.Enum]]


def _one_each(table: Mapping[tuple[type, enum.Enum], enum.Enum]) -> Table:
    return {key: (to,) for key, to in table.items()}


def drawings() -> dict[str, str]:
    """Return the content of each name in the document: diagrams of moves, and whole tables."""
    swap: Table = {key: row.to for key, row in ROWS.items()}
    steps, lives = _one_each(STEPS), _one_each({**LIVES, **LIVES_IN_PLACE})
    return {
        "swap-diagram": diagram(swap, Phase.IDLE),
        "swap-table": matrix(swap, Phase),
        "steps-diagram": diagram(steps, Step.IDLE),
        "steps-table": matrix(steps, Step),
        "lives-diagram": diagram(lives, Live.EMPTY),
        "rank-diagram": diagram(_one_each(rank_state.STEPS), RankStep.IDLE),
        "rank-table": matrix(_one_each(rank_state.STEPS), RankStep),
        "bonds-diagram": diagram(_one_each(rank_state.BONDS), Bond.JOINED),
    }


def diagram(table: Table, first: enum.Enum) -> str:
    """Return every move from one state to another, with the events that may cause it."""
    moves: dict[tuple[str, str], list[str]] = {}
    for (event, state), following in table.items():
        for to in following:
            if to is not state:
                moves.setdefault((state.name, to.name), []).append(event.__name__)
    lines = [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in moves.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}", *lines, "```"])


def matrix(table: Table, states: type[enum.Enum]) -> str:
    """Return a row for each event and a column for each state, with the next states; "=" is the state itself."""

    def rows() -> Iterator[list[str]]:
        yield ["", *(state.name for state in states)]
        yield ["---"] * (1 + len(states))
        for event in dict.fromkeys(event for event, _ in table):
            cells = [[("=" if to is state else to.name) for to in table.get((event, state), ())] for state in states]
            yield [event.__name__, *(", ".join(cell) for cell in cells)]

    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows())


def drawn(text: str) -> str:
    """Return the document with every drawing made from the present tables."""
    for name, drawing in drawings().items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text, count = re.subn(pattern, lambda found: found[1] + drawing + found[2], text, flags=re.DOTALL)  # noqa: B023
        assert count == 1, f"{DOCUMENT} has {count} places for {name}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(drawn(DOCUMENT.read_text()))
