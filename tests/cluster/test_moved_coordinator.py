"""A coordinator is moved to another host with its journal file; daemons list both addresses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping

import pytest

from refitd.testing import Cluster, Coordinator, eventually
from refitd.testing.daemon import free_port
from tests.support.led import Fleet

pytestmark = pytest.mark.slow


class Movable(Cluster):
    """A cluster whose daemons list two coordinators, only one of them running."""

    elsewhere = ""

    def environment(self, name: str) -> Mapping[str, str]:
        self.elsewhere = self.elsewhere or f"tcp://127.0.0.1:{free_port()}"
        both = json.dumps([self.endpoint, self.elsewhere])
        return {"REFITD_COORDINATOR__ENDPOINT": both} if name in self._nodes else {}

    def moved(self) -> Coordinator:
        """Copy the journal as the guide does, and start a coordinator with the copy."""
        folder = self.folder / "moved"
        folder.mkdir(mode=0o700)
        for path in self.journal.parent.glob("journal.sqlite*"):
            shutil.copy(path, folder)
        options = self._options("coordinator")
        options["environment"] = {**options["environment"], "REFITD_COORDINATOR__ENDPOINT": self.elsewhere}
        return Coordinator(self._config, name="moved", **options).start()


def test_daemons_find_the_coordinator_where_its_journal_has_gone_and_the_old_one_finds_no_daemon() -> None:
    with Movable(config="[deadlines]\ncommit_s = 5.0\n") as cluster:
        fleet = Fleet(cluster.daemons)
        with fleet.polling():
            fleet.insist()
            fleet.insist()
            assert cluster.coordinator.stop() == []
            moved = cluster.moved()
            took_s = fleet.insist()
            assert took_s < 15
            assert fleet.held() == [3.0, 3.0] and fleet.torn() == []
            with cluster.daemons["n0"].connect("history") as client:
                assert [swap.version for swap in client.history("policy").swaps] == [3, 2, 1]
            assert "live-recovered" not in moved.log()  # the journal had it
            # the danger: an operator restarts the old coordinator with its old journal
            cluster.coordinator.start()
            fleet.insist()
            assert "event=node " not in cluster.coordinator.log().rpartition("event=ready")[2]
            # when the new one ends, the daemons know more than the old journal
            assert moved.stop() == []
            fleet.insist()
            said = cluster.coordinator.log().rpartition("event=ready")[2]
            assert "event=live-recovered" in said and "the journal is older than what this daemon was told" in said
            eventually(lambda: fleet.held() == [5.0, 5.0], "both serve it")
            assert fleet.torn() == []
        fleet.close()
