"""Read files that a user named: regular files only, and tables of TOML and JSON strictly.

A FIFO would make its reader wait. Every wrong key of a table is reported, all problems together.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from refitd.errors import ConfigError
from refitd.text import mismatch, nearest

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Return a descriptor for reading a regular file, or a symbolic link to one.

    Args:
        path: the file.
        dir_fd: the descriptor of the folder that a relative path begins in; None: the working directory.

    Raises:
        OSError: there is no such file, it cannot be read, or it is not regular; `strerror` says which.
    """
    # before it is opened, because opening a device can act on it
    _check(os.stat(path, dir_fd=dir_fd), path)
    # O_NONBLOCK: a FIFO may have taken its place, and opening one waits for a writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        _check(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        OSError: as `open_regular`, or the file has more bytes.
    """
    with open(open_regular(path), "rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return found


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the path leads to a regular file; for files that a library opens by their path."""
    os.close(open_regular(path))


def _check(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        what = _KINDS.get(kind, "a special file")
        raise OSError(number, f"it is {what}, expected a regular file", os.fspath(path))


MAX_FILE_BYTES = 64 << 20
MAX_SHOWN = 20

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a file; unknown keys are refused."""


S = TypeVar("S", bound=msgspec.Struct)


def table(struct: type[S], values: Any, where: str, problems: list[str], **read_already: Any) -> S | None:
    """Convert one table field by field, to report all wrong keys; None if any is wrong."""
    subject = where or "the manifest"
    if not isinstance(values, Mapping):
        problems.append(f"{subject}: is {shown(values)}, expected a table")
        return None
    before = len(problems)
    fields = {f.encode_name: f for f in msgspec.structs.fields(struct)}
    for key in values:
        if key not in fields:
            close = nearest(str(key), fields, 1, 0.6)
            hint = f"; nearest: {close[0]}" if close else ""
            problems.append(f"{at(where, key)}: unknown key{hint}; known: {', '.join(fields)}")
    found = dict(read_already)
    for key, info in fields.items():
        if key in found:
            continue
        if key not in values:
            if info.required:
                problems.append(f"{at(where, key)}: missing")
            continue
        value = values[key]
        if isinstance(value, msgspec.Struct):
            found[info.name] = value
            continue
        try:
            found[info.name] = msgspec.convert(value, info.type, strict=True)
        except msgspec.ValidationError as error:
            inside, said = mismatch(str(error))
            problems.append(
                f"{at(where, key)}{inside and '.' * (inside[0] != '[') + inside}: {said}; found {shown(value)}"
            )
        except RecursionError:
            problems.append(f"{at(where, key)}: too deeply nested")
    return struct(**found) if len(problems) == before else None


def at(where: str, key: object) -> str:
    """Return the dotted path of a key, for messages."""
    return f"{where}.{key}" if where else str(key)


def shown(value: Any) -> str:
    """Return a value for a message, truncated if long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tables(value: Any, where: str, problems: list[str]) -> list[Any]:
    """Return the entries of a list of tables; [] if it is not a list."""
    if isinstance(value, list | tuple):
        return list(value)
    if value is not None:
        problems.append(f"{where}: is {shown(value)}, expected a list of tables")
    return []


def each(struct: type[S], entries: Iterable[Any], where: str, problems: list[str]) -> list[S | None]:
    """Convert every table of a list; an entry is None if its table is wrong."""
    return [table(struct, entry, f"{where}[{number}]", problems) for number, entry in enumerate(entries)]


def refusal(where: str, problems: Sequence[str]) -> ConfigError:
    """Return the error that lists the problems, at most MAX_SHOWN of them."""
    lines = [f"{where}: {problem}" for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        lines.append(f"{where}: ... and {len(problems) - MAX_SHOWN} more problems")
    return ConfigError("\n".join(lines))


def parse(text: str, where: str, *, is_json: bool) -> dict[str, Any]:
    """Return the tables of a file; raises ConfigError if it is not valid TOML or JSON, or repeats a key."""
    try:
        found = (
            json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant) if is_json else tomllib.loads(text)
        )
    except (ValueError, RecursionError) as error:
        what = "JSON" if is_json else "TOML"
        raise ConfigError(f"{where}: not {what}: {error}; is the file complete?") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: holds {shown(found)}, expected a table with a key `kind`")
    return found


def read_file(path: Path) -> dict[str, Any]:
    """Return the tables of a file, TOML or JSON by its ending; raises ConfigError if it cannot be read."""
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    return parse(text, str(path), is_json=path.suffix == ".json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated!r} occurs twice in one table")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number that can be used here")
