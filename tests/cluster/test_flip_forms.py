"""Forms of tensors, sizes and limits under which arenas are exchanged."""

# these closures run before their loop goes on

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import refitd
from refitd.buffers import arena as arenas
from refitd.buffers import mapping
from refitd.testing import Daemon, Engine, eventually
from tests.support.flips import quietly

pytestmark = pytest.mark.slow  # random, or many: test_flip_accidents.py and test_flip_returns.py are what was found


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
@pytest.mark.parametrize("error", [OSError(12, "no"), KeyboardInterrupt()])
def test_an_exchange_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, fails: int, error: BaseException
) -> None:
    nbytes = 3 * 4096 + 100
    pair = []
    for value in (1, 2):
        fd = arenas.create(nbytes, "x")
        one = arenas.MappedArena(fd, nbytes, write=True)
        os.close(fd)
        one.bytes[:] = value
        pair.append(one)
    calls = [0]

    class Kernel:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def mremap(self, *given: int) -> int:
            calls[0] += 1
            if calls[0] == fails + 1 and fails < 3:
                raise error
            return int(real.mremap(*given))

    real = mapping._libc
    monkeypatch.setattr(mapping, "_libc", Kernel())
    if fails == 3:
        pair[0].exchange(pair[1])
    else:
        with pytest.raises(refitd.ArenaError if isinstance(error, OSError) else KeyboardInterrupt):
            pair[0].exchange(pair[1])
    monkeypatch.undo()
    first = 2 if fails == 3 else 1
    assert set(pair[0].bytes) == {first} and set(pair[1].bytes) == {3 - first}
    pair[0].bytes[:] = 9
    assert set(pair[1].bytes) == {3 - first}
    pair[0].exchange(pair[1])
    assert set(pair[1].bytes) == {9} and set(pair[0].bytes) == {3 - first}


def test_views_casts_and_large_arenas(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect() as trainer, daemon.connect() as engine:
        given = {"w": torch.zeros(40, 30), "b": torch.zeros(13), "s": torch.zeros(())}
        source = trainer.register_source("policy", given)
        bases = engine.allocate(
            {
                "w": ((30, 40), torch.bfloat16),
                "b": ((13,), torch.bfloat16),
                "s": ((), torch.bfloat16),
                "z": ((0,), torch.int8),
            }
        )
        live = {"w": bases["w"].t(), "b": bases["b"], "s": bases["s"]}
        target = engine.register_target("policy", live, replica="a", cast=True)
        big = engine.allocate({"w": ((40, 30), torch.float32), "b": ((13,), torch.float32), "s": ((), torch.float32)})
        other = engine.register_target("policy", big, replica="b")
        assert other.flips
        print("cast flips", target.flips)
        for number in range(1, 6):
            given["w"].copy_(torch.arange(1200).reshape(40, 30) % 97 + number)
            given["b"].fill_(number)
            given["s"].fill_(number)
            source.publish(number)
            with Engine(target, other):
                trainer.swap("policy", number, timeout=30)
            for name, held in live.items():
                assert torch.equal(held, given[name].to(torch.bfloat16)), (name, number)
                assert torch.equal(big[name], given[name])
        assert trainer.verify("policy").outcome == "proven"
        with Engine(target, other):
            trainer.rollback("policy", timeout=30)
        given["b"].fill_(4)
        assert torch.equal(big["b"], given["b"]) and torch.equal(live["b"], given["b"].bfloat16())
        for one in (target, other):
            one.close()
        again = engine.register_target("policy", big, replica="b")
        with Engine(again):
            eventually(lambda: again.version == 4, "again")
        again.close()
        lent = engine.register_source("lent", big)
        plain = {name: torch.zeros_like(tensor) for name, tensor in big.items()}
        last = trainer.register_target("lent", plain, replica="x")
        with Engine(last), lent.lend(1):
            trainer.swap("lent", 1, timeout=30)
        assert torch.equal(plain["b"], given["b"])
        lent.close()
        engine.free(big)


def test_a_large_arena_and_verification_under_flips(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(workers=2)
    with daemon.connect() as trainer, daemon.connect() as engine, daemon.connect() as checker:
        given = {"w": torch.zeros(70 << 20, dtype=torch.uint8), "n": torch.zeros(3, dtype=torch.uint8)}
        source = trainer.register_source("policy", given)
        live = engine.allocate({name: (tuple(t.shape), t.dtype) for name, t in given.items()})
        target = engine.register_target("policy", live, replica="a", mode="flip")
        found: list[str] = []
        stop = threading.Event()

        def verify() -> None:
            while not stop.is_set():
                report = quietly(lambda: checker.verify("policy", timeout=10))
                found.append(getattr(report, "outcome", repr(report)))
                if found[-1] == "differs":
                    found.append(repr(report))

        thread = threading.Thread(target=verify)
        thread.start()
        try:
            with Engine(target):
                for number in range(1, 25):
                    given["w"].fill_(number)
                    source.publish(number)
                    trainer.swap("policy", number, timeout=30)
                    assert live["w"][::4096].unique() == number
                    if number % 5 == 0:
                        assert trainer.rollback("policy", timeout=30).bytes == 0
                        assert live["w"][::4096].unique() == number - 1
        finally:
            stop.set()
            thread.join()
        assert "differs" not in found, [f for f in found if f not in ("proven", "unknown")][:3]
        print("\nVERIFIED", {f: found.count(f) for f in set(found)})
        assert trainer.verify("policy").outcome == "proven"


LIMITED = """
import sys, resource, refitd, torch
client = refitd.connect(sys.argv[1])
live = client.allocate({"w": ((1 << 20,), torch.float32)})
target = client.register_target("policy", live, replica="a")
used = int(open("/proc/self/statm").read().split()[0]) * 4096
print("flips", target.flips, flush=True)
for number in (1, 2, 3, 4):
    if number in (2, 3):
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
    else:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert target.wait(number) == number
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(number, live["w"][::1024].unique().tolist(), flush=True)
while True:
    target.poll()
"""


def test_no_address_space_for_the_exchange(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect() as trainer:
        given = {"w": torch.zeros(1 << 20)}
        source = trainer.register_source("policy", given)
        engine = subprocess.Popen(
            [sys.executable, "-c", LIMITED, str(daemon.directory)], stdout=subprocess.PIPE, text=True
        )
        assert engine.stdout is not None
        try:
            assert engine.stdout.readline().strip() == "flips True"
            for number in (1, 2, 3, 4):
                given["w"].fill_(number)
                source.publish(number)
                trainer.swap("policy", number, timeout=30)
                assert engine.stdout.readline().strip() == f"{number} [{float(number)}]"
                assert trainer.verify("policy").outcome == "proven"
        finally:
            engine.kill()
            engine.wait()
