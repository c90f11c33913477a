"""A CUDA stream of a service's own, with waits that end at a deadline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from refitd.copy_services.peers import Deadline
from refitd.copy_services.waits import poll


class DeviceStream:
    """One stream of one device. Work on it neither waits for other streams nor delays them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        """The stream's handle in CUDA's C interface."""
        return int(self._stream.cuda_stream)

    @contextmanager
    def work(self, deadline: Deadline, subject: str) -> Iterator[None]:
        """Queue torch's work inside the block on this stream, after the work of the caller's stream.

        All of it is done when the block ends without an error.

        Raises:
            DeadlineExceeded: it is not done in time.
        """
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield
                self.settle(deadline, subject)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Queue torch's work inside the block on this stream, without waiting for others."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """Return an event that completes after everything queued so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def settle(self, deadline: Deadline, subject: str) -> None:
        """Return once everything queued so far is done.

        Raises:
            DeadlineExceeded: it is not done in time.
        """
        poll(self.mark().query, deadline, f"{subject}: {self.device} has not done what it was given")


@contextmanager
def on_streams(gpus: Sequence[int], timeout: float, subject: str) -> Iterator[None]:
    """Run torch's work inside the block on a new stream of each of these GPUs; it is done when the block ends.

    Raises:
        DeadlineExceeded: a GPU is not done in time.
    """
    deadline = Deadline.after(timeout)
    with ExitStack() as streams:
        for gpu in gpus:
            streams.enter_context(DeviceStream(torch.device("cuda", gpu)).work(deadline, subject))
        yield
