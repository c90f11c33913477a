"""Times how fast one worker's bytes reach another, over the copy service of an epoch, as weights would travel."""

from __future__ import annotations

import time

import torch

from refitd.copy_services.exchange import ExchangeService
from refitd.errors import RefitdError
from refitd.protocol import sidecar
from refitd.protocol.base import clipped

# One piece, sent again and again from one buffer and into one, so that no more memory is needed. Who gets all of them
# in less time has a cable of more than PIECES * PIECE_BYTES / seconds.
PIECE_BYTES = 8 << 20
PIECES = 512
# Who sends goes on this much longer than who receives wants, who then closes the connection; all of it ends at the
# latest this much later.
_LONGER_S, _MARGIN_S = 0.5, 2.0


class _Enough(Exception):
    """The time is over."""


def measure(service: ExchangeService, asked: sidecar.TimeCable) -> sidecar.CableTimed:
    """Send to another worker of the service's group, or receive from it.

    The service cannot be used afterwards: both ends stop in the middle. What is counted comes after the first message.
    """
    buffer, peer = torch.zeros(PIECE_BYTES, dtype=torch.uint8), service.ranks[asked.peer]
    note = service.send if asked.sends else service.receive
    for part in range(PIECES):
        note(0, buffer, peer, part=part)
    wanted_s = asked.seconds + (_LONGER_S if asked.sends else 0.0)
    begun, arrived = 0.0, [(0.0, 0)]

    def progress(nbytes: int) -> None:
        nonlocal begun
        now = time.monotonic()
        begun = begun or now
        if nbytes > arrived[-1][1]:
            arrived.append((now, nbytes))
        if now - begun >= wanted_s:
            raise _Enough

    reason = ""
    try:
        service.run(asked.seconds + _LONGER_S + _MARGIN_S, on_progress=progress)
    except _Enough:
        pass
    except RefitdError as exc:
        reason = str(exc)
    if asked.sends:
        return sidecar.CableTimed(asked.run)
    if len(arrived) < 3:
        reason = reason or f"less than two messages arrived within {asked.seconds:g} s"
        return sidecar.CableTimed(asked.run, reason=clipped(reason))
    (began, before), (ended, after) = arrived[1], arrived[-1]
    return sidecar.CableTimed(asked.run, after - before, began, ended)
