"""Matrix products whose rows do not depend on how many rows are multiplied together.

A BLAS picks its kernel by the number of rows (and splits the rows over its threads), so a token may get other bits when
it is scored alone than when it is scored with its neighbours. Which row counts agree is a property of the machine, the
shape and the number of threads. It is measured here, and products with other counts are padded with rows of zeros up
to the next one that agrees.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Row counts up to this one are measured each; larger ones are spot-checked and then left as they are.
_MEASURED = 32
_SPOT_CHECKS = (33, 40, 47, 63)
_measurements: dict[tuple[object, ...], tuple[frozenset[int], bool]] = {}


def _measure(linear: nn.Linear) -> tuple[frozenset[int], bool]:
    """Row counts whose products agree with those of 64 rows, and whether all spot checks above them agree too."""
    weight, bias = linear.weight, linear.bias
    key = (weight.shape, weight.stride(), bias is not None, torch.get_num_threads())
    if key not in _measurements:
        rows = torch.randn(65, weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
        with torch.no_grad():
            # The second product shows whether a row's place among the others matters.
            expected, shifted = F.linear(rows[:64], weight, bias), F.linear(rows[1:], weight, bias)
            if not torch.equal(expected[1:], shifted[:-1]):
                return frozenset(), False

            def agrees(count: int) -> bool:
                first, second = (F.linear(rows[start : start + count], weight, bias) for start in (0, 1))
                return torch.equal(first, expected[:count]) and torch.equal(second, shifted[:count])

            agreeing = frozenset(count for count in range(1, _MEASURED + 1) if agrees(count))
            _measurements[key] = agreeing, all(map(agrees, _SPOT_CHECKS))
    return _measurements[key]


class RowPadding:
    """Row counts to pad to, shared by the linear layers of one model.

    Attributes:
        exact: whether, on this machine and with this number of threads, every padded product gives a row the same bits
            however many rows are multiplied together.
    """

    def __init__(self, linears: Iterable[nn.Linear]) -> None:
        self._linears = list(linears)
        self._threads = 0
        self._target: list[int] = []
        self.exact = False
        self.refresh()

    def refresh(self) -> None:
        """Measure again if the number of threads has changed since the last time."""
        if self._threads == torch.get_num_threads():
            return
        self._threads = torch.get_num_threads()
        measured = [_measure(linear) for linear in self._linears]
        agreeing = frozenset.intersection(*(counts for counts, _ in measured))
        targets = [min((c for c in agreeing if c >= rows), default=0) for rows in range(_MEASURED + 1)]
        self.exact = all(targets) and all(large for _, large in measured)
        self._target = [target or rows for rows, target in enumerate(targets)]
        if not self.exact:
            warnings.warn(
                f"matrix products on this machine with {self._threads} threads round a row differently when it is "
                "multiplied together with others, so texts with and without drafts can differ where two tokens are "
                "almost equally likely; torch.set_num_threads(1) usually avoids that",
                stacklevel=2,
            )

    def multiply(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """``F.linear`` of ``x`` ``[..., in_features]`` with the rows padded."""
        width = x.shape[-1]
        rows = x.numel() // width
        flat = x.reshape(rows, width)
        target = self._target[rows] if rows <= _MEASURED else rows
        if target != rows:
            padded = flat.new_zeros(target, width)
            padded[:rows] = flat
            flat = padded
        out = F.linear(flat, linear.weight, linear.bias)[:rows]
        return out.view(*x.shape[:-1], out.shape[-1])


class PaddedLinear:
    """The forward of one attached ``nn.Linear``."""

    def __init__(self, linear: nn.Linear, padding: RowPadding) -> None:
        self.linear, self.padding = linear, padding

    def __call__(self, input: Tensor) -> Tensor:
        """``linear(input)``; the argument has the name that ``nn.Linear`` gives it."""
        return self.padding.multiply(self.linear, input)
