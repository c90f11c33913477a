"""Cable speeds in the cluster file: invalid values are refused, and a reload reports the speeds that plans use."""

from __future__ import annotations

from pathlib import Path

import pytest

from refitd.clusters import GB, cables_of, load_cluster
from refitd.config import Config, TransportConfig
from refitd.coordinator.nodes import cables_for, read_cluster
from refitd.errors import ConfigError
from refitd.plan.cost import EQUAL
from refitd.protocol.reports import ReloadReport
from tests.support.cli import FakeClient, run

FILE = """
kind = "cluster"
name = "uneven"
nics_per_node = 1
nic_gb_s = 0.0124
[[nodes]]
name = "b"
send_gb_s = 0.003
"""


def test_a_cable_that_is_slow_one_way_is_stated_once(tmp_path: Path) -> None:
    file = tmp_path / "cables.toml"
    file.write_text(FILE)
    speeds = cables_of(load_cluster(file), ["a", "b"])
    assert speeds.send["b"] == pytest.approx(3e6) and speeds.receive["b"] == speeds.send["a"] == pytest.approx(12.4e6)
    assert speeds.default == pytest.approx(0.0124 * GB)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "kind is None"),
        ('kind = "cluster"\nname = "x"', "nic_gb_s: missing"),
        ('kind = "cluster"\nname = "x"\nnic_gb_s = 0', "nic_gb_s"),
        ('kind = "cluster"\nname = "x"\nnic_gb_s = 1\n[[nodes]]\nname = "a"\nsend_gb_s = nan', "send_gb_s"),
        ('kind = "cluster"\nname = "x"\nnic_gb_s = 1\n[[nodes]]\nname = "a"\nreceive_gb_s = -1.0', "receive_gb_s"),
    ],
)
def test_a_file_of_speeds_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cables.toml"
    config = Config(transport=TransportConfig(cables=str(file)))
    with pytest.raises(ConfigError, match=r"transport\.cables: .*cables\.toml"):
        read_cluster(config)
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_cluster(config)
    assert read_cluster(Config()) is None and cables_for(None, ["a"]) is EQUAL


def test_reload_says_by_which_speeds_plans_go() -> None:
    class Client(FakeClient):
        def reload(self):
            return ReloadReport(uses_keys=False, cables="uneven", absent=("n9",))

    ran = run(Client(), "reload")
    assert "cables: as uneven says" in ran.stdout and "n9" in ran.stdout and "nothing to read" not in ran.stdout
