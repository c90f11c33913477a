"""Explore for longer than the tests do: `scripts/explore --faults 3 --delays 1`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.exploration.explore import Exploration
from tests.exploration.lockstep import POLLS, PollExploration
from tests.exploration.settings import SHORT, long
from tests.exploration.worlds import Violation


def main() -> int:
    """Explore each setting, and print what was seen; return 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="scripts/explore", description=__doc__)
    parser.add_argument("--faults", type=int, help="faults in one run; without it: the settings of the tests")
    parser.add_argument("--delays", type=int, help="events that may overtake others; without it: every order")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit for each setting")
    parser.add_argument("--only", default="", help="settings whose name has this text")
    asked = parser.parse_args()
    settings = SHORT if asked.faults is None else long(asked.faults, asked.delays)
    is_broken, began = False, time.monotonic()
    for name, setting in settings.items():
        if asked.only not in name:
            continue
        print(f"{name}: faults {setting.faults}, delays {'any' if setting.delays is None else setting.delays}")
        try:
            print(f"  {Exploration(setting).run(asked.seconds)}", flush=True)
        except TimeoutError as exc:
            print(f"  {exc}", flush=True)
        except Violation as exc:
            print(f"  BROKEN: {exc}", flush=True)
            is_broken = True
    for name, polls in POLLS.items():
        if asked.only not in name:
            continue
        print(f"{name}: faults {polls.faults}")
        try:
            print(f"  {PollExploration(polls).run()}", flush=True)
        except Violation as exc:
            print(f"  BROKEN: {exc}", flush=True)
            is_broken = True
    print(f"all: {time.monotonic() - began:.1f} s")
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
