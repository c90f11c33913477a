"""Two nodes over NIXL. Needs the package: `pip install 'refitd[nixl]'`; the conformance suite then tries it, too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from refitd.testing import Daemon, Engine, eventually
from tests.support import shards

pytest.importorskip("nixl")

Nodes = tuple[Daemon, ...]
CONFIG = '[transport]\nservice = "nixl"\n[deadlines]\nplan_s = 60.0\nstage_s = 10.0\ncommit_s = 10.0\n'


def test_bytes_cross_over_nixl_and_again_after_a_worker_died(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2, config=CONFIG, workers=(2, 2))
    with n0.connect() as c0, n1.connect() as c1:
        full, mine = shards.whole(0), shards.zeros_like(shards.whole(0))
        source = c0.register_source("policy", full)
        target = c1.register_target("policy", mine, replica="far")
        with Engine(target):
            for version in (1, 2, 3):
                for name, tensor in shards.whole(version).items():
                    full[name].copy_(tensor)
                source.publish(version)
                c0.swap("policy", version, timeout=60)
                assert shards.equal(mine, full)
                if version == 2:
                    os.kill(victim := n1.workers()[0], signal.SIGKILL)
                    eventually(lambda: victim not in n1.workers() and len(n1.workers()) == 2, "another worker is there")
        assert {link.service for link in c0.status().links} == {"nixl"}
        assert c0.verify("policy").outcome == "proven"
