"""Parts of loaders that only move elements, or round each once, as vLLM's and SGLang's loaders do."""

from __future__ import annotations

import torch

from tests.loaders.generate import Maker, Part


def whole(m: Maker) -> None:
    m.write(m.source(m.shape()))


def moved(m: Maker) -> None:
    m.write(m.moved(m.source(m.shape())))


def shard(m: Maker) -> None:
    rank, dim = m.rng.randrange(2), m.rng.randrange(2)
    shape = [4, 6]
    x = m.source(tuple(shape))
    m.write(f"{x}.narrow({dim}, {rank * shape[dim] // 2}, {shape[dim] // 2})")


def qkv(m: Maker) -> None:
    dtype, heads = m.float(), m.rng.choice([1, 2])
    q, k, v = (m.source((2 * n, 3), dtype) for n in (2, heads, heads))
    p = m.parameter((4 + 4 * heads, 3), dtype)
    at = 0
    for x, rows in ((q, 4), (k, 2 * heads), (v, 2 * heads)):
        m.add(m.copy(f"{p}.narrow(0, {at}, {rows})", x))
        at += rows


def gate_up(m: Maker) -> None:
    dtype = m.float()
    gate, up = m.source((6, 4), dtype), m.source((6, 4), dtype)
    p = m.parameter((6, 4), dtype)
    m.add(f"for shard, loaded in enumerate(({gate}, {up})):")
    m.add("    part = loaded.chunk(2, dim=0)[1]", f"    {p}.data[shard * 3 : shard * 3 + 3].copy_(part)")


def vocabulary(m: Maker) -> None:
    dtype, rows = m.float(), m.rng.randint(2, 5)
    x = m.source((rows, 3), dtype)
    p = m.parameter((6, 3), dtype)
    rest = m.rng.choice([f"{p}[{rows}:].fill_(0)", f"{p}[{rows}:].zero_()", f"{p}.data[{rows}:] = 0"])
    m.add(m.copy(f"{p}[:{rows}]", x), rest)


def experts(m: Maker) -> None:
    dtype, count = m.float(), m.rng.choice([2, 3])
    p = m.parameter((count, 4, 3), dtype)
    for expert in range(count):
        w1, w3 = m.source((2, 3), dtype), m.source((2, 3), dtype)
        m.add(f"{p}[{expert}, :2].copy_({w1})", f"{p}.data[{expert}].narrow(0, 2, 2).copy_({w3})")


def stacked(m: Maker) -> None:
    dtype = m.float()
    given = ", ".join(m.source((2, 3), dtype) for _ in range(3))
    m.write(m.rng.choice([f"torch.stack([{given}])", f"torch.cat([{given}], dim=0)", f"torch.cat([{given}], 1).t()"]))


def interleaved(m: Maker) -> None:
    x = m.source((8, 3))
    m.write(f"{x}.view(2, 4, 3)[:, :2].reshape(-1, 3)")
    m.write(m.rng.choice([f"{x}[::2]", f"{x}[1::2].contiguous()", f"{x}.view(4, 2, 3).transpose(0, 1).reshape(8, 3)"]))


def cast(m: Maker) -> None:
    x = m.moved(m.source(m.shape(), torch.float32), 2)
    dtype = m.rng.choice([torch.bfloat16, torch.float16])
    m.write(m.rng.choice([x, f"{x}.to({dtype})"]), dtype)


def permuted(m: Maker) -> None:
    n = m.rng.randint(2, 6)
    x = m.source((n, 3))
    order = m.rng.sample(range(n), n)
    m.write(m.rng.choice([f"{x}[torch.tensor({order})]", f"{x}.index_select(0, torch.tensor({order}))"]))


def buffered(m: Maker) -> None:
    """Copy through a buffer with the tensor's dtype."""
    x = m.source((3, 4))
    dtype = m.one(x).dtype
    rows = m.rng.choice([3, 5])
    made = [f"torch.zeros({rows}, 4, dtype={dtype})", f"{x}.new_zeros({rows}, 4)"]
    m.add(f"own = {m.rng.choice(made)}", f"own[:3] = {x}")
    p = m.parameter((rows, 4), dtype)
    m.add(f"{p}.copy_(own)")


def padded(m: Maker) -> None:
    x = m.source((3, 4), m.float())
    m.write(f"torch.nn.functional.pad({x}, (0, {m.rng.randrange(3)}, 0, {m.rng.randint(1, 2)}))")


def state(m: Maker) -> None:
    """A submodule loads its own state."""
    name = f"sub{len(m.program.init)}"
    x, b = m.source((3, 4), torch.float32), m.source((3,), torch.float32)
    m.program.init.append(f"self.{name} = nn.Linear(4, 3)")
    m.add(f"self.{name}.load_state_dict({{'weight': {x}, 'bias': {b}}})")


def by_name(m: Maker) -> None:
    dtype, shape = m.dtype(), m.shape(2)
    x, y = m.source(shape, dtype), m.source(shape, dtype)
    p = m.parameter(shape, dtype)
    condition = m.rng.choice([f"{x}.dtype == torch.float32", f"{x}.shape[0] > 2", f"'proj' in {x[2:-1]}", "len(w) > 1"])
    m.add(f"if {condition}:", f"    {p}.copy_({x})", "else:", f"    {p}.copy_({y})")


def element(m: Maker) -> None:
    """Scales: one element each."""
    dtype = m.rng.choice([torch.float32, torch.bfloat16])
    p = m.parameter((2,), dtype)
    for i in range(2):
        x = m.source(m.rng.choice([(), (1,)]), dtype, "scale")
        m.either(f"{p}[{i}].copy_({x}.reshape(()))", f"{p}.data[{i}] = {x}.reshape(())")


BENIGN: list[Part] = [
    whole,
    moved,
    moved,
    moved,
    shard,
    qkv,
    gate_up,
    vocabulary,
    experts,
    stacked,
    interleaved,
    cast,
    permuted,
    buffered,
    padded,
    state,
    by_name,
    element,
]
