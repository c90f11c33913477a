"""A learned layout must give the loader's results on new values; otherwise it is not used."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

import refitd
from refitd.tracing import held_bytes
from refitd.tracing.held_bytes import bytes_of, differing
from refitd.tracing.probes import FLOATS, INTEGERS, Probe

HALF, NARROW, BYTE = torch.float16, torch.bfloat16, torch.float8_e4m3fn
Weights = Iterable[tuple[str, torch.Tensor]]
Params = dict[str, torch.Tensor]
Load = Callable[[Params, Params], object]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

SHAPES: Shapes = {
    "w": ((8, 4), torch.float32),
    "perm": ((8,), torch.int64),
    "ver": ((), torch.int32),
    "s": ((1,), torch.float32),
    "scales": ((3,), torch.float32),
    "half": ((8, 4), NARROW),
    "eight": ((8, 4), BYTE),
}


def held() -> Params:
    return {
        "p": torch.full((8, 4), 7.0),
        "q": torch.full((8, 4), 7.0),
        "one": torch.full((1,), 7.0),
        "perm": torch.arange(8),
        "narrow": torch.full((8, 4), 7.0, dtype=NARROW),
        "eight": torch.full((8, 4), 7.0).to(BYTE),
    }


def checkpoint(seed: int, ver: int) -> Params:
    """Return realistic values; odd seeds round them to bfloat16, as a first checkpoint may be."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(8, 4, generator=generator)
    return {
        "w": w if seed % 2 == 0 else w.to(NARROW).float(),
        "perm": torch.randperm(8, generator=generator),
        "ver": torch.tensor(ver, dtype=torch.int32),
        "s": torch.randn(1, generator=generator),
        "scales": torch.randn(3, generator=generator),
        "half": torch.randn(8, 4, generator=generator).to(NARROW),
        "eight": torch.randn(8, 4, generator=generator).to(BYTE),
    }


def learned(load: Load, shapes: Shapes = SHAPES) -> tuple[refitd.LoaderTrace, Params]:
    """Learn a layout; check that the engine is unchanged and that the layout is correct for three versions."""
    params, before = held(), held()

    def run(weights: Weights) -> None:
        load(params, dict(weights))

    try:
        trace = refitd.trace_loader(params, run, shapes)
    finally:
        for name, tensor in params.items():
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    for version in (1, 2, 3):
        weights = checkpoint(version, version)
        load(params, weights)
        assert differing(trace.metadata, params, weights.items()) == ({}, [])
    return trace, params


def through(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    buffer.copy_(w)
    return buffer


def by_written_index(p: Params, w: Params) -> None:
    p["perm"].copy_(w["perm"])
    p["p"].copy_(w["w"][p["perm"]])


def by_written_list(p: Params, w: Params) -> None:
    p["perm"].copy_(w["perm"])
    p["p"].copy_(torch.stack([w["w"][i] for i in p["perm"].tolist()]))


def by_written_array(p: Params, w: Params) -> None:
    p["perm"].copy_(w["perm"])
    p["p"].copy_(w["w"][torch.from_numpy(p["perm"].numpy().copy())])


def by_out(p: Params, w: Params) -> None:
    own = torch.arange(8)
    torch.add(w["perm"], 0, out=own)
    p["p"].index_copy_(0, own, w["w"])


def by_caught_version(p: Params, w: Params) -> None:
    try:
        is_new = w["ver"].item() >= 2
    except Exception:
        is_new = True
    p["p"].copy_(w["w"].flip(0) if is_new else w["w"])


def by_table(p: Params, w: Params) -> None:
    p["p"].copy_({2.0: w["w"].flip(0)}.get(w["ver"].item(), w["w"]))


def by_text(p: Params, w: Params) -> None:
    p["p"].copy_({"2": w["w"].flip(0)}.get(f"{w['ver'].item()}", w["w"]))


def by_length(p: Params, w: Params) -> None:
    p["p"].zero_()
    p["p"][: w["ver"].item()].copy_(w["w"][: w["ver"].item()])


def by_range(p: Params, w: Params) -> None:
    p["p"].zero_()
    for row in range(w["ver"]):
        p["p"][row].copy_(w["w"][row])


def by_written_numpy(p: Params, w: Params) -> None:
    own = torch.zeros(1)
    own.copy_(w["s"])
    p["p"].copy_(w["w"] if own.numpy()[0] > 0 else w["w"].flip(0))


def in_a_thread(p: Params, w: Params) -> None:
    def run() -> None:
        with contextlib.suppress(refitd.PlanError):
            p["p"].copy_(w["w"] if w["s"].item() > 0 else w["w"].flip(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def twice_through(p: Params, w: Params) -> None:
    narrow, wide = torch.empty(8, 4, dtype=NARROW), torch.empty(8, 4)
    narrow[:4], narrow[4:] = w["w"][:4], w["w"][4:]
    wide.copy_(narrow)
    p["p"].copy_(wide)


def as_bits(p: Params, w: Params) -> None:
    own = torch.empty(8, 4, dtype=torch.int32)
    own.view(torch.float32).copy_(w["w"])
    p["p"].copy_(own)


COMPUTED: dict[str, Load] = {
    "an index that the loader wrote": by_written_index,
    "an index that an operator wrote to out": by_out,
    "a buffer of another dtype": lambda p, w: p["p"].copy_(through(torch.empty(8, 4, dtype=NARROW), w["w"])),
    "a part of a buffer": lambda p, w: p["p"].copy_(through(torch.zeros(9, 4, dtype=NARROW)[:8], w["w"])),
    "two buffers, one of another dtype": twice_through,
    "a buffer that is read as another dtype": as_bits,
    "an absolute scale": lambda p, w: p["one"].fill_(abs(w["s"].item())),
    "a remainder": lambda p, w: p["one"].fill_(w["s"].item() % 1),
}
REFUSED: dict[str, Load] = {
    "the largest scale": lambda p, w: p["one"].fill_(max(float(s) for s in w["scales"])),
    "a remainder of a float": lambda p, w: p["one"].fill_(float(w["s"]) % 1),
    "a branch on a float": lambda p, w: p["p"].copy_(w["w"] if float(w["s"]) > -0.5 else w["w"].flip(0)),
    "a list of what the loader wrote": by_written_list,
    "an array of what the loader wrote": by_written_array,
    "a version, and the refusal is caught": by_caught_version,
    "a table of versions": by_table,
    "a version as text": by_text,
    "a length": by_length,
    "a range": by_range,
    "a number in a buffer that numpy reads": by_written_numpy,
    "a branch in a thread": in_a_thread,
    "a scale that is checked": lambda p, w: p["one"].fill_(w["s"].item() if w["s"] > 0 else 1.0),
    "a truth value": lambda p, w: p["p"].copy_(w["w"] if w["s"] else w["half"]),
    "equal tensors": lambda p, w: p["p"].copy_(w["w"] if torch.equal(w["w"], w["half"].float()) else w["half"]),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_what_values_decide_is_computed(how: str) -> None:
    trace, _ = learned(COMPUTED[how])
    assert not {"p", "one", "narrow"} & trace.metadata.keys()
    assert {"p", "one", "narrow"} & trace.computed.keys()


@pytest.mark.parametrize("how", REFUSED)
def test_a_loader_that_reads_values_is_refused_with_its_line(how: str) -> None:
    with pytest.raises(
        refitd.PlanError, match=r"the loader reads .*, at .*test_trace_probes\.py:\d+: its result depends"
    ):
        learned(REFUSED[how])


LEARNED: dict[str, Load] = {
    "a scale by its number": lambda p, w: p["one"].fill_(w["s"].item()),
    "a scale by its float": lambda p, w: p["one"].fill_(float(w["s"])),
    "a scale by assignment": lambda p, w: p["one"].__setitem__(0, w["s"].item()),
    "a number in a buffer": lambda p, w: p["one"].fill_(through(torch.zeros(1), w["s"]).item()),
    "a buffer of the tensor's own dtype": lambda p, w: p["narrow"].copy_(
        through(torch.empty(8, 4, dtype=NARROW), w["w"])
    ),
    "a wider buffer": lambda p, w: p["p"].copy_(through(torch.empty(8, 4, dtype=torch.float64), w["w"])),
}


@pytest.mark.parametrize("how", LEARNED)
def test_numbers_and_buffers_that_lose_nothing_are_learned(how: str) -> None:
    trace, _ = learned(LEARNED[how])
    assert len(trace.metadata) == 1 and not trace.computed and trace.proof is not None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_tensor_of_eight_bits_is_computed_and_the_others_are_learned(dtype: torch.dtype) -> None:
    def load(p: Params, w: Params) -> None:
        p["p"].copy_(w["w"])
        p["narrow"].copy_(w["eight"].to(NARROW))
        p["q"].copy_(torch.cat([w["eight"].to(NARROW)[:4], w["half"][4:]]))

    shapes: Shapes = {**SHAPES, "eight": ((8, 4), dtype)}
    params = held()
    trace = refitd.trace_loader(params, lambda weights: load(params, dict(weights)), shapes)
    assert trace.metadata.keys() == {"p"} and trace.computed.keys() == {"narrow", "q"}


def test_constants_are_compared_by_their_bits() -> None:
    signs = torch.tensor([0.0, -0.0, 0.0, -0.0])

    def mixed(p: Params, w: Params) -> None:
        p["p"].copy_(torch.cat([w["w"][:4], signs.repeat(4, 1)]))
        p["q"][:4].copy_(w["w"][:4])
        p["q"][4:].copy_(torch.full((4, 4), -0.0))

    trace, _ = learned(mixed)
    assert "p" in trace.computed and str(trace.metadata["q"].fill) == "-0.0"

    def two(p: Params, w: Params) -> None:
        p["p"][:4].copy_(w["w"][:4])
        p["p"][4:6].fill_(-0.0)
        p["p"][6:].fill_(0.0)

    with pytest.raises(refitd.PlanError, match=r"fills parts of it with \[-0\.0, 0\.0\]"):
        learned(two)


def test_a_loader_that_counts_its_calls_is_not_learned() -> None:
    calls: list[int] = []

    def load(p: Params, w: Params) -> None:
        calls.append(1)
        p["p"].copy_(w["w"] if len(calls) < 3 else w["w"].flip(0).contiguous())

    params = held()
    trace = refitd.trace_loader(params, lambda weights: load(params, dict(weights)), SHAPES)
    assert "p" not in trace.metadata and "on probe 2 differs from w" in trace.problems()[0]


def test_a_tensor_that_only_other_values_write_refuses_the_layout() -> None:
    seen: list[int] = []

    def load(p: Params, w: Params) -> None:
        seen.append(1)
        p["p"].copy_(w["w"])
        if len(seen) == 3:
            p["q"].copy_(w["w"])

    with pytest.raises(refitd.PlanError, match="q: the loader writes 1 tensors that it did not write when"):
        learned(load)


def test_a_loader_that_raises_on_made_up_values_is_given_others_before_it_is_refused() -> None:
    def checked(p: Params, w: Params) -> None:
        p["p"].copy_(w["w"])
        p["one"].copy_(w["s"])
        with torch._C._DisableTorchDispatch():
            assert w["s"].device.type == "meta" or bool((w["s"] > 0).all())

    params, shapes = held(), {"w": SHAPES["w"], "s": SHAPES["s"]}
    trace = refitd.trace_loader(params, lambda weights: checked(params, dict(weights)), shapes)
    assert trace.metadata.keys() == {"p", "one"} and trace.proof is not None

    def never(p: Params, w: Params) -> None:
        p["p"].copy_(w["w"])
        if w["w"].device.type != "meta":
            raise ValueError("only on meta")

    with pytest.raises(
        refitd.RefusedError, match=r"made-up values of probe 1 of 3.*test_trace_probes\.py:\d+: ValueError"
    ):
        learned(never)


@pytest.mark.parametrize("raises", [False, True])
def test_the_engine_is_as_it_was_after_the_probes_also_on_error(raises: bool) -> None:
    shared = torch.arange(40.0)
    params = {
        "first": shared[:16].view(4, 4).t(),
        "second": shared[16:32],
        "tied": shared[16:32],
        "nan": torch.tensor([0x7FC00123, -0x80000000], dtype=torch.int32).view(torch.float32),
        "parameter": torch.nn.Parameter(torch.ones(4)),
    }
    bits = {name: tensor.detach().clone().contiguous().view(torch.uint8) for name, tensor in params.items()}
    places = {name: tensor.data_ptr() for name, tensor in params.items()}
    runs: list[int] = []

    def load(weights: Weights) -> None:
        runs.append(1)
        w = dict(weights)
        params["first"].copy_(w["a"])
        params["second"].copy_(w["b"])
        params["nan"].copy_(w["b"][:2])
        params["parameter"].data.copy_(w["b"][:4])
        if raises and len(runs) > 2:
            shared[:32].zero_()
            params["parameter"].data = torch.zeros(4)
            raise KeyboardInterrupt

    shapes = {"a": ((4, 4), torch.float32), "b": ((16,), torch.float32)}
    if raises:
        with pytest.raises(KeyboardInterrupt):
            refitd.trace_loader(params, load, shapes)
    else:
        trace = refitd.trace_loader(params, load, shapes)
        assert trace.metadata.keys() == params.keys() and trace.proof is not None
        assert trace.proof.probes == 3 and trace.proof.memory_bytes > 0 and trace.proof.seconds > 0
    for name, tensor in params.items():
        assert tensor.data_ptr() == places[name]
        assert torch.equal(tensor.detach().contiguous().view(torch.uint8), bits[name]), name


def test_copies_of_the_engine_go_to_a_file_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bytes, "ALWAYS", 0)
    monkeypatch.setattr(held_bytes, "_available", lambda: 0)
    trace, params = learned(lambda p, w: p["p"].copy_(w["w"]))
    assert trace.proof is not None and trace.held.file_bytes == sum(t.nbytes for t in params.values())
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(
        refitd.RefusedError, match=r"cannot be copied .* main memory and /proc are short; make room, or set TMPDIR"
    ):
        learned(lambda p, w: p["p"].copy_(w["w"]))


def test_tensors_without_values_prove_nothing() -> None:
    params = {name: tensor.to("meta") for name, tensor in held().items()}
    trace = refitd.trace_loader(params, lambda ws: [params["p"].copy_(w) for n, w in ws if n == "w"], SHAPES)
    assert trace.proof is None and trace.metadata.keys() == {"p"}


def test_a_copy_in_threads_is_compared() -> None:
    """The copy in the thread reverses the rows in memory that the trace does not see."""

    def load(p: Params, w: Params) -> None:
        p["p"].copy_(w["w"])
        if w["w"].device.type != "meta":
            turned = threading.Thread(target=lambda: p["p"].copy_(w["w"].flip(0)))
            turned.start()
            turned.join()

    trace, _ = learned(load)
    assert "p" in trace.computed


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, BYTE, torch.complex64, torch.float4_e2m1fn_x2])
def test_probes_differ_in_every_bit_of_a_dtype(dtype: torch.dtype) -> None:
    shapes = {"w": ((3000, 7), dtype), "v": ((3000, 7), dtype)}
    made = [Probe(number, shapes) for number in range(2)]
    assert {name: tuple(t.shape) for name, t in made[0]} == {"w": (3000, 7), "v": (3000, 7)}
    for name in shapes:
        one, other = (probe.tensor(name).contiguous().view(torch.uint8).reshape(-1) for probe in made)
        differ = (one ^ other).view(-1, dtype.itemsize)
        found = [int(np.bitwise_or.reduce(column)) for column in differ.T.numpy()]
        assert found == [1 if dtype == torch.bool else 255] * dtype.itemsize
        assert torch.equal(made[0].tensor(name).view(torch.uint8), made[0].tensor(name).view(torch.uint8))
    w, v = made[0].tensor("w"), made[0].tensor("v")
    assert not torch.equal(w.view(torch.uint8), v.view(torch.uint8))
    if dtype in FLOATS:
        flat = w.reshape(-1)
        assert bool(flat.isfinite().all()) and bool((flat < 0).any())
        zeros = flat[flat == 0]
        assert set(zeros.signbit().tolist()) == {True, False}
        assert bool(((flat != 0) & (flat.abs() < torch.finfo(dtype).tiny)).any()), "subnormal numbers"
    if dtype == torch.float32:
        assert not torch.equal(w, w.to(NARROW).float()) and bool(w.to(HALF).isinf().any())


def test_a_single_number_has_another_sign_in_each_probe() -> None:
    shapes = {f"s{i}": ((), torch.float32) for i in range(20)} | {f"n{i}": ((1,), torch.int32) for i in range(20)}
    one, two, three = (dict(Probe(number, shapes)) for number in range(3))
    for name in shapes:
        assert one[name] > 0 and (three[name] == 0 or (name[0] == "n" and three[name] == -1))
        assert two[name] < 0 or (name[0] == "n" and 0 <= two[name] < 4 < one[name])


def test_tensors_of_a_probe_are_freed_when_the_loader_drops_them_and_share_no_memory() -> None:
    shapes = {f"w{i}": ((1000, 700), torch.float32) for i in range(6)}
    given: list[weakref.ref[torch.Tensor]] = []
    for _, weight in Probe(0, shapes):
        assert sum(one() is not None for one in given) <= 1
        given.append(weakref.ref(weight))
    kept = dict(Probe(0, shapes))
    parts = {name: weight[1:3].t() for name, weight in Probe(0, shapes)}
    for name, weight in Probe(0, shapes):
        assert torch.equal(kept[name].view(torch.int32), weight.view(torch.int32))
        assert torch.equal(parts[name].view(torch.int32), weight[1:3].t().view(torch.int32))
        weight.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, NARROW, torch.uint8, torch.bool, torch.complex128])
def test_what_a_layout_is_compared_with_is_what_the_loader_was_given(dtype: torch.dtype) -> None:
    """The elements are compared in boxes that are never a whole tensor, and the random ones repeat in it."""
    shape = (23, 101, 1009)  # 2.3 million elements, of a period of 1 million
    shapes = {"w": (shape, dtype)}
    for number in range(2):
        probe = Probe(number, shapes)
        given, expected = probe.tensor("w"), probe.expected("w")
        for offset, size in [((0, 0, 0), (1, 30, 1009)), ((22, 90, 5), (1, 11, 1004)), ((9, 82, 1), (1, 19, 3))]:
            part = given[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
            assert torch.equal(bytes_of(expected.box(offset, size, part.device)), bytes_of(part))


@pytest.mark.parametrize("column", [0, 1, 699])
def test_one_wrong_element_of_a_large_tensor_is_found(column: int) -> None:
    params = {"p": torch.zeros(700, 1000, dtype=NARROW).t()}

    def load(weights: Weights) -> None:
        for _, weight in weights:
            params["p"].copy_(weight)
            if weight.device.type != "meta":
                params["p"].view(torch.int16)[999, column] ^= 1

    trace = refitd.trace_loader(params, load, {"w": ((1000, 700), torch.float32)})
    assert trace.computed.keys() == {"p"} and not params["p"].any()
