"""The cable speeds that plans assume, from the cluster file that transport.cables names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from refitd.config import Config
from refitd.errors import ConfigError
from refitd.offline.clusters import ClusterSpeeds, cables_of, load_cluster, unknown_nodes
from refitd.plan.cables import EQUAL, Cables
from refitd.protocol.reports import ReloadReport


def read_cluster(config: Config) -> ClusterSpeeds | None:
    """Read the cluster file; None if none is configured: all cables count as equally fast.

    Raises:
        ConfigError: the file cannot be read, or lists what is wrong with it.
    """
    if not config.transport.cables:
        return None
    try:
        return load_cluster(config.transport.cables)
    except ConfigError as exc:
        raise ConfigError(f"transport.cables: {exc}") from exc


def cables_for(cluster: ClusterSpeeds | None, nodes: Iterable[str]) -> Cables:
    """Return the cables of these nodes, one name for each rank."""
    return EQUAL if cluster is None else cables_of(cluster, nodes)


def with_speeds(report: ReloadReport, cluster: ClusterSpeeds | None, nodes: Collection[str]) -> ReloadReport:
    """Add to a report the speeds that plans assume, and the nodes of the cluster file that are not connected."""
    if cluster is None:
        return report
    return replace(report, cables=cluster.name, absent=tuple(sorted(unknown_nodes(cluster, nodes))))
