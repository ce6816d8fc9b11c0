"""The window form of one request: everything between a checkpoint and the newest token at once, in fp32.

``docs/maths.md`` §2 and §3 derive it. Each function handles one request, because a request's bits must not depend on
how many others there are, and a matrix product over several requests may be blocked differently.

Shapes: H heads, G groups, P head dim, N state dim, k live rows, T new tokens, n = k + T rows of the window.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def read_rows(ring: Tensor, start: int, count: int) -> Tensor:
    """The ``count`` rows (axis 1) of a slot's ring from ``start`` on, as fp32: a view where that is possible."""
    ring_len = ring.shape[1]
    start %= ring_len
    first = min(count, ring_len - start)
    rows = ring.narrow(1, start, first)
    if first < count:
        rows = torch.cat((rows, ring.narrow(1, 0, count - first)), 1)
    return rows.float()


def write_rows(ring: Tensor, start: int, rows: Tensor) -> None:
    """Write ``rows`` (axis 1) into a slot's ring from row ``start`` on, around its end."""
    ring_len, count = ring.shape[1], rows.shape[1]
    start %= ring_len
    first = min(count, ring_len - start)
    if first == count:
        ring.narrow(1, start, count).copy_(rows)
        return
    ring.narrow(1, start, first).copy_(rows.narrow(1, 0, first))
    ring.narrow(1, 0, count - first).copy_(rows.narrow(1, first, count - first))


def _aligned(operand: Tensor) -> Tensor:
    """The fp32 operand of a matrix product, moved when its place in memory could change the product's bits.

    A product is summed differently where rows start off the multiples of 16 bytes: bits would depend on the slot, on
    the cursor and on the place in the batch. What is returned is packed from a multiple of 16 bytes on, or as good as.
    """
    in_place = operand.is_contiguous() or not any(stride % 4 for stride in operand.stride()[:-1])
    if in_place and operand.data_ptr() % 16 == 0:
        return operand
    return operand.clone(memory_format=torch.contiguous_format)


def fold(state: Tensor, x: Tensor, B: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    """Advance a state by k rows, in place: ``S = exp(G_k) S + sum_i exp(G_k - G_i) dt_i x_i B_i^T``.

    Args:
        state: fp32 ``[H, P, N]``, packed, written in place.
        x: fp32 ``[H, k, P]``.
        B: fp32 ``[G, k, N]``.
        dt: processed dt, fp32 ``[H, k]``.
        A: fp32 ``[H, 1]``.

    Returns:
        ``state``.
    """
    H, P, N = state.shape
    G = B.shape[0]
    # Sums and differences in fp64: where sums reach hundreds, fp32 would cost the decays three digits.
    sums = dt.cumsum(1, dtype=torch.float64).mul_(A)
    total = sums[:, -1:]
    weights = (total - sums).float().exp_().mul_(dt)
    x = (x * weights.unsqueeze(2)).transpose(1, 2).reshape(G, H // G * P, -1)
    decay = total.float().exp_().view(G, H // G, 1, 1)
    moved = _aligned(state)
    heads = moved.view(G, H // G, P, N)
    # Group by group, so that the second pass finds the group's state in the cache.
    for group in range(G):
        heads[group].mul_(decay[group]).view(H // G * P, N).addmm_(x[group], B[group])
    return state if moved is state else state.copy_(moved)


@cache
def _future(T: int, k: int) -> Tensor:
    """Mask ``[T, k + T]``: row j comes after new token t."""
    return torch.ones(T, k + T, dtype=torch.bool, device="cpu").triu_(k + 1)


def score(state: Tensor, scale: Tensor | None, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    """Outputs of the T newest of n rows, without the skip: ``y_t = exp(G_t) S C_t + sum_{j<=t} w_tj (B_j C_t) x_j``.

    Here ``w_tj = exp(G_t - G_j) dt_j``.

    Args:
        state: the checkpoint before the n rows, fp32 ``[H, P, N]``, packed; with ``scale`` its codes as fp32.
        scale: fp32 ``[H, P]`` or None, applied after the product with C.
        x: fp32 ``[H, n, P]``.
        B: fp32 ``[G, n, N]``.
        C: fp32 ``[G, T, N]``.
        dt: processed dt, fp32 ``[H, n]``.
        A: fp32 ``[H, 1]``.

    Returns:
        fp32 ``[H, T, P]``, new.
    """
    H, P, N = state.shape
    G, T, _ = C.shape
    n = dt.shape[1]
    sums = dt.cumsum(1, dtype=torch.float64).mul_(A)
    newest = sums.narrow(1, n - T, T).unsqueeze(2)
    weights = (newest - sums.unsqueeze(1)).float()
    if T > 1:
        weights.masked_fill_(_future(T, n - T), -torch.inf)
    weights.exp_().mul_(dt.unsqueeze(1))
    state, B, C = _aligned(state), _aligned(B), _aligned(C)
    weights.view(G, H // G, T, n).mul_(torch.bmm(C, B.transpose(1, 2)).unsqueeze(1))
    y = torch.bmm(weights, x)
    # [G, T, H/G * P] in this order is one product that reads the state once.
    from_state = torch.bmm(C, state.view(G, H // G * P, N).transpose(1, 2))
    from_state = from_state.view(G, T, H // G, P).transpose(1, 2).reshape(H, T, P)
    if scale is not None:
        from_state = from_state * scale.unsqueeze(1)
    return y.addcmul_(from_state, newest.float().exp_())
