"""Make a random loader from a seed: parts of real engines' loaders, and parts that try to mislead a trace."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from tests.loaders.program import FLOATS, NARROW, Program, Source

Part = Callable[["Maker"], None]
MOST = 64  # elements of a tensor


class Maker:
    """Writes one program. Each part adds sources, attributes of the engine, and lines of one unit."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.program = Program(seed, self.rng.random() < 0.45)
        self.lines: list[str] = []

    # --- tensors ----------------------------------------------------------------------------------------------

    def shape(self, dims: int | None = None) -> tuple[int, ...]:
        """Return a shape of at most 64 elements."""
        dims = dims or self.rng.choice([1, 2, 2, 2, 3])
        sizes = {1: [3, 4, 6, 8], 2: [2, 3, 4, 6], 3: [2, 3, 4]}[dims]
        while True:
            found = tuple(self.rng.choice(sizes) for _ in range(dims))
            if torch.Size(found).numel() <= MOST:
                return found

    def float(self) -> torch.dtype:
        return self.rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, *FLOATS])

    def dtype(self) -> torch.dtype:
        if self.rng.random() < 0.8:
            return self.float()
        return self.rng.choice([*NARROW, torch.int64, torch.int32, torch.uint8, torch.bool])

    def source(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, kind: str = "any") -> str:
        """Declare a canonical tensor; return the expression that takes it."""
        name = f"m.{len(self.program.sources)}.{self.rng.choice(['weight', 'proj', 'bias', 'w1'])}"
        self.program.sources[name] = Source(shape, dtype or self.dtype(), kind)
        return f"w[{name!r}]"

    def parameter(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Declare a tensor of the engine; return the expression for it."""
        name = f"p{len(self.program.init)}"
        held = f"torch.full({shape}, {self.rng.choice([0, 1])}, dtype={dtype})"
        if self.rng.random() < 0.8 or not dtype.is_floating_point:
            line = f"self.{name} = nn.Parameter({held}, requires_grad=False)"
        else:
            line = f"self.register_buffer({name!r}, {held})"
        self.program.init.append(line)
        return f"self.{name}"

    def one(self, expression: str) -> torch.Tensor:
        """Return the value of an expression over the first version's tensors, for its shape and dtype."""
        found = eval(expression, {"torch": torch, "w": self.program.checkpoint(1)})
        assert isinstance(found, torch.Tensor)
        return found

    def add(self, *lines: str) -> None:
        self.lines += lines

    def either(self, *lines: str) -> None:
        """Add one of these lines."""
        self.add(self.rng.choice(lines))

    # --- expressions that move elements -----------------------------------------------------------------------

    def moved(self, expression: str, most: int = 4) -> str:
        """Return an expression that takes some elements of another one, in another order."""
        for _ in range(self.rng.randrange(most + 1)):
            made = self.move(expression, self.one(expression))
            value = self.one(made)
            if 0 < value.numel() <= MOST and value.dim() <= 4:
                expression = made
        return expression

    def move(self, x: str, value: torch.Tensor) -> str:
        rng, shape = self.rng, tuple(value.shape)
        if not shape:
            return f"{x}.reshape(1)"
        d = rng.randrange(len(shape))
        n = shape[d]
        start = rng.randrange(n)
        count = rng.randint(1, n - start)
        parts = rng.choice([p for p in (1, 2, 3) if p <= n])
        index = [rng.randrange(n) for _ in range(rng.randint(1, 4))]
        order = rng.sample(range(len(shape)), len(shape))
        factors = [k for k in range(1, n + 1) if n % k == 0]
        k = rng.choice(factors)
        other = self.source(shape, value.dtype) if rng.random() < 0.3 else x
        return rng.choice(
            [
                f"{x}.narrow({d}, {start}, {count})",
                f"{x}.narrow({d}, {start}, {count})",
                f"{x}.chunk({parts}, dim={d})[0]",
                f"{x}.chunk({parts}, dim={d})[-1]",
                f"{x}.split({k}, {d})[-1]",
                f"{x}.transpose({d}, {rng.randrange(len(shape))})",
                f"{x}.permute({', '.join(map(str, order))})",
                f"{x}.transpose({d}, {rng.randrange(len(shape))}).contiguous()",
                f"{x}.unflatten({d}, ({k}, -1))",
                f"{x}.reshape(-1)",
                f"{x}.unsqueeze({d})",
                f"torch.cat([{x}, {other}], dim={d})",
                f"torch.stack([{x}, {other}], dim={d})",
                f"{x}.index_select({d}, torch.tensor({index}))",
                f"{x}[{', '.join([':'] * d + [str(start)])}]",
                f"{x}[{', '.join([':'] * d + [f'::{rng.choice([1, 2])}'])}]",
                f"{x}.unsqueeze(0).expand(2, *{shape})",
                f"{x}.repeat({', '.join(['1'] * d + ['2'] + ['1'] * (len(shape) - d - 1))})",
                f"{x}.clone()",
            ]
        )

    # --- writes -----------------------------------------------------------------------------------------------

    def write(self, expression: str, dtype: torch.dtype | None = None) -> str:
        """Write an expression to a parameter of its shape; return the parameter."""
        value = self.one(expression)
        target = self.parameter(tuple(value.shape), dtype or value.dtype)
        self.add(self.copy(target, expression))
        return target

    def copy(self, target: str, expression: str) -> str:
        return self.rng.choice(
            [
                f"{target}.copy_({expression})",
                f"{target}.data.copy_({expression})",
                f"{target}[...] = {expression}",
                f"self.weight_loader({target}, {expression})",
            ]
        )

    def unit(self, part: Part) -> None:
        """Add one unit to the program, and the lines that call it."""
        self.lines = []
        part(self)
        number = len(self.program.units)
        self.program.units.append(self.lines)
        self.program.parts.append(part.__name__)
        call = f"self.unit{number}"
        how = self.rng.random()
        if how < 0.7:
            lines = [f"{call}(w)"]
        elif how < 0.8:
            lines = [f"thread = threading.Thread(target={call}, args=(w,))", "thread.start()", "thread.join()"]
        elif how < 0.9:
            lines = ["with concurrent.futures.ThreadPoolExecutor(2) as pool:", f"    pool.submit({call}, w).result()"]
        elif how < 0.97:
            lines = [f"POOL.submit({call}, w).result()"]
        else:
            lines = [f"list(POOL.map({call}, [w]))"]
        self.program.load += lines


def generate(seed: int) -> Program:
    """Return the loader of a seed."""
    from tests.loaders.benign import BENIGN
    from tests.loaders.hostile import HOSTILE

    maker = Maker(seed)
    program = maker.program
    program.load.append("w = dict(weights)")
    for _ in range(maker.rng.randint(1, 3)):
        hostile = not program.is_benign and maker.rng.random() < 0.7
        maker.unit(maker.rng.choice(HOSTILE if hostile else BENIGN))
    if not program.is_benign and not any(part.__name__ in program.parts for part in HOSTILE):
        maker.unit(maker.rng.choice(HOSTILE))
    program.units.append(["pass"])
    program.init.append("self.loads = 0")
    program.init.append("self.weight_loader = lambda param, loaded: param.data.copy_(loaded)")
    if maker.rng.random() < 0.2:
        program.load.append("self.loads += 1")
    return program
