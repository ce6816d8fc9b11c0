"""The launchers: two launches a step, one layer's worth of work each."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from replayssm.batch_invariant_decode.configs import prepare_tile, step_tile
from replayssm.batch_invariant_decode.kernels.prepare import prepare_step
from replayssm.batch_invariant_decode.kernels.step import score_step
from replayssm.ssd.configs import padded
from replayssm.ssd.kernels.constants import SUM_HEADS, SUM_WARPS
from replayssm.ssd.kernels.launch import OPERANDS, packed, stride


@cache
def overlapping(device: torch.device) -> bool:
    """Whether the second launch may begin before the first has ended: from compute capability 9.0 on."""
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


class Workspace(NamedTuple):
    """What the first launch leaves to the second.

    Attributes:
        cursors: int32 ``[lanes, 2]``: oldest row and live rows before the call.
        row_weights: x's dtype ``[lanes, H, T, rows of a chunk]``.
        row_decays: fp32 ``[lanes, H, T]``: exp(G_t).
        fold_scales: fp32 ``[lanes, 2, H, rows of a chunk]``: written where a chunk is full.
        fold_decays: fp32 ``[lanes, 2, H]``.
    """

    cursors: Tensor
    row_weights: Tensor
    row_decays: Tensor
    fold_scales: Tensor
    fold_decays: Tensor

    @classmethod
    def allocate(cls, lanes: int, nheads: int, tokens: int, chunk_size: int, like: Tensor) -> Workspace:
        """Uninitialised memory on the device and of the dtype of ``like``."""
        rows = padded(chunk_size)
        fp32 = lambda *shape: torch.empty(shape, dtype=torch.float32, device=like.device)  # noqa: E731
        return cls(
            torch.empty(lanes, 2, dtype=torch.int32, device=like.device),
            torch.empty(lanes, nheads, tokens, rows, dtype=like.dtype, device=like.device),
            fp32(lanes, nheads, tokens), fp32(lanes, 2, nheads, rows), fp32(lanes, 2, nheads),
        )  # fmt: skip


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
        ssm_state, shadow, rows, new, x_rows.shape[1], num_buffered, ring_start, batch_indices, None, target_rows,
        chunk_flags, out, A, D, dt_bias, chunk_size, dt_softplus, dt_min, dt_max,
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
        initial_states, None, rows, tokens, (1 << 31) - 1, target_rows, None, slots, chunk_starts, target_rows,
        chunk_flags, out.unsqueeze(1), A, D, dt_bias, chunk_size, dt_softplus, dt_min, dt_max,
    )  # fmt: skip


def _launch(
    ssm_state: Tensor, shadow: Tensor | None, rows: Rows, new: Rows, ring_len: int, num_buffered: Tensor,
    ring_start: Tensor | None, slots: Tensor, chunk_starts: Tensor | None, target_rows: Tensor, chunk_flags: Tensor,
    out: Tensor, A: Tensor, D: Tensor | None, dt_bias: Tensor | None, chunk_size: int, dt_softplus: bool, dt_min: float,
    dt_max: float,
) -> None:  # fmt: skip
    """Both launches. With ``chunk_starts`` the rows are flat: nothing is appended, and cursors are given by lane."""
    (lanes, T, H, P), (G, N) = out.shape, rows.B.shape[2:]
    if lanes == 0 or H * P * N == 0:
        return
    flat, per_group = chunk_starts is not None, H // G
    slots, A = packed(slots, 0), packed(A, 0)
    dt_bias = None if dt_bias is None else packed(dt_bias, 0)
    tile = step_tile(P, N, new.x.element_size(), T, lanes * H)
    first = prepare_tile(chunk_size, N, new.x.element_size())
    work = Workspace.allocate(lanes, H, T, chunk_size, new.x)
    padded_rows = padded(chunk_size)
    by_lane = lambda tensor: 0 if flat or tensor is None else tensor.stride(0)  # noqa: E731
    overlap = overlapping(new.x.device)
    shared = {
        "P": P, "N": N, "ROWS": padded_rows, "TOKENS": padded(T), "FLAT": flat, "OVERLAP": overlap,
        "OPERAND": OPERANDS[new.x.dtype],
    }  # fmt: skip
    prepare_step[(lanes * G * triton.cdiv(per_group, SUM_HEADS),)](
        *rows, num_buffered, ring_start, slots, chunk_starts, *new, A, dt_bias, *work,
        stride(rows.x), stride(rows.z), stride(rows.dt), stride(rows.B), stride(rows.C),
        rows.x.stride(1), rows.dt.stride(1), rows.B.stride(1),
        *(by_lane(tensor) for tensor in new), *(stride(tensor, 1) for tensor in new),
        T, ring_len, H, G, per_group, chunk_size, dt_min, dt_max,
        HEADS=SUM_HEADS, TOGETHER=1 if T == 1 else 4, BN=first.columns,
        WIDTH=triton.next_power_of_2(SUM_HEADS * P), WIDTH_N=padded(N), SOFTPLUS=dt_softplus, num_warps=SUM_WARPS,
        maxnreg=first.registers, **shared,
    )  # fmt: skip
    score_step[(lanes * H * triton.cdiv(P, tile.rows),)](
        ssm_state, shadow, rows.x, rows.B, num_buffered, ring_start, target_rows, chunk_flags, out, new.x, new.z, new.C,
        D, slots, chunk_starts, *work,
        ssm_state.stride(0), stride(shadow), stride(rows.x), stride(rows.B), rows.x.stride(1), rows.B.stride(1),
        out.stride(0), out.stride(1), by_lane(new.x), by_lane(new.z), by_lane(new.C),
        new.x.stride(1), stride(new.z, 1), stride(new.C, 1),
        stride(D), 0 if D is None or D.dim() == 1 else D.stride(1), T, ring_len, H, per_group, chunk_size,
        NP=padded(N), BP=tile.rows, FP=tile.fold_rows, BT=min(tile.tokens, padded_rows), ONE=T == 1,
        LAZY=ring_start is not None, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers, launch_pdl=overlap, **shared,
    )  # fmt: skip
