"""Write the records that are missing."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests import recorded


def main() -> None:
    """Write each file that does not exist yet."""
    with tempfile.TemporaryDirectory() as folder:
        made = {
            recorded.MESSAGES: recorded.messages,
            recorded.JOURNAL: lambda: recorded.journal(Path(folder) / "journal"),
            recorded.CONFIGURATION: (recorded.ROOT / "configs/laptop.toml").read_text,
            recorded.NAMES: recorded.names,
        }
        for path, make in made.items():
            if not path.exists():
                path.write_text(make())
                print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
