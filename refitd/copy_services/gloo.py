"""Gloo: TCP between processes, in main memory. Tensors on accelerators go through staging buffers.

The in-process library uses it over a caller's process group. Workers use tcp.py, under the same name.
"""

from __future__ import annotations

from refitd.copy_services.packed import STAGING_BYTES
from refitd.copy_services.peers import Group, Peers
from refitd.copy_services.windows import WindowExchange


class GlooService(WindowExchange):
    """Exchanges tensors over a process group with a gloo backend. See ExchangeService for its contract."""

    name = "gloo"

    def __init__(
        self,
        group: Group = None,
        *,
        labels: tuple[str, ...] = (),
        message_bytes: int | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Use a group; None is the default group.

        Args:
            group: a torch process group with gloo for the CPU.
            labels: name of each position in errors, by default its rank.
            message_bytes: see PackedExchange.
            staging_bytes: see PackedExchange.
        """
        super().__init__(Peers(group, labels), message_bytes=message_bytes, staging_bytes=staging_bytes)
