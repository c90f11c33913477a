"""Pickles of checkpoints: limits of their memory and time, and the opcodes that they may have."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from refitd.checkpoints.pickles import EMPTY_DICT, SIZE, Call, PickledState, read_pickle, told
from refitd.checkpoints.publish import read_checkpoint
from refitd.checkpoints.safetensors import METADATA
from refitd.errors import CheckpointError

HUGE = 0x7FFF_FFF0
DEEP = 60
METADATA_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
ROOM_BYTES = 64 << 20


def shared(opening: bytes, closing: bytes, *, clean: bool = False) -> bytes:
    """A value that holds one value twice, which holds one value twice, and so on: 2 ** DEEP leaves.

    With `clean` the first value is on the stack already, and each one is taken from it: only the last is left there.
    """
    first, second = b"" if clean else b"h%c", b"h%c"
    steps = [b"q%c" % i + opening + (first % i if first else b"") + second % i + closing for i in range(DEEP)]
    return (b"" if clean else b"K\1") + b"".join(steps)


LONG_TUPLE = b"(" + b"K\1" * 50_000 + b"tq\1"
HOSTILE = {
    "memo index": b"\x80\x02Nr" + struct.pack("<I", HUGE) + b".",
    "memo index in text": b"\x80\x02Np%d\n." % HUGE,
    "memo indices": b"\x80\x02N" + b"".join(b"r" + struct.pack("<I", HUGE + i) for i in range(3)) + b".",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", HUGE) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b".",
    "short bytes": b"\x80\x04B" + struct.pack("<I", HUGE) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", HUGE) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", HUGE) + b".",
    "integer": b"\x80\x02\x8b" + struct.pack("<i", HUGE) + b".",
    "string": b"\x80\x02T" + struct.pack("<i", HUGE) + b".",
    "shared tuple as a key": b"\x80\x02}K\1" + shared(b"", b"\x86", clean=True) + b"Ns.",
    "shared tuple": b"\x80\x02" + shared(b"", b"\x86") + b".",
    "shared list as the state": b"\x80\x02" + METADATA_CLASS + b")\x81" + shared(b"(", b"l") + b"b.",
    "shared list in the state": (
        b"\x80\x02" + METADATA_CLASS + b")\x81}(X\x13\0\0\0state_dict_metadata}X\1\0\0\0a"
        + shared(b"](", b"e") + b"sX\x0c\0\0\0storage_data}ub."
    ),
    "copies of a long tuple": (
        b"\x80\x02" + LONG_TUPLE + b"](" + b"".join(b"ctorch\nSize\nh\1\x85R" for _ in range(20_000)) + b"e."
    ),
    "marks": b"\x80\x02" + b"(" * 100_000 + b".",
    "nested lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
}  # fmt: skip

# Reads each metadata file in a process with little spare address space, and prints the errors by folder as JSON.
READ = """
import json, os, resource, sys
from pathlib import Path
from refitd.checkpoints.dcp import read_dcp
from refitd.checkpoints.safetensors import open_folder
from refitd.checkpoints.publish import read_checkpoint
from refitd.errors import CheckpointError
pages = int(Path("/proc/self/statm").read_text().split()[0])
room = pages * resource.getpagesize() + int(sys.argv[2])
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        try:
            read_dcp(open_folder(folder))
        except CheckpointError as exc:
            print(json.dumps([folder.name, str(exc)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_small_hostile_pickle_is_refused_within_little_memory(tmp_path: Path) -> None:
    for name, data in HOSTILE.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).write_bytes(data)
    command = [sys.executable, "-c", READ, str(tmp_path), str(ROOM_BYTES)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    refused = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert refused.keys() == HOSTILE.keys(), ran.stderr[-2000:]
    for name, said in refused.items():
        assert f"{METADATA}: these are no metadata of torch.distributed.checkpoint" in said, name
        assert "MemoryError" not in said and len(said) < 2000, name


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_pickle_writes_is_read_in_every_binary_protocol(protocol: int) -> None:
    value = {
        "texts": ["", "a" * 300, "é" * 70_000],
        "numbers": [0, -1, 255, 65_536, 1 << 40, -(1 << 70), 1 << 3000, 1.5, True, False, None],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "nested": [{"a": [{}]}] * 3,
        ("flat", "key"): 1,
        7: list(range(3000)),
        **{f"key {i}": i for i in range(3000)},
    }
    data = pickle.dumps(value, protocol)
    assert read_pickle(data, {}) == value
    for end in range(0, len(data), 997):
        with pytest.raises(ValueError):
            read_pickle(data[:end], {})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"N2.", "it has the opcode DUP, which does not belong there"),
        (b"\x8f.", "the opcode EMPTY_SET"),
        (b"\x82\1.", "the opcode EXT1"),
        (b"(iposix\nmkdir\n.", "the opcode INST"),
        (b"\xff.", "the opcode 0xff"),
        (b"}]Ns.", "a dict has a list as a key"),
        (b"K\1NNs.", "it sets items of something that is no dict"),
        (b"}(Nu.", "a key without a value"),
        (b"cx\nS\n].", "it names x.S, which does not belong there"),
        (b"cx\nSize\n]\x85R.", "a torch.Size of something other than a tuple of at most 64 integers"),
        (b"cx\ndict\n}\x85R.", "it calls a dict with arguments"),
        (b"cx\nCall\n}b.", "it gives a function a state"),
        (b"ca\n" + b"x" * 10_000 + b"\n.", "xxxx ..."),
    ],
    ids=str,
)
def test_a_pickle_that_does_anything_else_is_refused_by_name(data: bytes, words: str) -> None:
    known = {
        ("x", "Size"): SIZE,
        ("x", "dict"): EMPTY_DICT,
        ("x", "Call"): Call(lambda: None),
        ("x", "P"): PickledState,
    }
    with pytest.raises(ValueError) as caught:
        read_pickle(b"\x80\x02" + data, known)
    assert words in str(caught.value) and len(str(caught.value)) < 400


def test_a_value_of_a_pickle_is_shown_only_where_it_is_flat() -> None:
    value: list[object] = [1]
    for _ in range(DEEP):
        value = [value, value]
    assert told(value) == "a list"
    assert told([1, "a"]) == "[1, 'a'] (list)" and told(None) == "None (NoneType)"
    assert told((1,) * 1000) == "a tuple"


def test_a_shape_of_too_many_dimensions_is_refused(tmp_path: Path) -> None:
    text = b'{"w":{"dtype":"U8","shape":[' + b",".join([b"4611686018427387903"] * 65) + b'],"data_offsets":[0,0]}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"'w': its shape is .* expected at most 64 sizes"):
        read_checkpoint(tmp_path, None)
