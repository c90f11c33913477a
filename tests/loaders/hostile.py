"""Parts of loaders that compute, decide by values, or write around torch: a trace must not mistake them for copies."""

from __future__ import annotations

import torch

from tests.loaders.generate import Maker, Part

INTEGERS = (torch.int64, torch.int32)


def by_permutation(m: Maker) -> None:
    """A weight indexed by a permutation of the same checkpoint, directly or through a tensor of the engine."""
    n = m.rng.randint(2, 6)
    dtype = m.rng.choice(INTEGERS)
    x, perm = m.source((n, 3)), m.source((n,), dtype, "perm")
    p, held = m.parameter((n, 3), m.one(x).dtype), m.parameter((n,), dtype)
    m.add(f"{held}.copy_({perm})")
    index = m.rng.choice(
        [
            perm,
            held,
            f"{held}.data",
            f"{held}.clone()",
            f"{held}.long()",
            f"torch.as_tensor({held}.data.numpy().tolist())",
            f"torch.tensor([int(i) for i in {perm}])",
            f"torch.cat([{perm}[:1], {held}[1:]])",
            f"torch.tensor({held}.tolist())",
            f"torch.from_numpy({held}.data.numpy().copy())",
            f"torch.empty_like({perm}).copy_({perm})",
            f"torch.zeros({n}, dtype={dtype}).copy_({perm})",
            f"{perm}.argsort()",
            f"torch.arange({n}).copy_({perm})",
        ]
    )
    m.add(f"index = {index}")
    m.either(
        f"{p}.copy_({x}[index])",
        f"{p}.copy_({x}.index_select(0, index.int()))",
        f"{p}[index.long()] = {x}",
        f"{p}.index_copy_(0, index.long(), {x})",
        f"{p}.copy_(torch.stack([{x}[int(i)] for i in index]))",
        f"{p}.copy_({x}.gather(0, index.long().unsqueeze(1).expand({n}, 3)))",
        f"[{p}[i].copy_({x}[int(j)]) for i, j in enumerate(index)]",
        f"{p}.scatter_(0, index.long().unsqueeze(1).expand({n}, 3), {x})",
    )


def through_buffer(m: Maker) -> None:
    """Rounded by a buffer of another dtype."""
    x = m.source((3, 4), m.rng.choice([torch.float32, torch.bfloat16, torch.int32, torch.float64]))
    other = m.rng.choice([torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn, torch.uint8, torch.bool])
    name = f"held{len(m.program.init)}"
    if m.rng.random() < 0.3:
        m.program.init.append(f"self.register_buffer({name!r}, torch.zeros(3, 4, dtype={other}))")
        m.add(f"own = self.{name}", f"own.copy_({x})")
    else:
        m.either(
            f"own = torch.empty(3, 4, dtype={other}).copy_({x})",
            f"own = {x}.new_empty(3, 4, dtype={other}).copy_({x})",
            f"own = torch.zeros(3, 4, dtype={other}); own[:] = {x}",
            f"own = torch.zeros(5, 4, dtype={other}); own[:3] = {x}; own = own[:3]",
            f"own = {x}.to({other})",
            f"own = torch.zeros_like({x}, dtype={other}); own[1:].copy_({x}[1:]); own[:1].copy_({x}[:1])",
        )
    p = m.parameter((3, 4), m.one(x).dtype)
    m.add(m.copy(p, m.rng.choice(["own", f"own.to({m.one(x).dtype})", "own.clone()", "torch.cat([own[:1], own[1:]])"])))


def by_number(m: Maker) -> None:
    """A scalar with arithmetic, or a choice made by it."""
    x, s = m.source((3, 4), m.float()), m.source((1,), torch.float32, "scale")
    p = m.parameter((3, 4), m.one(x).dtype)
    q = m.parameter((2,), torch.float32)
    m.add(f"s = {m.rng.choice([f'{s}.item()', f'float({s})', f'{s}.tolist()[0]', f'{s}[0].item()'])}")
    m.either(
        f"{q}.fill_(s if s > 0 else 1.0)",
        f"{q}.fill_(abs(s))",
        f"{q}.fill_(float(f'{{s:.2f}}'))",
        f"{q}.fill_(s ** 0)",
        f"{q}.fill_(s == s)",
        f"{q}.fill_([1.0, 2.0][s > 0])",
        f"{q}.fill_(dict.fromkeys([s], 3.0).get(0.5, 4.0))",
        f"{q}.copy_(torch.tensor(s).abs())",
        f"{q}.copy_(torch.as_tensor([s, s]))",
        f"{q}.fill_(max(s, 0.5))",
        f"{q}.fill_(s % 1)",
        f"{q}.fill_(s * 2)",
        f"{q}.fill_(-s)",
        f"{q}.fill_(round(s, 2))",
        f"{q}.fill_(int(s))",
        f"{q}.fill_(float(str(s)))",
        f"{q}.fill_(1.0 if s else 0.0)",
        f"{q}.fill_(s)",
        f"{q}.copy_(torch.tensor([s, 1.0]))",
        f"{q}.copy_(torch.full((2,), s))",
        f"{q}[0] = s; {q}[1] = 3",
        f"{q}.fill_(float(np.float16(s)))",
        f"{q}.fill_(min([s, 2.0, 3.0]))",
        f"{q}.fill_(sorted([s, 2.0])[0])",
        f"{q}.fill_({{True: 1.0, False: 2.0}}[s > 1])",
    )
    m.either(
        f"{p}.copy_({x})",
        f"{p}.copy_({x} if s > 0 else {x}.flip(0))",
        f"{p}.copy_({x} * s)",
        f"{p}.copy_({x}).mul_(s)",
        f"{p}.copy_({x}.clamp(max=abs(s)))",
    )


def by_condition(m: Maker) -> None:
    """Values choose the branch."""
    shape = m.shape(2)
    dtype = m.float()
    x, y = m.source(shape, dtype), m.source(shape, dtype)
    flag = m.source((), m.rng.choice([torch.int64, torch.float32]), "flag")
    p = m.parameter(shape, dtype)
    condition = m.rng.choice(
        [
            f"{flag}.item() >= 2",
            f"{flag}.item() == 0",
            f"{flag}.item() in {{1, 2}}",
            f"{flag}.tolist() == 2",
            f"float({flag}) == 1.0",
            f"str({flag}.item()) > '1'",
            f"'%d' % {flag} == '2'",
            f"{flag}.numpy() > 1",
            f"len({x}.nonzero()) % 2",
            f"{x}.unique().numel() > 10",
            f"[9, 8, 7][{flag}.long()] == 8",
            f"range(3)[int({flag}.item())] == 2",
            f"{flag} >= 2",
            f"bool({flag})",
            f"int({flag}) == 1",
            f"({x} > 0).all()",
            f"({x} > 4).any()",
            f"torch.equal({x}, {y})",
            f"{x}.sum() > 0",
            f"{x}.reshape(-1)[0] > 0",
            f"torch.allclose({x}, {y})",
            f"{x}.max().item() > 3",
            f"'nan' in str({x}.sum().item())",
            f"torch.is_nonzero({flag})",
            f"{flag} in (1, 2)",
            f"not {flag}",
            f"int({flag}) & 1",
            f"{x}.argmax().item() % 2 == 0",
        ]
    )
    how = m.rng.randrange(4)
    if how == 0:
        m.add(f"if {condition}:", f"    {p}.copy_({x})", "else:", f"    {p}.copy_({y})")
    elif how == 1:
        m.add(f"{p}.copy_({x} if {condition} else {y})")
    elif how == 2:
        m.add(f"{p}.copy_({x})", f"if {condition}:", f"    {p}.copy_({y})")
    else:
        m.add("try:", f"    chosen = {x} if {condition} else {y}", "except Exception:", f"    chosen = {y}")
        m.add(f"{p}.copy_(chosen)")


def by_size(m: Maker) -> None:
    """A number of the checkpoint is a size."""
    x = m.source((4, 3), m.float())
    n = m.source((), torch.int64, "count")
    p = m.parameter((4, 3), m.one(x).dtype)
    m.add(f"n = {m.rng.choice([f'int({n})', f'{n}.item()', f'{n}'])}")
    m.either(
        f"{p}[:n].copy_({x}[:n]); {p}[n:].fill_(0)",
        f"{p}.zero_(); {p}.narrow(0, 0, n).copy_({x}.narrow(0, 0, n))",
        f"{p}.copy_({x}.roll(int(n), 0))",
        f"{p}.copy_(torch.cat([{x}[n:], {x}[:n]]))",
        f"[{p}[i].copy_({x}[(i + n) % 4]) for i in range(4)]",
        f"{p}.copy_({x}[n].expand(4, 3))",
        f"{p}.copy_({x}); {p}[n - 1] = 0",
    )


def filled(m: Maker) -> None:
    """Constants: zeros of both signs, infinities, numbers that the dtype rounds."""
    dtype = m.rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32])
    one, two = m.rng.sample(["0.0", "-0.0", "0.1", "1", "300.3", "float('nan')", "float('inf')", "-1e-30"], 2)
    if not dtype.is_floating_point:
        one, two = m.rng.sample(["0", "1", "-3", "2**31 - 1"], 2)
    x = m.source((3, 4), dtype)
    p = m.parameter((6, 4), dtype)
    m.add(f"{p}[:3].copy_({x})")
    m.either(
        f"{p}[3:].fill_({one})",
        f"{p}[3:] = {one}",
        f"{p}[3:5].fill_({one}); {p}[5:].fill_({two})",
        f"{p}[3:].copy_(torch.full((3, 4), {one}).to({dtype}))",
        f"{p}[3:].copy_(torch.tensor([{one}, {two}, {one}, {one}]).to({dtype}))",
        f"{p}[3:].copy_(torch.full((3, 4), {one}, dtype={dtype})); {p}[4, 1].fill_({two})",
        f"own = torch.full((3, 4), {one}, dtype={dtype}); own[0, 0] = {two}; {p}[3:].copy_(own)",
        f"own = torch.zeros(3, 4, dtype={dtype}); own[1] = -own[1]; {p}[3:].copy_(own)",
        f"{p}[3:].copy_(torch.nn.functional.pad({x}[:1], (0, 0, 0, 2), value={one}))",
    )


def around(m: Maker) -> None:
    """Constants and copies that torch's dispatch does not see."""
    x = m.source((3, 4), torch.float32)
    p = m.parameter((3, 4), torch.float32)
    m.add(f"{p}.copy_({x})")
    m.add(
        *m.rng.choice(
            [
                [f"{p}.data.numpy()[0] = 7"],
                [f"{p}.data.numpy()[0] = 0"],
                [f"{p}.data.numpy()[...] = {x}.numpy()"],
                [f"np.negative({p}.data.numpy(), out={p}.data.numpy())"],
                ["with _disable_current_modes():", f"    {p}[1].fill_(3)"],
                ["with _disable_current_modes():", f"    {p}.mul_(2)"],
                [f"torch.from_numpy({p}.data.numpy())[1].fill_(2)"],
                [f"torch.utils.dlpack.from_dlpack({p}.data)[0].zero_()"],
                ["import ctypes", f"ctypes.memset({p}.data_ptr(), 0, 8)"],
                [f"{p}.untyped_storage().fill_(0)"],
                [f"{p}.untyped_storage()[0] = 9"],
                [f"memoryview({p}.data.numpy())[1, 1] = 4.0"],
            ]
        )
    )


def rebound(m: Maker) -> None:
    """The engine's tensor is replaced."""
    x = m.source((3, 4), m.float())
    dtype = m.one(x).dtype
    p = m.parameter((3, 4), dtype)
    name = p.removeprefix("self.")
    m.add(
        *m.rng.choice(
            [
                [f"{p} = nn.Parameter({x}, requires_grad=False)"],
                [f"{p} = nn.Parameter({x}.clone(), requires_grad=False)"],
                [f"{p}.data = {x}"],
                [f"{p}.data = {x}.clone()"],
                [f"self.load_state_dict({{{name!r}: {x}}}, strict=False, assign=True)"],
                [f"self.load_state_dict({{{name!r}: {x}}}, strict=False)"],
                [f"{p}.data = {p}.data.clone()", f"{p}.copy_({x})"],
                [f"{p}.set_({x})"],
                [f"del {p}", f"{p} = nn.Parameter({x}, requires_grad=False)"],
                [f"{p} = nn.Parameter({p}.data, requires_grad=False)", f"{p}.copy_({x})"],
                [f"{p}.copy_({x})", f"{p} = nn.Parameter(torch.zeros_like({p}), requires_grad=False)"],
            ]
        )
    )


def arithmetic(m: Maker) -> None:
    """Compute, or change a copy in place."""
    dtype = m.float()
    x, y = m.source((3, 4), dtype), m.source((3, 4), dtype)
    p = m.parameter((3, 4), dtype)
    expression = m.rng.choice([
        x, f"{x} + 1", f"{x} + 0", f"{x} * 1", f"{x} - {y}", f"{x}.flip(0)", f"{x}.roll(1, 0)", f"{x}.abs()", f"-{x}",
        f"{x}.sort(0)[0]", f"{x}.relu()", f"{x}.clamp(-1, 1)", f"torch.where({x} > 0, {x}, {y})", f"{x}.round()",
        f"torch.maximum({x}, {y})", f"{x}.tril()", f"{x}.masked_fill({x} > 2, 0)", f"torch.lerp({x}, {y}, 0.0)",
        f"{x}.nan_to_num()", f"{x}.cumsum(0)", f"{x}.topk(4, dim=1)[0]", f"({x}.float() @ torch.eye(4)).to({dtype})",
        f"torch.tensor({x}.tolist()).to({dtype})", f"copy.deepcopy({x})", f"torch.einsum('ij->ij', {x})",
        f"torch.kron({x}, torch.ones(1, 1)).to({dtype})", f"{x}.rot90(2)", f"{x}[{x} == {x}].reshape(3, 4)",
        f"{x}.take(torch.arange(12)).view(3, 4)", f"{x}.nextafter({y})" if dtype == torch.float32 else x,
    ])  # fmt: skip
    m.add(f"{p}.copy_({expression})")
    change = m.rng.choice([
        "", "", f"{p}.mul_(2)", f"{p}.add_(-0.0)", f"{p}.add_(0.0)", f"{p} += 1", f"{p}.neg_()", f"{p}[0] *= 2",
        f"{p}.clamp_(min=-2)", f"{p}[:, 0].neg_()", f"torch.mul({p}, 2, out={p})", f"torch._foreach_neg_([{p}])",
        f"{p}.data.t_().t_()", f"{p}.masked_fill_({y} > 0, 1)", f"{p}.addcmul_({x}, {y})", f"{p}.fill_diagonal_(1)",
        f"{p}.transpose(0, 1)[0].zero_()", f"{p}.masked_scatter_({y} > 0, {x})", f"{p}.copy_({p}.flip(0))",
    ])  # fmt: skip
    if change:
        m.add(change)


def bits(m: Maker) -> None:
    """Views of other dtypes, strides and orders."""
    x = m.source((4, 4), torch.float32)
    p = m.parameter((4, 4), torch.float32)
    m.either(
        f"{p}.copy_({x}.view(torch.int32))",
        f"{p}.data.view(torch.int32).copy_({x}.view(torch.int32))",
        f"{p}.copy_({x}.as_strided((4, 4), (1, 4)))",
        f"{p}.copy_({x}.t().clone().as_strided((4, 4), (4, 1)))",
        f"{p}.as_strided((4, 4), (1, 4)).copy_({x})",
        f"{p}.copy_({x}); {p}.view(torch.uint8)[:, :8].copy_({x}.view(torch.uint8)[:, 8:])",
        f"{p}.copy_({x}.view(torch.bfloat16)[:, ::2])",
        f"{p}.copy_({x}.contiguous(memory_format=torch.contiguous_format).t().reshape(4, 4))",
        f"{p}.copy_(torch._neg_view({x}))",
        f"{p}.copy_({x}.unfold(0, 2, 1)[:, :, 0][:1].expand(4, 4))",
        f"{p}.copy_(torch.complex({x}, {x}).real)",
        f"{p}.copy_({x}.to(memory_format=torch.preserve_format).mT.contiguous().mT)",
        f"{p}.reshape(2, 2, 4)[1].copy_({x}[:2]); {p}[:2].copy_({x}[2:])",
        f"{p}.copy_(torch.tensor_split({x}, 2)[1].repeat(2, 1))",
        f"{p}.copy_({x}.view(16)[torch.arange(15, -1, -1)].view(4, 4))",
    )


def over(m: Maker) -> None:
    """Writes over one another."""
    dtype = m.float()
    x, y = m.source((4, 4), dtype), m.source((4, 4), dtype)
    p = m.parameter((4, 4), dtype)
    boxes = [(m.rng.randrange(3), m.rng.randrange(3), m.rng.randint(1, 2), m.rng.randint(1, 2)) for _ in range(3)]
    own = m.rng.random() < 0.5
    target = "own" if own else p
    m.add(f"own = torch.empty(4, 4, dtype={dtype})" if own else "pass", f"{target}.copy_({x})")
    for row, column, rows, columns in boxes:
        box = f"[{row}:{row + rows}, {column}:{column + columns}]"
        m.either(f"{target}{box} = {y}{box}", f"{target}{box} = 0", f"{target}{box} = {x}[0, 0]")
    if own:
        m.add(f"{p}.copy_(own)")


def of_the_engine(m: Maker) -> None:
    """Copy from another tensor of the engine."""
    dtype = m.float()
    x = m.source((3, 4), dtype)
    p, q = m.parameter((3, 4), dtype), m.parameter((3, 4), m.rng.choice([dtype, torch.bfloat16]))
    first = m.rng.choice([f"{q}.copy_({x})", "pass", f"{q}.copy_({x}).neg_()"])
    m.add(first)
    m.either(
        f"{p}.copy_({q})",
        f"{p}.copy_({q}.clone())",
        f"{p}.copy_(torch.cat([{q}[:1], {x}[1:]]))",
        f"{p}.copy_({x}); {q}.copy_({p})",
        f"{p}.copy_({x} if {q}[0, 0] > 0 else -{x})",
        f"{p}.copy_({x}); {p}[0].copy_({p}[1])",
        f"{p}.copy_({x}); {p}.copy_({p}.flip(0))",
        f"{p}.copy_({x}); {p}[:, :2].copy_({p}[:, 2:])",
    )


def old_thread(m: Maker) -> None:
    """A queue and a thread that is not the loader's own."""
    x = m.source((3, 4), m.float())
    p = m.parameter((3, 4), m.one(x).dtype)
    work = m.rng.choice([f"{p}.copy_({x})", f"{p}[0].fill_(1)", f"{p}.copy_({x}).neg_()"])
    m.add(f"{p}.copy_({x})", "done = queue.Queue()", f"def work():\n            {work}\n            done.put(1)")
    m.either("_thread.start_new_thread(work, ())", "threading.Timer(0, work).start()", "POOL.submit(work)")
    m.add("done.get(timeout=2)")


def remembered(m: Maker) -> None:
    """State of the engine decides: counters, flags, caches."""
    dtype = m.float()
    x, y = m.source((3, 4), dtype), m.source((3, 4), dtype)
    p = m.parameter((3, 4), dtype)
    m.add(
        *m.rng.choice(
            [
                [f"self.cached = {x}", f"{p}.copy_(self.cached)"],
                [f"self.cached = {{'a': {x}}}", f"{p}.copy_(self.cached['a'])", "del self.cached"],
                [f"{p}.seen = True", f"{p}.copy_({x})"],
                ["self.register_buffer('made', torch.zeros(3, 4))", f"self.made.copy_({x})", f"{p}.copy_(self.made)"],
                [f"{p}.copy_({x} if self.loads == 0 else {y})", "self.loads = 3"],
                [f"self.derived = {x}.t().contiguous()", f"{p}.copy_({y})"],
            ]
        )
    )


HOSTILE: list[Part] = [
    by_permutation,
    by_permutation,
    through_buffer,
    through_buffer,
    by_number,
    by_number,
    by_condition,
    by_condition,
    by_size,
    filled,
    around,
    rebound,
    arithmetic,
    arithmetic,
    bits,
    over,
    of_the_engine,
    old_thread,
    remembered,
]
