"""`refitctl support-bundle`: items of bounded size, collected one by one and written as one tar archive."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from refitd.config import Config
from refitd.errors import ConfigError, RefitdError
from refitd.files import open_regular
from refitd_cli.commands.config import as_toml, in_force
from refitd_cli.commands.doctor import all_findings
from refitd_cli.output import print_table, say, size, to_json
from refitd_cli.printed import BundleItem, BundleWritten
from refitd_cli.session import Session, asks, read_config

if TYPE_CHECKING:
    from refitd.client import Client

MAX_ITEM_BYTES = 4_000_000
MAX_LOGS = 16
JOURNAL_LINES = 5000
JOURNAL_S = 10.0
HISTORY = 200


@dataclasses.dataclass(frozen=True)
class Item:
    """One file of the archive."""

    name: str
    content: bytes
    note: str


def collected(
    session: Session,
    read: Callable[[], tuple[Config, dict[str, str]]],
    logs: Sequence[str],
    unit: str,
) -> list[Item]:
    """Return all items; the first lists them. A failed item contains the reason."""
    if len(logs) > MAX_LOGS:
        raise ConfigError(f"--log is given {len(logs)} times, at most {MAX_LOGS}; give the newest")
    found = [
        _item("versions.json", "versions of Python, the kernel and packages", lambda: _json(_versions())),
        _item("doctor.json", "what `refitctl doctor` finds", lambda: _json(_doctor(session))),
        _item("config.toml", "the configuration, and where each value comes from", lambda: _config(read)),
        _item("status.json", "what `refitctl status --json` says", lambda: _asked(session, lambda c: c.status())),
        _item("history.json", f"the last {HISTORY} swaps", lambda: _asked(session, lambda c: c.history("", HISTORY))),
        _item("journal.log", f"the last {JOURNAL_LINES} lines of unit {unit}", lambda: _journal(unit)),
        *(
            _item(f"log-{number}-{Path(path).name[:80]}", f"the end of {path}", partial(_end, path))
            for number, path in enumerate(logs, 1)
        ),
    ]
    head = "A support bundle of refitd. It holds no keys and no weights."
    listing = "".join(f"{item.name}: {item.note}, {len(item.content)} bytes\n" for item in found)
    return [Item("README", f"{head}\n\n{listing}".encode(), "this list"), *found]


def write(items: Sequence[Item], output: str | None) -> Path:
    """Write the archive, readable by its owner only.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    stem = f"refitd-support-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    path = Path(output or f"{stem}.tar.gz")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be made: {exc.strerror}; choose another --output FILE") from exc
    try:
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for item in items:
                entry = tarfile.TarInfo(f"{stem}/{item.name}")
                entry.size, entry.mtime, entry.mode = len(item.content), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(item.content))
    except OSError as exc:
        path.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {exc.strerror}; choose another --output FILE") from exc
    return path


def _item(name: str, note: str, make: Callable[[], bytes]) -> Item:
    try:
        content = make()
    except (RefitdError, OSError, subprocess.SubprocessError) as exc:
        return Item(f"{name}.missing", f"{exc}\n".encode()[:MAX_ITEM_BYTES], f"missing: {exc}")
    if len(content) > MAX_ITEM_BYTES:
        return Item(f"{name}.cut", content[:MAX_ITEM_BYTES], f"{note}; the first {MAX_ITEM_BYTES} bytes")
    return Item(name, content, note)


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


def _versions() -> dict[str, object]:
    wanted = {
        "torch",
        "numpy",
        "pyzmq",
        "msgspec",
        "xxhash",
        "cryptography",
        "click",
        "rich",
        "vllm",
        "transformers",
    }
    packages = {}
    for found in importlib.metadata.distributions():
        name = (found.metadata["Name"] or "").lower()
        if name in wanted or name.startswith(("refitd", "nvidia-", "nvshmem", "triton", "megatron")):
            packages[name] = found.version
    return {
        "refitd": importlib.metadata.version("refitd"),
        "python": sys.version,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "processors": os.cpu_count(),
        "uid": os.getuid(),
        "packages": dict(sorted(packages.items())),
    }


def _doctor(session: Session) -> list[dict[str, object]]:
    return [dataclasses.asdict(finding) for finding in all_findings(session)]


def _config(read: Callable[[], tuple[Config, dict[str, str]]]) -> bytes:
    found, origins = read()
    return ("\n".join(as_toml(in_force(found), origins)) + "\n").encode()


def _asked(session: Session, ask: Callable[[Client], object]) -> bytes:
    with session.client() as client:
        return _json(to_json(ask(client)))


def _journal(unit: str) -> bytes:
    command = ["journalctl", "--no-pager", "--quiet", "-n", str(JOURNAL_LINES), "-o", "short-iso", f"--unit={unit}"]
    ran = subprocess.run(command, check=False, capture_output=True, timeout=JOURNAL_S, stdin=subprocess.DEVNULL)
    if ran.returncode or not ran.stdout:
        said = ran.stderr.decode(errors="replace").strip() or "no line"
        raise OSError(f"journalctl of unit {unit}: {said}; give the log with --log FILE")
    return ran.stdout[-MAX_ITEM_BYTES:]


def _end(path: str) -> bytes:
    with open(open_regular(path), "rb") as file:
        nbytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, nbytes - MAX_ITEM_BYTES))
        return file.read(MAX_ITEM_BYTES)


@click.command("support-bundle")
@click.option("-o", "--output", metavar="FILE", help="The archive.  [default: refitd-support-TIME.tar.gz]")
@click.option("--config", "config_file", metavar="FILE", help="The daemon's configuration; without its keys.")
@click.option("--log", "logs", multiple=True, metavar="FILE", help="A log; its end is taken. May be given again.")
@click.option("--unit", default="refitd", show_default=True, help="The systemd unit whose journal is asked.")
@asks
def support_bundle(
    session: Session,
    output: str | None,
    config_file: str | None,
    logs: tuple[str, ...],
    unit: str,
) -> None:
    """Collect versions, checks, configuration, status, histories and log ends in one archive, and say what is in it.

    It holds names of hosts, users, models and tensors, and paths; no keys and no weights. Missing items (a daemon that
    is down) are noted in it. At most 4 MB are taken of each item.
    """
    items = collected(session, lambda: read_config(config_file), logs, unit)
    path = write(items, output)
    rows = tuple(BundleItem(item.name, len(item.content), item.note) for item in items)
    session.show(BundleWritten(str(path), rows), _show)


def _show(written: BundleWritten) -> None:
    rows = ((item.name, size(item.bytes), item.note) for item in written.items)
    print_table("", ("item", ">bytes", "what it is"), rows)
    say(f"{written.file}: look through it before you pass it on; it names hosts, users, models and paths")
