"""Commit and materialize, one launch for layers, requests and heads: stream states once, apply records in order."""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.gdn_decode.configs import next_power_of_2, records_tile
from replayssm.gdn_decode.kernels.common import (
    PLAIN,
    apply_records,
    can_fetch,
    fetch,
    load_rows,
    prepare,
    record_place,
    record_slots,
    replay,
    rounded,
    rows_from,
    store_rows,
    stride,
)


@triton.jit(do_not_specialize=PLAIN)
def _apply(
    state, rawv, rawk, g, beta, sources, targets, counts, starts, track_slots, track_steps,
    s_state_l, s_state, s_rawv_l, s_rawv, s_rawk_l, s_rawk, s_g_l, s_g, s_beta_l, s_beta,
    s_sources, s_targets, s_counts, s_starts, s_track_slots, s_track_steps,
    batch, HV, heads_per_key, ring_len, null_block_id,
    V: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, C: tl.constexpr, TP: tl.constexpr,
    WHOLE: tl.constexpr, NORM: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    POLICY: tl.constexpr = "evict_last" if targets is None else ""
    PARTS: tl.constexpr = (V + ROWS * BLOCKS - 1) // (ROWS * BLOCKS)
    first = tl.program_id(0) % PARTS * (ROWS * BLOCKS)
    head, request, layer = record_place(tl.program_id(0) // PARTS, HV, batch)
    source, target, count, live = record_slots(
        request, sources, targets, counts, s_sources, s_targets, s_counts, null_block_id
    )
    if live:
        state += layer * s_state_l + head * (V * K)
        rawv += layer * s_rawv_l + source * s_rawv + head * ring_len * V
        rawk += layer * s_rawk_l + source * s_rawk + head // heads_per_key * ring_len * K
        g += layer * s_g_l + source * s_g + head * ring_len
        beta += layer * s_beta_l + source * s_beta + head * ring_len
        start = 0
        if starts is not None:
            start = tl.load(starts + request * s_starts).to(tl.int32)
        track = None
        track_step = -1
        if track_slots is not None:
            place = tl.load(track_slots + request * s_track_slots).to(tl.int64)
            track = state + place * s_state
            if place > null_block_id:
                track_step = tl.load(track_steps + request * s_track_steps).to(tl.int32)
        row = rows_from(first, ROWS, C)
        if HOLD:
            N0, N1, N2, N3 = load_rows(state + source * s_state, row, V, C, K, POLICY)
        if WHOLE:
            decays, betas, norms = prepare(g, beta, rawk, start, 0, count, ring_len, TP, C, K, NORM)
        for block in range(0, BLOCKS):
            row = rows_from(first + block * ROWS, ROWS, C)
            # The next block is on its way while records are applied to this one.
            if HOLD:
                R0, R1, R2, R3 = N0, N1, N2, N3
                if BLOCKS > 1:
                    end = tl.where(tl.full((), block, tl.int32) + 1 < BLOCKS, V, 0)
                    N0, N1, N2, N3 = load_rows(state + source * s_state, row + ROWS, end, C, K, POLICY)
            else:
                R0, R1, R2, R3 = load_rows(state + source * s_state, row, V, C, K, POLICY)
                fetch(state + source * s_state, first + (block + 1) * ROWS, V, K, ROWS)
            if count == 0:
                store_rows(state + target * s_state, row, V, R0, R1, R2, R3, K)
            else:
                S0, S1, S2, S3 = rounded(R0, R1, R2, R3, tl.float32)
                if WHOLE:
                    S0, S1, S2, S3 = apply_records(
                        S0, S1, S2, S3, decays, betas, norms, rawv, rawk, start, 0, count, ring_len, row, track,
                        track_step, V, K, NORM,
                    )  # fmt: skip
                else:
                    S0, S1, S2, S3 = replay(
                        S0, S1, S2, S3, rawv, rawk, g, beta, start, count, ring_len, row, V, K, TP, NORM
                    )
                store_rows(state + target * s_state, row, V, S0, S1, S2, S3, K)


def apply(
    checkpoint_state: Tensor, rings: tuple[Tensor, Tensor, Tensor, Tensor], sources: Tensor, targets: Tensor | None,
    counts: Tensor, starts: Tensor | None, track_slots: Tensor | None, track_steps: Tensor | None, norm: bool,
    null: int,
) -> None:  # fmt: skip
    """Commit, or materialize if there are ``targets``, on windows or, with ``starts``, on rings."""
    layers, _, HV, V, K = checkpoint_state.shape
    batch, ring_len = sources.shape[0], rings[0].shape[3]
    if layers * batch == 0:
        return
    tile = records_tile(V, K, layers * batch * HV)
    _apply[(layers * batch * HV * triton.cdiv(V, tile.rows * tile.blocks),)](
        checkpoint_state, *rings, sources, targets, counts, starts, track_slots, track_steps,
        *checkpoint_state.stride()[:2], *(s for ring in rings for s in ring.stride()[:2]),
        sources.stride(0), stride(targets, 0), counts.stride(0), stride(starts, 0),
        stride(track_slots, 0), stride(track_steps, 0),
        batch, HV, HV // rings[1].shape[2], ring_len, null,
        V=V, K=K, ROWS=tile.rows, BLOCKS=tile.blocks, C=tile.columns, TP=min(16, next_power_of_2(ring_len)),
        WHOLE=ring_len <= 16, NORM=norm, HOLD=tile.hold or not can_fetch(), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
