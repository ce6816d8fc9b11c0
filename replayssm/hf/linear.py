"""Matrix products whose rows do not depend on how many rows are multiplied together.

A BLAS picks its kernel by the number of rows and splits the rows over its threads, so a token may get other bits when
it is scored alone than when it is scored with its neighbours. Which row counts agree is a property of the machine, the
shape, the library and the number of threads. It is measured here, and products with other counts are padded with rows
of zeros up to the next one that agrees.

On CUDA, ``replayssm.row_product`` multiplies, which treats rows alike by its making; that is measured all the same. On
the CPU two libraries are used. oneDNN with a weight packed in advance is the faster one for the few rows of a verify,
and nearly all of its row counts agree; the packed copy costs the weight's memory again, so large models and builds of
torch without oneDNN multiply with the weight as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.row_product import row_product

# Row counts up to this one are measured each; larger ones are spot-checked and then left as they are.
_MEASURED = 32
_SPOT_CHECKS = (33, 40, 47, 63)
# Rows that the packing is made for; it serves any number.
_PACKED_FOR = 8
# Elements of a weight from which on packing is faster: a packed product costs some ten microseconds more to call.
_LEAST_PACKED = 2**16
# Packed copies of all weights of a model together may take this many bytes.
_MOST_PACKED = 2**30
_measurements: dict[tuple[object, ...], tuple[list[int], bool]] = {}


def may_pack(linears: Sequence[nn.Linear]) -> bool:
    """Whether these layers' weights can be packed, and the copies are worth their memory."""
    weights = [each.weight for each in linears]
    on_cpu = torch.backends.mkldnn.is_available() and all(weight.device.type == "cpu" for weight in weights)
    return on_cpu and sum(weight.nbytes for weight in weights) <= _MOST_PACKED


class RowProduct:
    """``linear(x)`` for fp32 inputs, without gradients, from the weights that the layer has now.

    Args:
        linear: the layer.
        pack: whether to keep a packed copy of its weight if it is large enough (``may_pack``).

    Attributes:
        rows_alike: whether, on this machine and with this number of threads, a row was measured to get the same bits
            however many rows are multiplied together. If not, a warning says so.

    Example:
        >>> import torch
        >>> layer, x = torch.nn.Linear(33, 57), torch.randn(9, 33)
        >>> product = RowProduct(layer, pack=may_pack([layer]))
        >>> torch.equal(product(x)[:1], product(x[:1]))
        True
    """

    def __init__(self, linear: nn.Linear, pack: bool) -> None:
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach()
        pack = pack and weight.numel() > _LEAST_PACKED
        make = _packed if pack else _alone if weight.is_cuda else _plain
        self._multiply = make(weight, bias)
        threads = torch.get_num_threads()
        key = (weight.shape, weight.dtype, weight.device, bias is not None, pack, threads)
        if key not in _measurements:
            with torch.autocast(weight.device.type, enabled=False):
                _measurements[key] = _measure(self._multiply, weight.shape[1], weight.device)
        self._target, self.rows_alike = _measurements[key]
        if not self.rows_alike:
            warnings.warn(
                f"matrix products on this machine with {threads} threads round a row differently when it is multiplied "
                "together with others, so texts with and without drafts can differ where two tokens are almost equally "
                "likely; torch.set_num_threads(1) usually avoids that",
                stacklevel=2,
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., in_features]``; returns ``[..., out_features]``."""
        width = x.shape[-1]
        flat = x.reshape(-1, width)
        rows = flat.shape[0]
        target = self._target[rows] if rows <= _MEASURED else rows
        if target == rows:
            out = self._multiply(flat)
        else:
            padded = flat.new_zeros(target, width)
            padded[:rows] = flat
            out = self._multiply(padded)[:rows]
        return out.view(*x.shape[:-1], out.shape[-1])


class JoinedProduct:
    """Several linear layers without bias of one input, their outputs one behind the other in an order of ours.

    Packed, they are one product: a packed copy of a weight is made anyway. Otherwise their weights stay where they are
    and the outputs are put in order.

    Args:
        linears: the layers.
        order: column of all outputs, one behind the other, that comes first, second, ...; None: as they are.
        pack: as of ``RowProduct``.

    Attributes:
        rows_alike: as of ``RowProduct``.

    Example:
        >>> import torch
        >>> one, two, x = torch.nn.Linear(5, 2, bias=False), torch.nn.Linear(5, 3, bias=False), torch.randn(7, 5)
        >>> joined = JoinedProduct([one, two], [4, 3, 2, 0, 1], pack=False)
        >>> torch.equal(joined(x)[:, 3:], RowProduct(one, pack=False)(x))
        True
    """

    def __init__(self, linears: Sequence[nn.Linear], order: Sequence[int] | None, pack: bool) -> None:
        weights = [linear.weight.detach() for linear in linears]
        self._order = None if order is None else torch.tensor(order, device=weights[0].device)
        if pack:
            weight = torch.cat(weights)
            joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            joined.weight = nn.Parameter(weight if self._order is None else weight[self._order], requires_grad=False)
            linears, self._order = [joined], None
        self._products = [RowProduct(linear, pack) for linear in linears]
        self.rows_alike = all(product.rows_alike for product in self._products)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x`` ``[..., in_features]``; returns ``[..., sum of out_features]``."""
        outs = [product(x) for product in self._products]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
        return out if self._order is None else out.index_select(-1, self._order)


def _plain(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda rows: F.linear(_aligned(rows), weight, bias)


def _alone(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda rows: row_product(rows, weight, bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda rows: multiply(_aligned(rows), packed, bias, "none", [], "")


def _aligned(rows: Tensor) -> Tensor:
    """Rows that all begin at a multiple of 64 bytes: a BLAS may sum a row otherwise when it begins elsewhere."""
    width = rows.shape[1]
    if not width % 16:
        return rows
    return F.pad(rows, (0, -width % 16))[:, :width]


@torch.no_grad()
def _measure(multiply: Callable[[Tensor], Tensor], width: int, device: torch.device) -> tuple[list[int], bool]:
    """To how many rows to pad each number of rows, and whether all of them get the bits of 64 rows then."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(65, width, generator=generator, dtype=torch.float32, device="cpu").to(device)
    # The second product shows whether a row's place among the others, and in memory, matters.
    moved = rows[1:].clone()
    expected, shifted = multiply(rows[:64]), multiply(moved)
    if not torch.equal(expected[1:], shifted[:-1]):
        return list(range(_MEASURED + 1)), False

    def agrees(count: int) -> bool:
        first, second = multiply(rows[:count]), multiply(moved[:count])
        return torch.equal(first, expected[:count]) and torch.equal(second, shifted[:count])

    agreeing = [count for count in range(1, _MEASURED + 1) if agrees(count)]
    targets = [min((count for count in agreeing if count >= rows), default=0) for rows in range(_MEASURED + 1)]
    rows_alike = all(targets) and all(map(agrees, _SPOT_CHECKS))
    return [target or rows for rows, target in enumerate(targets)], rows_alike
