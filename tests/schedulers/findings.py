"""Record what each trial expected and saw: lines on stderr during the run, and a table at its end."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass
class Findings:
    """Rows of (expectation, observation, whether it was met)."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def saw(self, claim: str, seen: str, holds: bool) -> None:
        """Add a row."""
        self.rows.append((claim, " ".join(seen.split())[:300], holds))
        print(f"{'ok    ' if holds else 'FAILED'} {claim}: {self.rows[-1][1]}", file=sys.stderr, flush=True)

    @property
    def failed(self) -> int:
        """How many rows did not hold."""
        return sum(not holds for _, _, holds in self.rows)

    def keep(self, name: str, heading: str, intro: str, as_json: bool) -> int:
        """Write benchmarks/results/NAME.md and print it; return the script's status."""
        about = machine.describe()
        lines = [
            f"# {heading}",
            "",
            f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}. {intro}",
            f"Written by `scripts/try-{name}`.",
            "",
            "| what has to hold | what was seen | |",
            "| --- | --- | --- |",
            *(
                f"| {claim} | {seen.replace('|', '/')} | {'yes' if holds else '**no**'} |"
                for claim, seen, holds in self.rows
            ),
        ]
        text = "\n".join(lines)
        (RESULTS / f"{name}.md").write_text(text + "\n")
        rows = [{"claim": claim, "seen": seen, "holds": holds} for claim, seen, holds in self.rows]
        print(json.dumps({"machine": about, "rows": rows}) if as_json else text)
        return 1 if self.failed else 0
