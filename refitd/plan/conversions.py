"""Choose the conversion of each tensor from its source's offer and the dtype of each destination.

A source that holds float32 and may offer bfloat16 is described in one of two ways:

    rounded      dtype bfloat16, cast_from float32   it rounds when it publishes
    unrounded    dtype float32, cast_to bfloat16     the workers round for destinations that hold bfloat16

A destination says the dtype that it holds and, if it has declared one, the dtype that it is cast from:

    destination               from a rounded source        from an unrounded one
    bfloat16                  copied                       rounded by the workers
    bfloat16 from float32     copied: rounded already      rounded by the workers
    float32                   refused                      copied
    float16 from float32      refused                      rounded by the workers
    float32 from bfloat16     widened, as it declares      copied
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from refitd.describe.casts import cast_number


@dataclass(frozen=True, slots=True)
class Offered:
    """The dtype of an offered tensor, and the other dtype that the offer names.

    Attributes:
        dtype: of the elements that can be read.
        exact: the dtype that was rounded to `dtype`; None if it is not rounded.
        may: the dtype that it may be converted to; None if none is named.
    """

    dtype: str
    exact: str | None = None
    may: str | None = None

    def read_as(self, holds: str, cast_from: str | None) -> str:
        """Return the dtype that a destination reads: `dtype` if it can be read so, else what it declares.

        Args:
            holds: the destination's own dtype.
            cast_from: the dtype that it declares to be cast from, None if it declares none.
        """
        wanted = cast_from or holds
        is_made = self.exact is not None and holds == self.dtype and wanted == self.exact
        is_allowed = self.may is not None and (
            self.may == holds == wanted or (holds == self.dtype and wanted == self.may)
        )
        return self.dtype if is_made or is_allowed else wanted

    def lacks(self, holds: str, cast_from: str | None) -> bool:
        """Return whether a destination needs the elements unrounded, and can be given them so."""
        wanted = self.read_as(holds, cast_from)
        return wanted == self.exact != self.dtype and cast_number(wanted, holds) is not None


# By canonical name: each (dtype, declared cast) of targets that hold the tensor.
Held = Mapping[str, Iterable[tuple[str, str | None]]]


def unrounded(offered: Mapping[str, Offered], held: Held) -> set[str]:
    """Return the canonical tensors that some destination needs unrounded and that are offered rounded."""
    return {name for name, one in offered.items() if any(one.lacks(holds, cast) for holds, cast in held.get(name, ()))}
