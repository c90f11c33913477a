"""A real FSDP2 trainer's checkpoint goes live, and a real FSDP2 trainer loads the live version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import refitd
from refitd.testing import Daemon, Engine
from refitd_cli.control import main
from tests.spmd.pool import Pool


def refitctl(daemon: Daemon, *arguments: str) -> dict[str, Any]:
    """Run a command in this process; return the JSON object on stdout."""
    ran = CliRunner().invoke(main, [*arguments, "--address", str(daemon.directory), "--json"], prog_name="refitctl")
    assert ran.exit_code == 0, ran.output
    said: dict[str, Any] = json.loads(ran.stdout)
    return said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_fsdp2_ranks_save_goes_live_and_is_saved_for_them(pool: Pool, tmp_path: Path) -> None:
    given, kept = tmp_path / "given", tmp_path / "kept"
    expected, *_ = pool.run("dcp_cases:save_fsdp2", str(given))
    with Daemon() as daemon, daemon.connect() as engine:
        with daemon.connect() as client, pytest.raises(refitd.CheckpointError, match="choose one by its prefix"):
            refitd.publish_checkpoint(client, "policy", given)
        assert engine.status().models == ()
        # 13 rows in shards of two leave no row for the eighth rank
        published = refitctl(daemon, "publish", "policy", "--from", str(given), "--prefix", "model.")
        assert (published["files"], published["tensors"]) == (7, len(expected)) and published["aside"] > len(expected)
        live = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in engine.tensors("policy").items()}
        with Engine(engine.register_target("policy", live, replica="a")):
            engine.swap("policy", published["version"])
        assert {name: tensor.float().tolist() for name, tensor in live.items()} == expected
        done = list[tuple[int, int]]()
        saved = refitd.save_checkpoint(
            engine,
            "policy",
            kept,
            format="dcp",
            max_shard_bytes=300,
            on_progress=lambda *progress: done.append(progress),
        )
        assert saved.files > 1 and done[-1] == (saved.bytes, saved.bytes)
        # over a checkpoint of the other format, and back to the first one
        assert refitd.save_checkpoint(engine, "policy", kept).files == 1
        assert sorted(each.name for each in kept.iterdir()) == ["model.safetensors"]
        refitctl(daemon, "save", "policy", "-o", str(kept), "--format", "dcp", "--max-shard-size", "300")
        with pytest.raises(refitd.CheckpointError, match="format is 'gguf'"):
            refitd.save_checkpoint(engine, "policy", kept, format="gguf")
    loaded = {name: torch.full_like(tensor, 9) for name, tensor in live.items()}
    dcp.load(loaded, checkpoint_id=kept, no_dist=True)
    assert all(torch.equal(loaded[name], live[name]) for name in live)
    assert pool.run("dcp_cases:load_fsdp2", str(kept)) == [expected] * pool.size
