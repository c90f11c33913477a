"""Modules on a GPU that move into GPU arenas: adopted, or built in a block."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import nn

import refitd
from refitd.buffers.cuda import release_dropped
from refitd.testing import Daemon, Engine, eventually
from tests.support import fake_cuda
from tests.support.fake_torch.device_shim import gpu_of, put_on_gpu
from tests.support.fleet import go_live
from tests.support.gpu_tensors import MIB

pytestmark = pytest.mark.slow  # workers import torch with their first arena on a GPU


class Model(nn.Module):
    """Two layers whose weights are tied, and a buffer, on a GPU from the start or in main memory."""

    def __init__(self, gpu: int | None = 0) -> None:
        super().__init__()
        made = (lambda tensor: tensor) if gpu is None else (lambda tensor: put_on_gpu(tensor, gpu))
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_parameter("weight", made(nn.Parameter(torch.randn(64, 32))))
        self.second.register_parameter("weight", self.first.weight)
        self.first.register_parameter("bias", made(nn.Parameter(torch.randn(64))))
        self.register_buffer("scale", made(torch.ones(3)))


def flipped(client: refitd.Client, live: Model) -> None:
    """Swap twice, and back: versions flip under the module, and are proven."""
    learned = Model(None)
    source = client.register_source("policy", learned)
    target = client.register_target("policy", live, replica="a", mode="flip")
    addresses = [param.data_ptr() for param in live.parameters()]
    with Engine(target):
        for version in (1, 2):
            learned.first.weight.data.fill_(version)
            go_live(client, source, version)
            assert torch.equal(live.second.weight, learned.first.weight) and torch.equal(live.scale, learned.scale)
        assert client.rollback("policy", timeout=60).bytes == 0
    assert bool((live.first.weight == 1).all()) and client.verify("policy", timeout=60).outcome == "proven"
    assert [param.data_ptr() for param in live.parameters()] == addresses
    target.close()
    source.close()


def test_a_module_on_a_gpu_is_adopted_there_and_flips(daemon: Daemon) -> None:
    with daemon.connect() as client:
        live = Model()
        before, weight = {name: value.clone() for name, value in live.state_dict().items()}, live.first.weight
        adopted = client.adopt(live)
        assert adopted.tensors == 3 and not adopted.left
        assert all(gpu_of(value) == 0 for value in live.state_dict().values())
        assert live.first.weight is weight and live.second.weight is weight
        assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
        written = io.BytesIO()
        torch.save(live.first.bias.detach(), written)
        assert written.tell() < 8000, "a weight that is saved takes nothing else along"
        flipped(client, live)
        del live, weight, before
        gc.collect()


def test_a_model_that_a_block_builds_on_a_gpu_lies_in_the_arena(daemon: Daemon) -> None:
    with daemon.connect() as client:
        with client.memory("policy", nbytes=MIB, device="cuda:0") as placed:
            live = Model()
        assert placed.tensors == 3 and all(gpu_of(value) == 0 for value in live.state_dict().values())
        assert client.adopt(live).tensors == 0, "all of it lies there already"
        flipped(client, live)
        del live


def test_a_module_on_several_devices_or_elsewhere_than_its_block_is_refused_and_stays(
    daemon: Daemon, gpus: fake_cuda.FakeGpus
) -> None:
    with daemon.connect() as client:
        mixed = Model(None)
        put_on_gpu(mixed.first.bias, 0)
        before = [param.data_ptr() for param in mixed.parameters()]
        with pytest.raises(refitd.RefusedError, match=r"first.weight in main memory, first.bias on GPU 0"):
            client.adopt(mixed)
        assert [param.data_ptr() for param in mixed.parameters()] == before
        elsewhere = "lies in main memory, and nbytes= asks for memory on GPU 0"
        with pytest.raises(refitd.RefusedError, match=elsewhere), client.memory("policy", nbytes=MIB, device="cuda:0"):
            plain = Model(None)
        gc.collect()
        eventually(lambda: release_dropped() == gpus.used() == 0, "nothing is left on the GPU")
        assert gpu_of(plain.first.weight) == -1
