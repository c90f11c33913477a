"""A folder whose files are truncated and rewritten in place while a real process publishes it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refitd.checkpoints.safetensors import INDEX, WHOLE
from refitd.testing import Daemon, Engine
from tests.support import programs
from tests.support.names import policy

ROWS = {"a": 10 << 20, "b": 1 << 20}  # of float32: 3 calls of progress, and 1
TURNS = 10

# Publishes a folder repeatedly. Most times it reports once that it is in the middle of a tensor, and waits for an
# answer.
PUBLISHER = """
from tests.support.names import policy
import sys, refitd
address, folder, turns = sys.argv[1], sys.argv[2], int(sys.argv[3])
for turn in range(turns):
    calls = 0
    def progress(done, total):
        global calls
        calls += 1
        if calls == 3 - turn % 5:  # in two turns of five never
            print("reading", flush=True)
            sys.stdin.readline()
    try:
        with refitd.connect(address) as client:
            said = f"published {refitd.publish_checkpoint(client, policy(), folder, on_progress=progress).version}"
    except refitd.CheckpointError as exc:
        said = f"refused {exc}"
    print(said, flush=True)
    sys.stdin.readline()
"""


def write(folder: Path, number: int, layout: str) -> None:
    """Write checkpoint `number`; every element equals `number`."""
    folder.mkdir()
    tensors = {name: torch.full((rows,), float(number)) for name, rows in ROWS.items()}
    if layout == "whole":
        save_file(tensors, folder / WHOLE)
        return
    files = {name: f"model-0000{i + 1}-of-00002.safetensors" for i, name in enumerate(ROWS)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_a_publisher_whose_files_are_truncated_and_rewritten_ends_with_one_checkpoint_or_an_error(
    daemon: Daemon, tmp_path: Path, layout: str
) -> None:
    contents = []
    for number in (1, 2):
        write(tmp_path / str(number), number, layout)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()})
    folder, turn, refused = tmp_path / "1", 0, []
    command = programs.python(daemon, PUBLISHER, str(folder), str(TURNS))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with programs.ended(subprocess.Popen(command, text=True, cwd=programs.ROOT, **pipes)) as publisher:
        assert publisher.stdout and publisher.stderr
        for line in publisher.stdout:
            if line == "reading\n":
                for name in contents[0]:  # as `cp -r new/* old/` does
                    os.truncate(folder / name, 0)
                answer(publisher)
                for name, content in contents[turn % 2].items():
                    (folder / name).write_bytes(content)
                continue
            turn += 1
            outcome, _, said = line.partition(" ")
            if outcome == "published":
                check(daemon, int(said))
            else:
                refused.append(said)
                assert str(folder) in said and "publish the folder again when its writer has finished" in said
            answer(publisher)
        assert publisher.wait(60) == 0, publisher.stderr.read()[-3000:]
    assert turn == TURNS and 0 < len(refused) < TURNS


def answer(publisher: subprocess.Popen[str]) -> None:
    assert publisher.stdin
    with contextlib.suppress(BrokenPipeError):
        publisher.stdin.write("on\n")
        publisher.stdin.flush()


def check(daemon: Daemon, version: int) -> None:
    """Check that the version has the tensors of one checkpoint."""
    with daemon.connect() as client:
        live = {name: torch.zeros(rows) for name, rows in ROWS.items()}
        with Engine(client.register_target(policy(), live, replica="a")):
            assert client.swap(policy(), version).version == version
        assert {value for tensor in live.values() for value in tensor.unique().tolist()} in ({1.0}, {2.0})
