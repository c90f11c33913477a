"""A source that may be rounded: each destination has the trainer's values, rounded only to the destination's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

import refitd
from refitd import MXFP8Buffer
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support import shards
from tests.support.fleet import CutSource, go_live
from tests.support.names import policy

Tensors = dict[str, torch.Tensor]
Nodes = Callable[..., tuple[Daemon, ...]]

ROUNDED, EXACT = torch.bfloat16, torch.float32


def made(version: int) -> Tensors:
    """Float32 values that bfloat16 cannot hold, as a function of the version."""
    generator = torch.Generator().manual_seed(version)
    return {
        "gate": torch.randn(8, 16, generator=generator),
        "bias": torch.randn(8, generator=generator) + 100,
        "up": torch.randn(24, 16, generator=generator),
        "steps": torch.arange(3) + version,
    }


def zeros(**dtypes: torch.dtype) -> Tensors:
    """Tensors of an engine, in bfloat16 by default."""
    return {
        name: torch.zeros(t.shape, dtype=dtypes.get(name, ROUNDED) if t.is_floating_point() else t.dtype)
        for name, t in made(0).items()
    }


def holds(live: Tensors, version: int) -> bool:
    """Return whether each tensor has the version's values, rounded once to the tensor's dtype."""
    return all(torch.equal(live[name], t.to(live[name].dtype)) for name, t in made(version).items())


def fill(held: Tensors, version: int) -> None:
    for name, tensor in made(version).items():
        held[name].copy_(tensor)


def test_float32_destinations_of_a_rounding_source_get_float32_bytes(daemon: Daemon) -> None:
    held, live, plain = made(0), zeros(gate=EXACT, bias=EXACT), zeros()
    with daemon.connect() as trainer, daemon.connect() as engine, daemon.connect() as other:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        with (
            Engine(engine.register_target(policy(), live, replica="a")),
            Engine(other.register_target(policy(), plain, replica="b")),
        ):
            for version in range(1, 5):
                fill(held, version)
                go_live(trainer, source, version)
                assert holds(live, version) and holds(plain, version)
                assert trainer.verify(policy(), timeout=60).outcome == "proven"
            offered = {t.name: t for t in trainer.describe(policy()).shards[0].tensors}
            # no engine has this tensor in float32, so the source rounds it, as before
            assert (offered["up"].dtype, offered["up"].cast_from) == ("bfloat16", "float32")
            assert (offered["gate"].dtype, offered["gate"].cast_to) == ("float32", "bfloat16")


def test_a_version_rounded_before_such_an_engine_came_is_refused_by_name_and_the_next_is_exact(daemon: Daemon) -> None:
    held, live, plain = made(1), zeros(gate=EXACT), zeros()
    with daemon.connect() as trainer, daemon.connect() as engine, daemon.connect() as other:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        with Engine(other.register_target(policy(), plain, replica="b")):
            go_live(trainer, source, 1)
            with Engine(engine.register_target(policy(), live, replica="a")):
                with pytest.raises(refitd.RefitdError, match=r"gate: dtype is .*rounded .* float32 to bfloat16"):
                    trainer.plan(policy())
                fill(held, 2)
                go_live(trainer, source, 2)
                assert holds(live, 2) and holds(plain, 2)


@pytest.mark.parametrize("cast", [{"*": "bfloat16"}, {"gate": torch.bfloat16, "*": "bfloat16"}])
def test_a_cast_asked_for_by_name_is_not_overridden(daemon: Daemon, cast: dict[str, object]) -> None:
    held, live = made(1), zeros(gate=EXACT)
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), held, cast=cast)
        assert trainer.tensors(policy())["gate"][1] == torch.bfloat16
        with Engine(engine.register_target(policy(), live, replica="a", cast=True)):
            go_live(trainer, source, 1)
        assert torch.equal(live["gate"], held["gate"].bfloat16().float())


def test_a_name_in_cast_keeps_a_tensor_as_it_is_held(daemon: Daemon) -> None:
    held, live = made(1), zeros(gate=EXACT)
    with daemon.connect() as trainer, daemon.connect() as engine:
        for cast, words in (
            ({"gat": "float32"}, "'gat' has a cast, and no tensor"),
            ({"gate": "int8"}, "cast of 'gate' is 'int8'"),
            ({3: "float32"}, "cast names 3"),
        ):
            with pytest.raises(refitd.RefusedError, match=words):
                trainer.register_source(policy(), held, cast=cast)
        source = trainer.register_source(policy(), held, cast={"*": "bfloat16", "gate": "float32"})
        with Engine(engine.register_target(policy(), live, replica="a")):
            go_live(trainer, source, 1)
        assert holds(live, 1)


def test_engines_of_three_dtypes_take_one_version_each_rounded_once(daemon: Daemon) -> None:
    held = made(0)
    lives = {"a": zeros(), "b": zeros(**dict.fromkeys(held, torch.float16)), "c": zeros(**dict.fromkeys(held, EXACT))}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        targets = [engine.register_target(policy(), live, replica=name, cast=True) for name, live in lives.items()]
        with Engine(*targets):
            for version in (1, 2):
                fill(held, version)
                go_live(trainer, source, version)
                assert all(holds(live, version) for live in lives.values())
        assert trainer.verify(policy(), timeout=60).outcome == "proven"


def test_a_fused_destination_takes_rounded_and_unrounded_tensors_of_one_source(daemon: Daemon) -> None:
    held = {"q": torch.randn(4, 8), "k": torch.randn(4, 8)}
    fused, exact = torch.zeros(8, 8, dtype=ROUNDED), torch.zeros(4, 8)
    tiles = (refitd.Tile("q", (0, 0), (4, 8), 0, (8, 1)), refitd.Tile("k", (0, 0), (4, 8), 32, (8, 1)))
    described = refitd.ParameterMetadata("qk", (8, 8), ROUNDED, 2, owner_rank=0, tiles=tiles)
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        both = {"qk": fused}, {"k": exact, "q": torch.zeros(4, 8, dtype=ROUNDED)}
        targets = [
            engine.register_target(policy(), both[0], replica="a", metadata=[described]),
            engine.register_target(policy(), both[1], replica="b"),
        ]
        with Engine(*targets):
            for version in (1, 2):
                held["k"].mul_(1.1)
                go_live(trainer, source, version)
                assert torch.equal(fused, torch.cat([held["q"], held["k"]]).bfloat16())
                assert torch.equal(exact, held["k"])


def test_all_ranks_of_a_source_offer_a_split_tensor_unrounded(daemon: Daemon) -> None:
    live = {name: t.float() for name, t in shards.zeros_like(shards.whole(0)).items()}
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = CutSource([trainer], 2, {name: t.float() for name, t in shards.whole(0).items()}, cast="bfloat16")
        with Engine(engine.register_target(policy(), live, replica="a", cast=True)):
            for version in (1, 2, 3):
                full = {name: t.float() / 3 for name, t in shards.whole(version).items()}
                sources.publish(full, version)
                trainer.swap(policy(), version, timeout=60)
                assert all(torch.equal(live[name], full[name]) for name in live)


def test_deltas_and_relays_of_a_source_that_widens_hold_the_exact_values(nodes: Nodes) -> None:
    first, *others = nodes(3)
    held = made(0)
    with first.connect() as trainer, others[0].connect() as one, others[1].connect() as two:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        plain = one.allocate({name: (tuple(t.shape), t.dtype) for name, t in zeros().items()})  # it flips
        live = zeros(gate=EXACT)
        with Engine(one.register_target(policy(), plain, replica="b")):
            for version in (1, 2):  # a rounded version, and a delta on a rounded base
                held["up"][version] += 1
                go_live(trainer, source, version)
            with Engine(two.register_target(policy(), live, replica="a")):
                for version in (3, 4, 5):
                    held["gate"][version % 8] *= 1.01
                    go_live(trainer, source, version)
                    for mine in (plain, live):
                        assert all(torch.equal(mine[name], t.to(mine[name].dtype)) for name, t in held.items())
                    assert trainer.verify(policy(), timeout=60).outcome == "proven"


def test_a_flipping_engine_and_a_streamed_source_follow_each_dtype(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in made(0).items()}
        source = trainer.declare_source(policy(), shapes, cast="bfloat16")
        wanted = {name: (tuple(t.shape), t.dtype) for name, t in zeros(bias=EXACT).items()}
        live = engine.allocate(wanted)
        target = engine.register_target(policy(), live, replica="a")
        assert target.flips
        with Engine(target):
            for version in (1, 2, 3):
                source.publish_from(version, made(version).items())
                assert trainer.swap(policy(), version, timeout=60).outcome == "committed"
                assert holds(live, version)


def test_a_source_that_widened_is_registered_again_with_its_daemon(daemon: Daemon) -> None:
    held, live = made(0), zeros(gate=EXACT)
    with daemon.connect(reconnect=True) as trainer:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        with daemon.connect() as engine, Engine(engine.register_target(policy(), live, replica="a")):
            fill(held, 1)
            go_live(trainer, source, 1)
        daemon.kill()
        daemon.start()
        with daemon.connect() as engine, Engine(engine.register_target(policy(), live, replica="a")):
            fill(held, 2)
            go_live(trainer, source, 2)
            assert holds(live, 2)


def test_mxfp8_engines_of_a_rounding_source_hold_what_bfloat16_gives_beside_float32_engines(daemon: Daemon) -> None:
    held = {"w": torch.randn(64, 64), "gate": torch.randn(8, 64)}
    oracle = MXFP8Buffer.empty((64, 64))
    sent, made_here = MXFP8Buffer.empty((64, 64)), MXFP8Buffer.empty((64, 64))
    exact = {name: torch.zeros_like(t) for name, t in held.items()}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        gates = [torch.zeros(8, 64, dtype=ROUNDED) for _ in range(2)]
        targets = [
            engine.register_target(policy(), {"w": sent, "gate": gates[0]}, replica="sent", convert_on_send=True),
            engine.register_target(policy(), {"w": made_here, "gate": gates[1]}, replica="made"),
            engine.register_target(policy(), exact, replica="exact"),
        ]
        with Engine(*targets):
            for version in (1, 2):
                held["w"].mul_(1.7)
                go_live(trainer, source, version)
                oracle.quantize(held["w"].bfloat16())
                for found in (sent, made_here):
                    assert torch.equal(found.data, oracle.data) and torch.equal(found.scale, oracle.scale)
                assert shards.equal(exact, held)
                assert all(torch.equal(gate, held["gate"].bfloat16()) for gate in gates)
        assert trainer.verify(policy(), timeout=60).outcome == "proven"


def test_a_swap_that_reads_an_older_version_is_not_aborted_for_wider_tensors(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refitd.client.slot_source.SWAP_ENDS_S", 0.1)
    held, live, plain = made(1), zeros(gate=EXACT), zeros()
    with daemon.connect() as trainer, daemon.connect() as engine, daemon.connect() as operator:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        slow = engine.register_target(policy(), plain, replica="b")
        source.publish(1)
        swap = RunningSwap(operator, policy(), 1)
        eventually(lambda: slow.pending == 1, "version 1 is decided, and not committed")
        target = engine.register_target(policy(), live, replica="a")
        source.publish(2)  # rounded once more: the swap of version 1 reads this source
        with Engine(slow, target):
            assert swap.result().outcome == "committed"
            fill(held, 3)
            go_live(trainer, source, 3)
            assert holds(live, 3) and holds(plain, 3)


def test_a_source_without_memory_for_wider_tensors_says_so_and_goes_on_once_there_is_room(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(f"[node]\nmax_arena_bytes = {8 << 20}\n")
    held = {"w": torch.randn(256, 1024)}  # slots of 0.5 MiB each rounded, 1 MiB unrounded
    live = {"w": torch.zeros(256, 1024)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        target = engine.register_target(policy(), live, replica="a")
        room = daemon.node().arena_bytes
        filler = engine.allocate({"x": (((8 << 20) - room - (1 << 19),), torch.uint8)})
        with pytest.raises(refitd.ArenaError, match="max_arena_bytes"):
            source.publish(1)
        engine.free(filler)
        with Engine(target):
            go_live(trainer, source, 1)
        assert shards.equal(live, held)


def test_source_ranks_of_different_casts_are_refused_by_name(daemon: Daemon) -> None:
    held = {"w": torch.randn(4, 4)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank, cast in enumerate(("bfloat16", None)):
            trainer.register_source(policy(), held, rank=rank, world_size=2, cast=cast).publish(1)
        with pytest.raises(refitd.PlanError, match=r"w: dtype is .*all source ranks need the same cast"):
            trainer.tensors(policy(), timeout=5)
        engine.register_target(policy(), {"w": torch.zeros(4, 4, dtype=ROUNDED)}, replica="a")
        with pytest.raises(refitd.RefitdError, match="all source ranks need the same cast"):
            trainer.swap(policy(), 1, timeout=30)


def test_a_traced_engine_holds_what_its_own_loader_makes_of_the_trainers_float32(daemon: Daemon) -> None:
    """As vLLM's GLM-4-MoE: a gate and its correction bias in float32, fused projections in bfloat16."""
    held = {"gate": torch.randn(8, 16), "bias": torch.randn(8), "q": torch.randn(4, 16), "k": torch.randn(2, 16)}

    def empty() -> Tensors:
        fused = torch.zeros(6, 16, dtype=ROUNDED)
        return {"gate.weight": torch.zeros(8, 16), "e_score_correction_bias": torch.zeros(8), "qk": fused}

    def loader(params: Tensors) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, weight in weights:
                rows = {"q": slice(0, 4), "k": slice(4, 6)}.get(name)
                whole = {"gate": "gate.weight", "bias": "e_score_correction_bias"}.get(name, "qk")
                (params[whole] if rows is None else params[whole][rows]).copy_(weight)

        return load

    params, own = empty(), empty()
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), held, cast="bfloat16")
        trace = refitd.trace_loader(params, loader(params), engine.tensors(policy()))
        target = engine.register_target(policy(), params, replica="a", metadata=[*trace.metadata.values()])
        with Engine(target):
            for version in (1, 2):
                held["gate"].add_(0.001)
                go_live(trainer, source, version)
                loader(own)(held.items())
                assert shards.equal(params, own)
