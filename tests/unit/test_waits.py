from __future__ import annotations

import threading
import time

import pytest

from refitd.copy_services import nccl, nvshmem
from refitd.copy_services.epoch import Epoch, Mailbox
from refitd.copy_services.peers import Deadline
from refitd.copy_services.waits import bounded, poll
from refitd.errors import ConfigError, DeadlineExceeded


def test_a_poll_ends_when_it_may_or_at_its_deadline_with_the_subject() -> None:
    answers = iter([False] * 3 + [True])
    poll(lambda: next(answers), Deadline.after(5), "rank 1 said nothing")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"^rank 1 said nothing within 0.05 s$"):
        poll(lambda: False, Deadline.after(0.05), "rank 1 said nothing")
    assert time.monotonic() - started < 2


def test_a_call_that_never_returns_is_left_at_its_deadline() -> None:
    stuck = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"making communicators did not end within 0\.05 s"):
        bounded(stuck.wait, Deadline.after(0.05), "making communicators")
    stuck.set()


def test_a_bounded_call_gives_what_it_returns_or_raises() -> None:
    assert bounded(lambda: None, Deadline.after(5), "a call") is None
    assert bounded(lambda: 3, Deadline.after(5), "a call") == 3
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, Deadline.after(5), "a call")


@pytest.mark.parametrize("join", [nccl.join, nvshmem.join])
def test_a_worker_without_a_cuda_device_is_refused_by_name(join) -> None:
    class Nothing(Mailbox):
        def put(self, key: str, value: bytes) -> None:
            raise AssertionError

        def get(self, key: str, timeout: float) -> bytes:
            raise AssertionError

    epoch = Epoch("e", 1, ("n0/0", "n1/0"), "127.0.0.1", 1 << 20, Nothing(), 1.0, bytes(32))
    with pytest.raises(ConfigError, match=r"n1/0: .* needs a CUDA device, this worker has 'cpu'"):
        join(epoch)
