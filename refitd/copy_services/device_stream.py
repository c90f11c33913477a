"""A CUDA stream of a service's own, with waits that end at a deadline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from refitd.copy_services.peers import Deadline
from refitd.copy_services.waits import poll


class DeviceStream:
    """One stream of one device. What is queued on it does not wait for, nor hold up, other streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        """The stream as CUDA's C interface takes it."""
        return int(self._stream.cuda_stream)

    @contextmanager
    def work(self, deadline: Deadline, subject: str) -> Iterator[None]:
        """Queue what torch does inside the block on this stream, behind what the caller's stream has been given.

        All of it has been done when the block has ended without an error.

        Raises:
            DeadlineExceeded: it has not, in time.
        """
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield
                self.settle(deadline, subject)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Queue what torch does inside the block on this stream, behind nothing else."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """Return an event behind everything that has been queued."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def settle(self, deadline: Deadline, subject: str) -> None:
        """Return once everything that has been queued is done.

        Raises:
            DeadlineExceeded: it is not, in time.
        """
        poll(self.mark().query, deadline, f"{subject}: {self.device} has not done what it was given")


@contextmanager
def on_streams(gpus: Sequence[int], timeout: float, subject: str) -> Iterator[None]:
    """Have what torch does inside the block, on these GPUs, run on streams of its own, and be done when it ends.

    Raises:
        DeadlineExceeded: a GPU has not done it in time.
    """
    deadline = Deadline.after(timeout)
    with ExitStack() as streams:
        for gpu in gpus:
            streams.enter_context(DeviceStream(torch.device("cuda", gpu)).work(deadline, subject))
        yield
