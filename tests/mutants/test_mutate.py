"""The mutator on a toy module: it finds the expected places, and the seed decides which are drawn."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from tests.mutants.__main__ import applied
from tests.mutants.mutate import choose, mutated, places

TOY = textwrap.dedent('''
    """A toy, with 7 words and a docstring."""

    LIMIT = 3


    class Box:
        """A box."""

        def put(self, key: str | None, é: int) -> int:
            """Put 5 things."""
            if key is None or é > LIMIT:
                return 0
            log.info("put", 4)
            self.items = é * 2
            store(key, é)
            if key == "bad":
                raise KeyError("no key 9", 8)
            return [number for number in range(é) if number][0]
''')


def changes(kind: str) -> set[str]:
    return {place.after for place in places("toy.py", TOY) if place.kind == kind}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("comparison", {"(key is not None)", "(é >= LIMIT)", "(key != 'bad')"}),
        ("arithmetic", {"(é // 2)"}),
        ("and/or", {"(key is None and é > LIMIT)"}),
        ("constant", {"4", "1", "3", "'badx'"}),
        ("negated condition", {"(not (key is None or é > LIMIT))", "(not (key == 'bad'))", "(not (number))"}),
        ("swapped arguments", {"store(é, key)"}),
    ],
)
def test_a_kind_of_mutation_has_the_expected_places(kind: str, expected: set[str]) -> None:
    assert changes(kind) == expected


def test_removed_statements_are_calls_raises_early_returns_and_assignments_to_attributes() -> None:
    removed = {place.before for place in places("toy.py", TOY) if place.after == "pass"}
    assert removed == {"return 0", "self.items = é * 2", "store(key, é)", 'raise KeyError("no key 9", 8)'}


def test_a_mutant_is_a_module_that_differs_in_one_place() -> None:
    for place in places("toy.py", TOY):
        text = mutated(TOY, place)
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(TOY))
        raw = TOY.encode()
        assert text.encode().startswith(raw[: place.start]) and text.encode().endswith(raw[place.end :])


def test_a_place_names_its_function_as_code_objects_do() -> None:
    assert {place.function for place in places("toy.py", TOY)} == {"<module>", "Box.put"}


def test_a_seed_chooses_the_same_places_again_and_a_longer_draw_begins_with_a_shorter_one() -> None:
    sources = {"toy.py": TOY, "other.py": TOY, "cuda.py": TOY}
    long = list(choose(sources, 5, 12))
    assert list(choose(sources, 5, 4)) == long[:4] != list(choose(sources, 6, 4))
    assert len(set(long)) == 12 and {place.file for place in long} == {"toy.py", "other.py"}
    assert len(list(choose(sources, 5, 1000))) == 2 * len(places("toy.py", TOY))


def test_the_file_is_restored_after_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    before = path.stat().st_mtime_ns
    with pytest.raises(KeyboardInterrupt), applied(path, "LIMIT = 4\n", 0):
        assert path.read_text() == "LIMIT = 4\n" and path.stat().st_mtime_ns != before
        raise KeyboardInterrupt
    assert path.read_text() == TOY and path.stat().st_mtime_ns == before
