"""During the capture of a CUDA graph nothing waits for the GPU: calls are refused, and work after the capture."""

from __future__ import annotations

import pytest
import torch

import refitd
from refitd.testing import Daemon
from tests.support import shards
from tests.support.fake_calls import Calls
from tests.support.fake_torch.device_shim import put_on_gpu
from tests.support.fleet import go_live
from tests.support.gpu_tensors import allocated, copy_into, private


def test_versions_are_neither_published_nor_lent_nor_modules_adopted_during_a_capture(daemon: Daemon) -> None:
    module = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    for tensor in module.parameters():
        put_on_gpu(tensor, 0)
    calls = Calls()
    with daemon.connect() as client:
        full = private(shards.whole(1), 0)
        lent = allocated(client, full, "cuda:0")
        copy_into(lent, full)
        source, lender = (client.register_source(model, given) for model, given in (("policy", full), ("lent", lent)))
        live = shards.zeros_like(full)
        target = client.register_target("policy", live, replica="r")
        with calls.capture(is_blocking=True):
            for refused, given in ((source.publish, 1), (lender.lend, 1), (client.adopt, module)):
                with pytest.raises(refitd.RefusedError, match="a CUDA graph is being captured on GPU 0, and no"):
                    refused(given)
        go_live(client, source, 1, target)
        assert shards.equal(live, full)
        with lender.lend(1):
            pass
        assert client.adopt(module).tensors == 2
        lent.clear()
        del module, tensor, given
    calls.close()
