"""The demo's last comparison finds weights that differ from the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from refitd_cli.demo.layout import TransformerConfig, canonical_name, canonical_shapes, cut_of, shard
from refitd_cli.demo.member import Message
from refitd_cli.demo.mxfp8 import is_converted, parts
from refitd_cli.demo.processes import DemoFailed, DemoProcesses
from refitd_cli.demo.proof import (
    LOGITS_TOLERANCE,
    Party,
    Verdict,
    compare,
    logits_path,
    state_path,
    whole_model,
)

CONFIG = TransformerConfig(vocab=16, hidden=8, layers=2, heads=4, kv_heads=4, head_dim=2, ffn=8)
TRAINER, ENGINE = Party("trainer", tp=2, pp=1), Party("engine", tp=1, pp=2)
LOGITS = np.random.default_rng(1).standard_normal((2, 50, 16)).astype(np.float32)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    shapes = canonical_shapes(CONFIG)
    whole = {name: rng.integers(-9999, 9999, shape, np.int16) for name, shape in shapes.items()}
    for party in (TRAINER, ENGINE):
        for member, layout in party.members.items():
            held = {}
            for index in range(CONFIG.layers // party.pp):
                layer = f"decoder.layers.{index}."
                names = [name.removeprefix("decoder.layers.0.") for name in whole if ".layers.0." in name]
                held |= {layer + name: canonical_name(layer + name, layout, CONFIG) for name in names}
            held["tokens_seen"] = "tokens_seen"
            if layout.is_first_stage:
                held |= {name: name for name in whole if name.startswith("embedding.")}
            if layout.is_last_stage:
                held |= {name: name for name in whole if name.startswith(("output_layer.", "decoder.final"))}
            arrays = {local: shard(whole[name], cut_of(name, CONFIG), layout) for local, name in held.items()}
            np.savez(state_path(tmp_path, member), **arrays)
        np.save(logits_path(tmp_path, party.leader), LOGITS)
    return tmp_path


def verdict(directory: Path) -> Verdict:
    return compare(directory, whole_model(directory, TRAINER, CONFIG), TRAINER, ENGINE, CONFIG)


def test_equal_weights_in_another_layout_are_equal(directory: Path) -> None:
    found = verdict(directory)
    assert found.holds
    assert found.differing == ()
    # tokens_seen is on both stages
    assert found.tensors == len(canonical_shapes(CONFIG)) + 1
    assert (found.logits_max_abs_diff, found.argmax_agreement) == (0.0, 1.0)


def test_one_wrong_bit_is_found_and_named(directory: Path) -> None:
    path = state_path(directory, "engine-1")
    arrays = dict(np.load(path))
    arrays["decoder.layers.0.mlp.linear_fc1.weight"][3, 5] ^= 1
    np.savez(path, **arrays)
    found = verdict(directory)
    assert not found.holds
    assert found.differing == ("engine-1 decoder.layers.0.mlp.linear_fc1.weight: 1 of 256 bytes",)


def test_a_tensor_that_no_rank_of_the_engine_has_is_named(directory: Path) -> None:
    path = state_path(directory, "engine-1")
    arrays = dict(np.load(path))
    del arrays["output_layer.byte_counts"]
    np.savez(path, **arrays)
    assert verdict(directory).differing == ("engine has no output_layer.byte_counts",)


def test_logits_beyond_the_tolerance_fail(directory: Path) -> None:
    np.save(logits_path(directory, ENGINE.leader), LOGITS + 2 * LOGITS_TOLERANCE)
    found = verdict(directory)
    assert found.differing == ()
    assert not found.holds


# --- an engine in MXFP8 -----------------------------------------------------------------------------------

WIDE = TransformerConfig(vocab=16, hidden=64, layers=1, heads=4, kv_heads=4, head_dim=16, ffn=128)
CUT = Party("engine", tp=2, pp=1)


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """Write a trainer and an engine that stores the projections of those weights converted; shards are 32 wide."""
    rng = np.random.default_rng(0)
    whole = {name: rng.integers(0, 1 << 14, shape, np.int16) for name, shape in canonical_shapes(WIDE).items()}
    for party in (TRAINER, CUT):
        for member, layout in party.members.items():
            held = {}
            for name, tensor in whole.items():
                cut = cut_of(name, WIDE)
                if party is TRAINER or not is_converted(name):
                    held[name] = shard(tensor, cut, layout)
                    continue
                for which, part in parts(tensor).items():
                    # blocks of rows or columns, each halved separately
                    assert cut is not None
                    unit = 32 if which == "scale" and cut.dim == 1 else 1
                    edges = np.cumsum([block // unit for block in cut.blocks])[:-1]
                    halves = [np.split(block, 2, axis=cut.dim) for block in np.split(part, edges, axis=cut.dim)]
                    held[f"{name}.{which}"] = np.concatenate([half[layout.tp_rank] for half in halves], axis=cut.dim)
            np.savez(state_path(tmp_path, member), **held)
        np.save(logits_path(tmp_path, party.leader), LOGITS + (party is CUT))
    return tmp_path


def mxfp8_verdict(directory: Path) -> Verdict:
    return compare(directory, whole_model(directory, TRAINER, WIDE), TRAINER, CUT, WIDE, is_mxfp8=True)


def test_an_engine_in_mxfp8_holds_the_whole_converted_once_whatever_its_logits(quantized: Path) -> None:
    found = mxfp8_verdict(quantized)
    assert found.holds and found.is_mxfp8 and found.differing == ()
    assert found.logits_max_abs_diff == pytest.approx(1.0)
    assert found.bytes < 0.6 * found.bfloat16_bytes


@pytest.mark.parametrize("which", ["data", "scale"])
def test_one_byte_of_an_engine_in_mxfp8_that_differs_is_named(quantized: Path, which: str) -> None:
    path = state_path(quantized, "engine-1")
    with np.load(path) as arrays:
        held = dict(arrays)
    held[f"decoder.layers.0.mlp.linear_fc2.weight.{which}"][3, 1] ^= 1
    np.savez(path, **held)
    found = mxfp8_verdict(quantized)
    assert not found.holds
    (line,) = found.differing
    assert line.startswith(f"engine-1 decoder.layers.0.mlp.linear_fc2.weight.{which}: 1 of ")


# --- The demo's launcher receives the events of its processes, notices their end, and leaves no process running.


CHILD = """
from refitd_cli.demo.member import Channel, reporting
channel = Channel()
print("noise goes to the log")
with reporting(channel):
    while True:
        match channel.next(60):
            case {"command": "echo", "word": word}:
                channel.emit("echoed", word=word)
            case {"command": "fail"}:
                raise ValueError("out of luck")
            case {"command": "exit"}:
                break
"""


@pytest.fixture
def heard() -> list[tuple[str, Message]]:
    return []


@pytest.fixture
def processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[tuple[str, Message]]
) -> Iterator[DemoProcesses]:
    (tmp_path / "demo_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    processes = DemoProcesses(tmp_path, lambda name, message: heard.append((name, message)), lambda what: None)
    try:
        yield processes
    finally:
        processes.stop()
        assert all(child.process.returncode is not None for child in processes.members.values())


def test_commands_reach_children_and_events_come_back(
    processes: DemoProcesses, heard: list[tuple[str, Message]]
) -> None:
    for name in ("one", "two"):
        processes.start(name, "demo_child")
    processes.send(["one", "two"], "echo", word="hello")
    answers = processes.wait("echoed", ["one", "two"], 60)
    assert {name: answer["word"] for name, answer in answers.items()} == {"one": "hello", "two": "hello"}
    assert sorted(name for name, _ in heard) == ["one", "two"]
    processes.dismiss()
    assert "noise goes to the log" in processes.tails()


def test_a_child_that_fails_says_why(processes: DemoProcesses) -> None:
    processes.start("one", "demo_child")
    processes.send(["one"], "fail")
    with pytest.raises(DemoFailed, match="one: ValueError: out of luck"):
        processes.wait("echoed", ["one"], 60)


def test_a_child_that_is_killed_is_named(processes: DemoProcesses) -> None:
    processes.start("one", "demo_child")
    processes.members["one"].process.kill()
    with pytest.raises(DemoFailed, match="one ended unexpectedly, exit status -9"):
        processes.wait("echoed", ["one"], 60)


def test_a_wait_ends_at_its_deadline_and_names_who_is_missing(processes: DemoProcesses) -> None:
    processes.start("one", "demo_child")
    with pytest.raises(DemoFailed, match="no 'echoed' of one within"):
        processes.wait("echoed", ["one"], 0.1)


def test_output_that_is_no_event_is_refused(processes: DemoProcesses) -> None:
    processes.start("one", "this")
    with pytest.raises(DemoFailed, match="one: printed 'The Zen"):
        processes.wait("echoed", ["one"], 60)
