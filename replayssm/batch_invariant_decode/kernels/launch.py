"""The launchers of the step: one launch for a layer, whatever its lanes do."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from replayssm.batch_invariant_decode.configs import step_tile
from replayssm.batch_invariant_decode.kernels.step import step_kernel
from replayssm.ssd.configs import padded
from replayssm.ssd.kernels.launch import OPERANDS, packed, stride


class Rows(NamedTuple):
    """Where the rows of the chunks lie, ``[slots, rows, ...]``; z and C perhaps None."""

    x: Tensor
    z: Tensor | None
    dt: Tensor
    B: Tensor
    C: Tensor | None


def step(
    ssm_state: Tensor,
    x_rows: Tensor,
    z_rows: Tensor | None,
    dt_rows: Tensor,
    B_rows: Tensor,
    C_rows: Tensor | None,
    num_buffered: Tensor,
    ring_start: Tensor | None,
    target_rows: Tensor,
    chunk_flags: Tensor,
    out: Tensor,
    shadow: Tensor | None,
    arrivals: Tensor | None,
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    batch_indices: Tensor,
    chunk_size: int,
    most_live: int,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> None:
    """See ``batch_invariant_decode_buffered_scan``; with ``ring_start`` folds are lazy and no token is committed."""
    rows = Rows(x_rows, z_rows, dt_rows, B_rows, C_rows)
    new = Rows(packed(x, 2), None if z is None else packed(z, 2), packed(dt, 2), packed(B, 2), packed(C, 2))
    _launch(
        ssm_state, shadow, arrivals, rows, new, x_rows.shape[1], num_buffered, ring_start, batch_indices, None,
        target_rows, chunk_flags, out, A, D, dt_bias, chunk_size, dt_softplus, dt_min, dt_max,
    )  # fmt: skip


def decode_rows(
    initial_states: Tensor,
    out: Tensor,
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    chunk_starts: Tensor,
    slots: Tensor,
    target_rows: Tensor,
    chunk_flags: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> None:
    """See ``replayssm.batch_invariant_decode._mamba_chunk_scan_decode_rows``."""
    # The flat buffers as those of one slot, without end; the token of a lane is one of their rows.
    flat = [None if t is None else packed(t).unsqueeze(0) for t in (x, z, dt, B, C)]
    rows = Rows(*flat)  # type: ignore[arg-type]
    tokens = Rows(*(None if t is None else t.expand(1, *t.shape[1:]) for t in flat))  # type: ignore[arg-type]
    _launch(
        initial_states, None, None, rows, tokens, (1 << 31) - 1, target_rows, None, slots, chunk_starts, target_rows,
        chunk_flags, out.unsqueeze(1), A, D, dt_bias, chunk_size, dt_softplus, dt_min, dt_max,
    )  # fmt: skip


def _launch(
    ssm_state: Tensor, shadow: Tensor | None, arrivals: Tensor | None, rows: Rows, new: Rows, ring_len: int,
    num_buffered: Tensor, ring_start: Tensor | None, slots: Tensor, chunk_starts: Tensor | None, target_rows: Tensor,
    chunk_flags: Tensor, out: Tensor, A: Tensor, D: Tensor | None, dt_bias: Tensor | None, chunk_size: int,
    dt_softplus: bool, dt_min: float, dt_max: float,
) -> None:  # fmt: skip
    """One launch. With ``chunk_starts`` the rows are flat: nothing is appended, and cursors are given by lane."""
    (lanes, T, H, P), (G, N) = out.shape, rows.B.shape[2:]
    if lanes == 0 or H * P * N == 0:
        return
    flat, per_group = chunk_starts is not None, H // G
    if arrivals is None and not flat:
        arrivals = torch.zeros(lanes, dtype=torch.int32, device=out.device)
    slots, A = packed(slots, 0), packed(A, 0)
    dt_bias = None if dt_bias is None else packed(dt_bias, 0)
    tile = step_tile(P, N, new.x.element_size(), T, per_group, lanes * H)
    by_lane = lambda tensor: 0 if flat or tensor is None else tensor.stride(0)  # noqa: E731
    step_kernel[(lanes * G * triton.cdiv(per_group, tile.heads) * triton.cdiv(P, tile.rows),)](
        ssm_state, shadow, *rows, *new, A, D, dt_bias, out,
        num_buffered, ring_start, slots, chunk_starts, arrivals, target_rows, chunk_flags,
        *scratch(lanes, H, T, padded(chunk_size), new.x),
        ssm_state.stride(0), stride(shadow), *(stride(tensor) for tensor in rows),
        rows.x.stride(1), rows.dt.stride(1), rows.B.stride(1),
        *(by_lane(tensor) for tensor in new), *(stride(tensor, 1) for tensor in new), out.stride(0), out.stride(1),
        stride(D), 0 if D is None or D.dim() == 1 else D.stride(1), T, ring_len, H, G, per_group, chunk_size,
        dt_min, dt_max, P=P, N=N, NP=padded(N), BN=tile.columns, ROWS=padded(chunk_size), TOKENS=padded(T),
        HEADS=tile.heads, BP=tile.rows, FP=tile.fold_rows, BT=min(tile.fold_tokens, padded(chunk_size)),
        STAGES=tile.stages, TOGETHER=1 if T == 1 else 4, ONE=T == 1, SOFTPLUS=dt_softplus,
        LAZY=ring_start is not None, FLAT=flat, OPERAND=OPERANDS[new.x.dtype], num_warps=tile.warps,
        maxnreg=tile.registers,
    )  # fmt: skip


def scratch(lanes: int, nheads: int, tokens: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for lanes that fold or cross; uninitialised, and the others do not touch it.

    Returns:
        The rows' weights, x's dtype ``[lanes, H, T, rows]``; exp(G_t), fp32 ``[lanes, H, T]``; the scales of a fold,
        fp32 ``[lanes, 2, H, rows]``; and exp(G_Q), fp32 ``[lanes, 2, H]``.
    """
    fp32 = lambda *shape: torch.empty(shape, dtype=torch.float32, device=like.device)  # noqa: E731
    weights = torch.empty(lanes, nheads, tokens, rows, dtype=like.dtype, device=like.device)
    return weights, fp32(lanes, nheads, tokens), fp32(lanes, 2, nheads, rows), fp32(lanes, 2, nheads)
