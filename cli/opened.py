"""Parts opened on the dashboard's page: plans and traces, requested from the cluster only then, and cached."""

from __future__ import annotations

from collections import OrderedDict

from refitd.errors import DeadlineExceeded, RefitdError, TransportError
from refitd.protocol.reports import StatusReport
from refitd_cli import html
from refitd_cli.session import ControlClient
from refitd_cli.timeline import timeline

# What is kept, and what is asked of the cluster before its status is asked for again.
MAX_KEPT = 32
MAX_ASKED = 4

PLAN, TRACE, RUNNING = "plan", "trace", "running"
NOT_YET = html.line("asking the cluster ...", "dim")


class Opened:
    """Parts of the page by their paths: /plan/=MODEL/=VIEW, /trace/=MODEL/=SWAP, /running/=MODEL/=SWAP.

    The page's thread calls `part`, the one that talks to the cluster `ask`: the page never waits for the cluster.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, None] = {}
        self._found: OrderedDict[str, tuple[str, bool]] = OrderedDict()

    def part(self, path: str) -> tuple[str, bool] | None:
        """Return a part as HTML and whether it stays like that; None if there is no such path."""
        words = html.words_of(path)
        if len(words) != 3 or words[0] not in (PLAN, TRACE, RUNNING):
            return None
        found = self._found.get(path, (NOT_YET, False))
        if not found[1] and len(self._wanted) < MAX_KEPT:
            self._wanted[path] = None
        return found

    def ask(self, client: ControlClient, status: StatusReport) -> None:
        """Request the parts that were opened since the last call.

        Raises:
            TransportError: the daemon is away.
        """
        for path in list(self._wanted)[:MAX_ASKED]:
            del self._wanted[path]
            try:
                found = _made(path, client, status), not path.startswith(f"/{RUNNING}/")
            except RefitdError as exc:
                if isinstance(exc, TransportError) and not isinstance(exc, DeadlineExceeded):
                    raise
                found = html.line(str(exc), "warn"), False
            self._found[path] = found
            self._found.move_to_end(path)
            while len(self._found) > MAX_KEPT:
                self._found.popitem(last=False)


def _made(path: str, client: ControlClient, status: StatusReport) -> str:
    kind, name, what = html.words_of(path)
    if kind != PLAN:
        return timeline(client.trace(name, what))
    from refitd_cli.plan_map import plan_map  # it needs numpy, which takes half of the time of `refitctl --help`

    model = next((one for one in status.models if one.model == name), None)
    return (
        html.line("this model is not registered any more", "warn")
        if model is None
        else plan_map(client.plan(name), model)
    )
