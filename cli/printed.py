"""The `--json` output of commands whose result is not a report of the protocol."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class TraceWritten(msgspec.Struct, frozen=True):
    """The destination of a swap's trace; `clock_error_s` and `dropped_spans` are by node."""

    file: str | None
    otlp: str | None
    swap: str
    model: str
    version: int
    kind: str
    outcome: str
    reason: str
    began_unix_s: float
    clock_error_s: dict[str, float | None]
    dropped_spans: dict[str, int]
    missing: tuple[str, ...]


class Check(msgspec.Struct, frozen=True):
    """One check of `config check`; `state` is "ok" or "fail"."""

    name: str
    state: str
    found: str


class ConfigChecked(msgspec.Struct, frozen=True):
    """Whether the processes would start with this configuration."""

    valid: bool
    checks: tuple[Check, ...]


class ConfigShown(msgspec.Struct, frozen=True, rename={"origins": "from"}):
    """The configuration in force, and the file, variable or flag that has set each value ("section.key")."""

    configuration: Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"$ref": "#/$defs/Config"})]
    origins: dict[str, str]


class KeyMade(msgspec.Struct, frozen=True):
    """A key pair's name, its public key, and the files of both halves."""

    name: str
    public: str
    key_file: str
    public_file: str


class ManifestWritten(msgspec.Struct, frozen=True):
    """The file of a manifest, and how many ranks and different shards it has."""

    file: str
    ranks: int
    shards: int


class BundleItem(msgspec.Struct, frozen=True):
    """One file of a support bundle."""

    name: str
    bytes: int
    note: str


class DocsPrinted(msgspec.Struct, frozen=True):
    """Pages and their titles, and the text of the page that was asked for."""

    pages: dict[str, str]
    text: str = ""


class BundleWritten(msgspec.Struct, frozen=True):
    """A support bundle and its contents."""

    file: str
    items: tuple[BundleItem, ...]


class DashboardServed(msgspec.Struct, frozen=True):
    """The page's address; printed once it is served."""

    url: str


class SwapAborted(msgspec.Struct, frozen=True):
    """The swap of this model was stopped, for this reason."""

    model: str
    aborted: bool
    reason: str


class Senders(msgspec.Struct, frozen=True):
    """How evenly senders are loaded; local copies do not count."""

    senders: int
    mean_bytes: float
    max_bytes: int
    max_rank: int
    max_over_mean: float


class RankMemory(msgspec.Struct, frozen=True):
    """The bytes of one rank's tensors as a source and while staging."""

    rank: int
    source_bytes: int
    staging_bytes: int


class RankPair(msgspec.Struct, frozen=True):
    """The transfers between two ranks, numbered over all manifests, sources first."""

    source: int
    target: int
    bytes: int
    copies: int


class ParameterSent(msgspec.Struct, frozen=True):
    """The transfers of one parameter, over all targets."""

    name: str
    bytes: int
    copies: int


class ManifestPlanned(msgspec.Struct, frozen=True):
    """The transfers of a refit between manifests.

    `bytes` and `pairs` count the needs of single ranks; `crossing_bytes` cross between nodes, where data for several
    ranks of a node counts once.
    """

    source: str
    targets: tuple[str, ...]
    ranks: int
    bytes: int
    local_bytes: int
    crossing_bytes: int
    copies: int
    plan_s: float
    digest: str
    senders: Senders
    memory: tuple[RankMemory, ...]
    pairs: tuple[RankPair, ...]
    parameters: tuple[ParameterSent, ...]
    unused_sources: tuple[str, ...]


class SimulatedPhase(msgspec.Struct, frozen=True):
    """One phase of a simulated swap."""

    name: str
    seconds: float


class SimulatedCable(msgspec.Struct, frozen=True):
    """The bytes over a cable, its speed, and the share of the time that it is busy."""

    name: str
    bytes: int
    gb_s: float
    busy: float


class SimulatedRoute(msgspec.Struct, frozen=True):
    """How long a swap takes by one route, and its busiest cables."""

    route: str
    seconds: float
    phases: tuple[SimulatedPhase, ...]
    crossing_bytes: int
    sent_bytes: int
    chain: int
    cables: tuple[SimulatedCable, ...]


class Simulated(msgspec.Struct, frozen=True):
    """How long a refit between manifests would take on a cluster; `changed` is the share for deltas.

    `defaults` are the constants that the cluster file leaves at their defaults.
    """

    cluster: str
    note: str
    defaults: dict[str, int | float | str]
    digest: str
    ranks: int
    changed: float
    routes: tuple[SimulatedRoute, ...]


Box = tuple[tuple[int, int], ...]  # [start, stop] of each dimension


class HeldBoxes(msgspec.Struct, frozen=True):
    """One rank's boxes of a tensor, and its local name; a box is [start, stop] of each dimension."""

    rank: int
    local: str
    boxes: tuple[Box, ...]


class BoxSent(msgspec.Struct, frozen=True):
    """A box that one rank sends another."""

    source: int
    target: int
    box: Box
    bytes: int


class TensorExplained(msgspec.Struct, frozen=True):
    """A tensor's place on each side, and its transfers; `planned_by` is null if the plan is refused."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: tuple[HeldBoxes, ...]
    destination: tuple[HeldBoxes, ...]
    planned_by: str | None
    transfers: tuple[BoxSent, ...]


class Explained(msgspec.Struct, frozen=True):
    """The tensors that a parameter's name means."""

    tensors: tuple[TensorExplained, ...]


class MXFP8Saved(msgspec.Struct, frozen=True):
    """The savings of a demo engine that holds MXFP8."""

    bfloat16_bytes: int
    arriving_bytes: int
    held_bytes: int
    equal_to_whole_converted_once: bool
    logits_max_abs_diff: float
    argmax_agreement: float


class DemoRan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The results of the demo; lists have an item for each swap, `mxfp8` needs --mxfp8."""

    swaps: int
    versions: tuple[int, ...]
    bytes_per_swap: int
    seconds_per_swap: float
    stage_seconds: tuple[float, ...]
    total_seconds: tuple[float, ...]
    publish_seconds: tuple[float, ...]
    paused_seconds: dict[str, tuple[float, ...]]
    commit_ways: dict[str, str]
    digests_verified: int
    losses: tuple[float, ...]
    replicas: int
    layouts: dict[str, str]
    weights_equal: bool
    tensors_compared: int
    bytes_compared: int
    logits_max_abs_diff: float
    logits_tolerance: float
    argmax_agreement: float
    data_ptrs_unchanged: bool
    seconds: float
    mxfp8: dict[str, MXFP8Saved] = {}
