"""Write the records that are missing."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests import recorded


def main() -> None:
    """Write each file that does not exist yet, and add the messages and names that the files lack."""
    with tempfile.TemporaryDirectory() as folder:
        made = {
            recorded.MESSAGES: recorded.messages,
            recorded.JOURNAL: lambda: recorded.journal(Path(folder) / "journal"),
            **{path: (recorded.ROOT / "configs" / name).read_text for path, name in recorded.COPIED.items()},
            recorded.NAMES: recorded.names,
        }
        for path, make in made.items():
            if not path.exists():
                path.write_text(make())
                print(f"wrote {path.name}")
            elif path in (recorded.MESSAGES, recorded.NAMES):
                known = {*map(_key, path.read_text().splitlines())}
                new = [line for line in make().splitlines() if _key(line) not in known]
                path.write_text(path.read_text() + "".join(f"{line}\n" for line in new))
                print(f"added {len(new)} lines to {path.name}")


def _key(line: str) -> str:
    return line.partition(",")[0].rstrip("}")  # a message's type, or the name


if __name__ == "__main__":
    main()
