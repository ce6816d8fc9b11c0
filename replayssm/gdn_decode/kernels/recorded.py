"""Commit and materialize, one launch for layers, requests and heads: stream states once, apply records in order."""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.gdn_decode.configs import next_power_of_2, simt_tile
from replayssm.gdn_decode.kernels.common import copy_state, load_state, replay, state_tile, store_state, stride


@triton.jit
def _apply(
    state, rawv, rawk, g, beta, sources, targets, counts, starts, track_slots, track_steps,
    s_state_l, s_state, s_rawv_l, s_rawv, s_rawk_l, s_rawk, s_g_l, s_g, s_beta_l, s_beta,
    s_sources, s_targets, s_counts, s_starts, s_track_slots, s_track_steps,
    batch, HV, heads_per_key, ring_len, null_block_id,
    V: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, TP: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 128 // C
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    MASKED: tl.constexpr = (V % ROWS != 0) or (4 * C != K)
    first = tl.program_id(0) % BLOCKS * ROWS
    head = tl.program_id(0) // BLOCKS % HV
    request = (tl.program_id(0) // BLOCKS // HV % batch).to(tl.int64)
    layer = (tl.program_id(0) // BLOCKS // HV // batch).to(tl.int64)
    source = tl.load(sources + request * s_sources).to(tl.int64)
    count = tl.load(counts + request * s_counts).to(tl.int32)
    if targets is None:
        target = source
        live = (source > null_block_id) & (count > 0)
    else:
        target = tl.load(targets + request * s_targets).to(tl.int64)
        live = (source > null_block_id) & (target > null_block_id)
    if live:
        state += layer * s_state_l + head * (V * K)
        at, in_rows, c = state_tile(state + source * s_state, first, V, K, ROWS, C)
        to, in_rows, c = state_tile(state + target * s_state, first, V, K, ROWS, C)
        if count == 0:
            copy_state(to, at, in_rows, c, K, MASKED)
        else:
            S0, S1, S2, S3 = load_state(at, in_rows, c, K, MASKED)
            start = 0
            if starts is not None:
                start = tl.load(starts + request * s_starts).to(tl.int32)
            track = None
            track_step = -1
            if track_slots is not None:
                place = tl.load(track_slots + request * s_track_slots).to(tl.int64)
                track, in_rows, c = state_tile(state + place * s_state, first, V, K, ROWS, C)
                if place > null_block_id:
                    track_step = tl.load(track_steps + request * s_track_steps).to(tl.int32)
            row = first + tl.arange(0, ROWS // LANES)[None, :] * LANES + tl.arange(0, LANES)[:, None]
            S0, S1, S2, S3 = replay(
                S0, S1, S2, S3, rawv + layer * s_rawv_l + source * s_rawv + head * ring_len * V,
                rawk + layer * s_rawk_l + source * s_rawk + head // heads_per_key * ring_len * K,
                g + layer * s_g_l + source * s_g + head * ring_len,
                beta + layer * s_beta_l + source * s_beta + head * ring_len,
                start, count, ring_len, row, track, track_step, in_rows, c, V, K, TP, NORM, MASKED,
            )  # fmt: skip
            store_state(to, S0, S1, S2, S3, in_rows, c, K, MASKED)


def _launch(
    checkpoint_state: Tensor, rings: tuple[Tensor, Tensor, Tensor, Tensor], sources: Tensor, targets: Tensor | None,
    counts: Tensor, starts: Tensor | None, track_slots: Tensor | None, track_steps: Tensor | None, norm: bool,
    null: int,
) -> None:  # fmt: skip
    layers, _, HV, V, K = checkpoint_state.shape
    batch, ring_len = sources.shape[0], rings[0].shape[3]
    if layers * batch == 0:
        return
    tile = simt_tile(V, K, layers * batch * HV)
    _apply[(layers * batch * HV * triton.cdiv(V, tile.rows),)](
        checkpoint_state, *rings, sources, targets, counts, starts, track_slots, track_steps,
        *checkpoint_state.stride()[:2], *(s for ring in rings for s in ring.stride()[:2]),
        sources.stride(0), stride(targets, 0), counts.stride(0), stride(starts, 0),
        stride(track_slots, 0), stride(track_steps, 0),
        batch, HV, HV // rings[1].shape[2], ring_len, null,
        V=V, K=K, ROWS=tile.rows, C=tile.columns, TP=min(16, next_power_of_2(ring_len)), NORM=norm,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def gated_delta_rule_replayssm_commit(
    checkpoint_state: Tensor,
    rawv_cache: Tensor,
    rawk_cache: Tensor,
    g_cache: Tensor,
    beta_cache: Tensor,
    state_indices: Tensor,
    accept_lens: Tensor,
    track_state_indices: Tensor | None,
    track_steps: Tensor | None,
    use_qk_l2norm: bool,
    null_block_id: int,
    backend: str,
) -> None:
    """See ``replayssm.gdn_decode.gated_delta_rule_replayssm_commit``; every backend runs token by token here."""
    _launch(
        checkpoint_state, (rawv_cache, rawk_cache, g_cache, beta_cache), state_indices, None, accept_lens, None,
        track_state_indices, track_steps, use_qk_l2norm, null_block_id,
    )  # fmt: skip


def gated_delta_rule_replayssm_materialize(
    checkpoint_state: Tensor,
    rawv_cache: Tensor,
    rawk_cache: Tensor,
    g_cache: Tensor,
    beta_cache: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    prefix_lens: Tensor,
    ring_start: Tensor | None,
    use_qk_l2norm: bool,
    null_block_id: int,
    backend: str,
) -> None:
    """See ``replayssm.gdn_decode.gated_delta_rule_replayssm_materialize``; every backend runs token by token here."""
    _launch(
        checkpoint_state, (rawv_cache, rawk_cache, g_cache, beta_cache), src_slots, dst_slots, prefix_lens, ring_start,
        None, None, use_qk_l2norm, null_block_id,
    )  # fmt: skip
