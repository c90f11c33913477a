"""Read and write manifests in TOML and JSON files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from refitd.errors import ConfigError
from refitd.files import read_regular
from refitd.offline.layouts import layout_problems
from refitd.offline.models import read_model
from refitd.offline.shards import read_shards
from refitd.offline.tables import refusal, shown, table
from refitd.offline.values import KINDS, MAX_FILE_BYTES, Layout, Manifest, ModelSpec


def load(path: str | Path, model: ModelSpec | None = None) -> Manifest:
    """Read a layout or shards manifest.

    Args:
        path: a TOML or JSON file. A model file that it names is relative to its folder.
        model: overrides the model that a layout names.

    Raises:
        ConfigError: lists everything that is wrong with the manifest.
    """
    path = Path(path)
    values = read_file(path)
    inner = values.get("model")
    if values.get("kind") == "layout" and model is None and isinstance(inner, str):
        model = load_model(path.parent / inner)
    found = read(values, str(path), model)
    if isinstance(found, ModelSpec):
        raise ConfigError(f"{path}: is a model, expected a layout or shards; a layout names its model, or --model does")
    return found


def load_model(path: str | Path) -> ModelSpec:
    """Read a model manifest; raises ConfigError as `load` does."""
    values = read_file(Path(path))
    if (kind := values.get("kind")) != "model":
        raise ConfigError(f"{path}: kind is {shown(kind)}, expected a model")
    found = read(values, str(path))
    assert isinstance(found, ModelSpec)
    return found


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


def read(values: Mapping[str, Any], where: str, model: ModelSpec | None = None) -> ModelSpec | Manifest:
    """Turn the tables of a file into a checked manifest; a layout's model must be in the file, or be passed.

    Raises:
        ConfigError: lists everything that is wrong with the manifest.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}: kind is {shown(kind)}, expected one of {', '.join(KINDS)}")
    problems: list[str] = []
    rest = {key: value for key, value in values.items() if key != "kind"}
    if kind == "layout":
        if model is not None:
            rest["model"] = model
        elif isinstance(inner := rest.get("model"), Mapping):
            inner = {key: value for key, value in inner.items() if key != "kind"}
            rest["model"] = read_model(inner, "model", problems)
        elif "model" not in rest:
            problems.append('model: missing; name a model file (model = "FILE"), write a [model], or pass --model')
    found: ModelSpec | Manifest | None
    if kind == "model":
        found = read_model(rest, "", problems)
    elif kind == "layout":
        found = table(Layout, rest, "", problems)
        if found is not None and found.model is not None and not problems:
            problems += layout_problems(found)
    else:
        found = read_shards(rest, problems)
    if problems or found is None:
        raise refusal(where, problems)
    return found


def to_json(manifest: ModelSpec | Manifest) -> str:
    """Return a manifest as a JSON file that `read` reads back."""
    packed = msgspec.to_builtins(manifest)
    return msgspec.json.format(msgspec.json.encode(packed), indent=1).decode() + "\n"


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
