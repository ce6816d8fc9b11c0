"""The launchers of the step: one launch for few lanes, two for many."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from replayssm.batch_invariant_decode.configs import BatchTile, StepTile, batch_tile, chunk_rows, step_tile
from replayssm.batch_invariant_decode.kernels.batch import prepare_kernel
from replayssm.batch_invariant_decode.kernels.step import step_kernel
from replayssm.batch_invariant_decode.kernels.stream import stream_kernel
from replayssm.dispatch import overlaps
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
    sums: Tensor | None,
    num_summed: Tensor | None,
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
    call = _Call(
        ssm_state, shadow, sums, num_summed, rows, new, x_rows.shape[1], num_buffered, ring_start,
        packed(batch_indices, 0), None, target_rows, chunk_flags, out, packed(A, 0), D,
        None if dt_bias is None else packed(dt_bias, 0), chunk_size, dt_softplus, dt_min, dt_max,
    )  # fmt: skip
    _launch(call, arrivals)


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
    # The flat buffers as those of one slot, without end; the token of a lane is one of their rows. Those of x, dt and B
    # are taken to lie side by side, as they do in buffers.
    x, dt, B = packed(x, 0), packed(dt, 0), packed(B, 0)
    chunk_starts, target_rows, chunk_flags = packed(chunk_starts, 0), packed(target_rows, 0), packed(chunk_flags, 0)
    flat = [None if t is None else packed(t).unsqueeze(0) for t in (x, z, dt, B, C)]
    rows = Rows(*flat)  # type: ignore[arg-type]
    tokens = Rows(*(None if t is None else t.expand(1, *t.shape[1:]) for t in flat))  # type: ignore[arg-type]
    call = _Call(
        initial_states, None, None, None, rows, tokens, (1 << 31) - 1, target_rows, None, packed(slots, 0),
        chunk_starts, target_rows, chunk_flags, out.unsqueeze(1), packed(A, 0), D,
        None if dt_bias is None else packed(dt_bias, 0), chunk_size, dt_softplus, dt_min, dt_max,
    )  # fmt: skip
    _launch(call, None)


class _Call(NamedTuple):
    """What both forms of a step take, with the tensors packed as kernels want them."""

    ssm_state: Tensor
    shadow: Tensor | None
    sums: Tensor | None
    num_summed: Tensor | None
    rows: Rows
    new: Rows
    ring_len: int
    num_buffered: Tensor
    ring_start: Tensor | None
    slots: Tensor
    chunk_starts: Tensor | None
    target_rows: Tensor
    chunk_flags: Tensor
    out: Tensor
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    chunk_size: int
    dt_softplus: bool
    dt_min: float
    dt_max: float

    def by_lane(self, tensor: Tensor | None) -> int:
        """Stride from lane to lane; in a flat call a lane's tokens are found by their row."""
        return 0 if self.chunk_starts is not None else stride(tensor)

    def skip_strides(self) -> tuple[int, int]:
        """Strides of D by head and by element."""
        return stride(self.D), 0 if self.D is None or self.D.dim() == 1 else self.D.stride(1)

    def kept(self) -> tuple[Tensor, Tensor]:
        """``(sums, num_summed)``; of this call alone, all rows unknown, where the buffers keep none."""
        if self.sums is not None and self.num_summed is not None:
            return self.sums, self.num_summed
        (slots, rows, heads), device = self.rows.dt.shape, self.out.device
        sums = torch.empty(slots, heads, rows, 2, dtype=torch.float32, device=device)
        return sums, torch.zeros(slots, dtype=torch.int32, device=device)

    def constants(self) -> dict[str, Any]:
        """What both forms compile in."""
        T, (P, N) = self.out.shape[1], self.ssm_state.shape[2:]
        return {
            "P": P, "N": N, "NP": padded(N), "ROWS": chunk_rows(self.chunk_size), "TOKENS": padded(T),
            "OPERAND": OPERANDS[self.new.x.dtype],
        }  # fmt: skip


def _launch(call: _Call, arrivals: Tensor | None) -> None:
    """Choose the form by the size of the batch."""
    (lanes, T, H, P), N = call.out.shape, call.ssm_state.shape[3]
    if lanes == 0 or H * P * N == 0:
        return
    element = call.new.x.element_size()
    tile = None if call.chunk_starts is not None else batch_tile(P, N, call.chunk_size, element, T, lanes, H)
    if tile is None:
        _launch_one(call, step_tile(P, N, call.chunk_size, element, lanes * H), arrivals)
    else:
        _launch_two(call, tile)


def _launch_one(call: _Call, tile: StepTile, arrivals: Tensor | None) -> None:
    """One launch. With ``chunk_starts`` the rows are flat: nothing is appended, and cursors are given by lane."""
    (lanes, T, H, P), G = call.out.shape, call.rows.B.shape[2]
    flat, rows, new, shared = call.chunk_starts is not None, call.rows, call.new, call.constants()
    if arrivals is None and not flat:
        arrivals = torch.zeros(lanes, dtype=torch.int32, device=call.out.device)
    kept, tokens = call.sums, triton.next_power_of_2(T)
    if kept is None:
        ring_len = shared["ROWS"] if flat else call.ring_len
        kept = torch.empty(lanes, H, ring_len, 2, dtype=torch.float32, device=call.out.device)
    del shared["TOKENS"]
    step_kernel[(lanes * H * triton.cdiv(P, tile.rows),)](
        call.ssm_state, call.shadow, *rows, kept, *new, call.A, call.D, call.dt_bias, call.out,
        call.num_buffered, call.ring_start, call.num_summed, call.slots, call.chunk_starts, arrivals, call.target_rows,
        call.chunk_flags, call.ssm_state.stride(0), stride(call.shadow), *(stride(tensor) for tensor in rows),
        kept.stride(0), kept.stride(1),
        *(call.by_lane(tensor) for tensor in new), *(stride(tensor, 1) for tensor in new),
        call.out.stride(0), call.out.stride(1), *call.skip_strides(), T, call.ring_len, call.chunk_size,
        call.dt_min, call.dt_max, H=H, G=G, BN=tile.columns, TP=tokens, COLUMNS=max(8, tokens), BP=tile.rows,
        FP=tile.fold_rows, BT=tile.fold_tokens, SOFTPLUS=call.dt_softplus,
        LAZY=call.ring_start is not None, FLAT=flat, ONE=T == 1, THREADS=32 * tile.warps, num_warps=tile.warps,
        maxnreg=tile.registers, **shared,
    )  # fmt: skip


def _launch_two(call: _Call, tile: BatchTile) -> None:
    """Products and sums first, then the states, the second launch beginning while the first still runs."""
    (lanes, T, H, P), G = call.out.shape, call.rows.B.shape[2]
    rows, new, overlap, ring = call.rows, call.new, overlaps(call.out.device), call.ring_start is not None
    sums, num_summed = call.kept()
    shared = {**call.constants(), "OVERLAP": overlap, "LAZY": ring, "TP": triton.next_power_of_2(T)}
    wide, operand, heads = shared.pop("TOKENS"), shared.pop("OPERAND"), tile.prepare_heads
    work = (sums, num_summed, *scratch(lanes, G, T, shared["ROWS"], new.x))
    parts = max(triton.cdiv(H // G, heads), triton.cdiv(call.chunk_size, tile.prepare_rows))
    prepare_kernel[(lanes, G, parts)](
        *rows, *new, call.A, call.dt_bias, call.num_buffered, call.ring_start, call.slots, *work,
        *(stride(tensor) for tensor in rows), rows.x.stride(1), rows.dt.stride(1), rows.B.stride(1),
        *(stride(tensor) for tensor in new), *(stride(tensor, 1) for tensor in new), sums.stride(0), sums.stride(1),
        T, call.ring_len, G, H // G, call.chunk_size, call.dt_min, call.dt_max,
        BN=tile.prepare_columns, BR=tile.prepare_rows, HEADS=heads, WIDTH=triton.next_power_of_2(heads * P),
        TOKENS=max(8 if new.x.element_size() == 2 else 16, shared["TP"]), SOFTPLUS=call.dt_softplus, num_warps=4,
        maxnreg=tile.prepare_registers, **shared,
    )  # fmt: skip
    width, columns = triton.next_power_of_2(tile.heads * P), triton.next_power_of_2(tile.heads) * shared["TP"]
    streams = lanes * G * triton.cdiv(H // G, tile.heads)
    launches = [(0, streams), (tile.workers, tile.workers)] if tile.apart else [(tile.workers, tile.workers + streams)]
    for workers, grid in launches:
        stream_kernel[(grid,)](
            call.ssm_state, call.shadow, rows.x, rows.B, new.x, new.z, new.C, call.D, call.out,
            call.num_buffered, call.ring_start, call.slots, call.target_rows, call.chunk_flags, *work,
            call.ssm_state.stride(0), stride(call.shadow), stride(rows.x), stride(rows.B), rows.x.stride(1),
            rows.B.stride(1), stride(new.x), stride(new.z), stride(new.C), stride(new.x, 1), stride(new.z, 1),
            stride(new.C, 1), sums.stride(0), sums.stride(1), call.out.stride(0), call.out.stride(1),
            *call.skip_strides(), T, call.ring_len, H, G, H // G, call.chunk_size, lanes, workers, HEADS=tile.heads,
            WIDTH=width, COLUMNS=max(8, columns), TOKENS=wide, FP=tile.fold_rows,
            BT=min(tile.fold_tokens, shared["ROWS"]), MOVED=tile.moved, ONE=T == 1, STAGES=tile.stages, OPERAND=operand,
            FOLDS=workers > 0, LEADS=workers == 0 and overlap, num_warps=tile.warps, maxnreg=tile.registers,
            launch_pdl=overlap, **shared,
        )  # fmt: skip


def scratch(lanes: int, ngroups: int, tokens: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What one launch of a step leaves to the other, uninitialised.

    Returns:
        The cursors as they were, int32 ``[lanes, 2]``; and ``B_j C_t``, fp32 ``[lanes, G, T, rows]``.
    """
    cursors = torch.empty(lanes, 2, dtype=torch.int32, device=like.device)
    return cursors, torch.empty(lanes, ngroups, tokens, rows, dtype=torch.float32, device=like.device)
