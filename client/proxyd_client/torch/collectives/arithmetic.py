"""What a reduction does to two operands, for every dtype that torch can do it with.

The inner group only moves bytes; the sums are done here, so that their order is ours: rank by rank inside a site, then
site by site. That makes them the same in each run, and the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from proxyd_client.errors import ArgumentError

Tensor = Any

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Reduction:
    """One reduce op for one dtype. Bools are summed as torch sums them: SUM is "or", PRODUCT is "and"."""

    def __init__(self, op: Any, dtype: Any, world_size: int) -> None:
        """Raises ArgumentError for what torch has no arithmetic for (MAX of complex numbers, sums of float8)."""
        kind = getattr(op, "op", op)
        self.name = str(kind).rpartition(".")[2]
        function = _FUNCTIONS.get(self.name)
        if function is None:
            raise ArgumentError(f"reduce op {kind} is unknown", next_step=f"Use one of {', '.join(_FUNCTIONS)}")
        self._function = function
        self._factor: Any = op.factor if self.name == "PREMUL_SUM" else None
        self._count = world_size
        if self.name == "AVG" and dtype == torch.bool:
            raise ArgumentError("AVG of bools means nothing", next_step="Use SUM (or) or PRODUCT (and)")
        try:
            one = torch.zeros(1, dtype=dtype)
            self.finish(self.into(self.prepare(one), one))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ArgumentError(f"torch can't reduce {dtype} by {self.name}", why=str(error)) from None

    def prepare(self, tensor: Tensor) -> Tensor:
        """A rank's contribution: itself, or (PREMUL_SUM) a product of it."""
        if self._factor is None:
            return tensor
        factor = self._factor
        return tensor * (factor.to(tensor.dtype) if isinstance(factor, torch.Tensor) else factor)

    @property
    def prepares(self) -> bool:
        """Whether :meth:`prepare` does anything."""
        return self._factor is not None

    def into(self, left: Tensor, right: Tensor) -> Tensor:
        """``left = left op right``."""
        return self._function(left, right, out=left)

    def onto(self, left: Tensor, right: Tensor) -> Tensor:
        """``right = left op right``: the order counts where both are NaNs."""
        return self._function(left, right, out=right)

    def fold(self, rows: Tensor, out: Tensor) -> Tensor:
        """``out = rows[0] op rows[1] op ...``, in this order."""
        if rows.shape[0] == 1:
            return out.copy_(rows[0])
        self._function(rows[0], rows[1], out=out)
        for row in rows[2:]:
            self._function(out, row, out=out)
        return out

    def finish(self, total: Tensor) -> Tensor:
        """The mean, in place, for AVG (of integers rounded towards zero, as NCCL's); else ``total`` as it is."""
        if self.name != "AVG":
            return total
        if total.is_floating_point() or total.is_complex():
            return total.div_(self._count)
        return total.div_(self._count, rounding_mode="trunc")
