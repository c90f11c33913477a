"""refitctl dashboard: the cluster as a page for a browser on this machine."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from threading import Thread
from typing import TYPE_CHECKING

import click

from refitd.errors import ConfigError, RefitdError, RefusedError
from refitd.metrics import HttpServer
from refitd.protocol.reports import StatusReport
from refitd_cli.dashboard import Pages, Shown
from refitd_cli.opened import Opened
from refitd_cli.output import say
from refitd_cli.printed import DashboardServed
from refitd_cli.session import Connection, Duration, Session, asks

if TYPE_CHECKING:
    from refitd.client import Client

SWAPS = 50
LOOPBACK = "127.0.0.1"
CLOSE_S = 5.0


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=9480, show_default=True, help="0: any free one.")
@click.option(
    "--interval",
    type=Duration(min=0.2, max=3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two questions to the cluster.",
)
@asks
def dashboard(session: Session, port: int, interval: float) -> None:
    """Serve a page that shows models, replicas (laggards first), plans, swaps and their traces, until Ctrl-C.

    The page changes nothing, and is served to this machine alone: on 127.0.0.1, where its other users can read it, too.
    """
    latest = Latest(session)
    latest.refresh()
    try:
        server = HttpServer((LOOPBACK, port), (), Pages(lambda: latest.shown, latest.opened), "--port")
    except RefusedError:
        latest.close()
        raise
    with closing(latest), closing(server), suppress(KeyboardInterrupt):
        url = f"http://{LOOPBACK}:{server.address[1]}/"
        session.show(DashboardServed(url), lambda _: say(f"{url} shows the cluster; Ctrl-C ends"))
        if latest.shown.problem:
            say(f"no answer yet: {latest.shown.problem}", err=True)
        while True:
            time.sleep(interval)
            latest.refresh()


class Latest:
    """The cluster's last answers; a daemon that is away is looked for again and again.

    Attributes:
        shown: the content of the page.
        opened: the parts that readers have opened.
    """

    def __init__(self, session: Session) -> None:
        self._connection = Connection(session)
        self.shown = Shown(None, (), time.time())
        self.opened = Opened()
        self._asking = Thread()

    def refresh(self) -> None:
        """Ask once; the page tells why there is no answer.

        Raises:
            ConfigError, RefusedError: this program may not ask, or asks in a wrong place.
        """
        try:
            with self._connection.client() as client:
                status, history = client.status(), client.history("", SWAPS)
        except RefitdError as exc:
            if self.shown.status is None and isinstance(exc, ConfigError | RefusedError):
                raise
            self.shown = Shown(self.shown.status, self.shown.swaps, self.shown.at, str(exc))
        else:
            self.shown = Shown(status, history.swaps, time.time())
            if not self._asking.is_alive():
                self._asking = Thread(target=self._ask, args=(client, status), name="refitd-opened", daemon=True)
                self._asking.start()

    def _ask(self, client: Client, status: StatusReport) -> None:
        """Request opened parts on a separate thread: a large plan takes long and must not delay the status."""
        with suppress(RefitdError):  # a daemon that is away is found by the next question for the status
            self.opened.ask(client, status)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()  # which ends what is being asked
        if self._asking.is_alive():
            self._asking.join(CLOSE_S)
