"""Commit and materialize in the window form (``docs/maths.md`` §7): a state is read once, for all tokens together.

With prefix decays P, corrections ``U = (I + A)^-1 diag(beta) (v - P S k)`` and the decays D behind each token, the
state becomes ``P_n S + (D U)^T k``. One kernel makes what needs no state, the other holds a tile of the state in
registers from its load to its store. Keys in bf16 are exact operands, states and corrections exact sums of bf16
numbers, so products have the accuracy of fp32; the last sum is a fused multiply-add.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.dispatch import overlaps
from replayssm.gdn_decode.configs import fold_tile
from replayssm.gdn_decode.kernels.common import PLAIN, fetch, record_place, record_slots, stride
from replayssm.gdn_decode.kernels.tensor_core import PARTS
from replayssm.gdn_decode.kernels.tensor_core_solve import solve_recorded
from replayssm.gdn_decode.kernels.tensor_core_tiles import (
    appended,
    as_operand,
    as_tile,
    halves,
    load_factor,
    load_tiles,
    operand_order,
    part,
    product,
    side_by_side,
    store_tile,
)
from replayssm.kernels import held


def can_fold(rawk: Tensor, ring_start: Tensor | None) -> bool:
    """Whether the kernels can apply these records: windows, not rings, with keys that are exact operands."""
    exact = rawk.dtype == torch.bfloat16 or triton.knobs.runtime.interpret
    return exact and ring_start is None and rawk.shape[3] <= 16


@triton.jit
def _keys(
    rawk, count, K: tl.constexpr, KB: tl.constexpr, TP: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr,
    OPERAND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """BLOCKS operands of KB columns of keys, 16 rows each: all tokens, twice if there are 8."""
    token = (tl.arange(0, 16) % TP)[:, None]
    keys = ()
    for b in tl.static_range(BLOCKS):
        c = b * KB + tl.arange(0, KB)[None, :]
        x = tl.load(rawk + token * K + c, mask=(token < count) & (c < K), other=0.0)
        keys = appended(keys, operand_order(held(x, ASM), E).to(OPERAND))
    return keys


@triton.jit
def _advance(
    state, tiles, keys, U, decay, first_row,
    V: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr, WARPS: tl.constexpr, TP: tl.constexpr,
    E: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Store ``decay S + U k^T``, S being the tiles and U fp32 ``[BV, TP]``."""
    U0, rest = part(U, OPERAND)
    U1, rest = part(rest, OPERAND)
    U2, _ = part(rest, OPERAND)
    if TP == 8:
        U0 = side_by_side(U0, U2 * 0)
        U1 = side_by_side(U1, U2)
    for b in tl.static_range(BLOCKS):
        # Small terms first: each product rounds the sum to which it is added.
        if TP == 8:
            D = tl.dot(U1, keys[b], input_precision="ieee")
        else:
            D = tl.dot(U2, keys[b], input_precision="ieee")
            D = tl.dot(U1, keys[b], D, input_precision="ieee")
        D = as_tile(tl.dot(U0, keys[b], D, input_precision="ieee"), BV, KB, WARPS, E)
        S = tl.fma(tiles[b].to(tl.float32), tl.broadcast_to(decay, D.shape), D)
        store_tile(state, S, b * KB, first_row, V, K, KB, BV, WARPS, E, MASKED)


@triton.jit
def _fetch_ahead(
    state, sources, counts, s_state_l, s_state, s_sources, s_counts, batch, HV, null_block_id,
    V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, ROW_BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Ask for the rows of the program AHEAD places behind this one to be brought into the L2 cache."""
    later = tl.minimum(tl.program_id(0) + AHEAD, tl.num_programs(0) - 1)
    head, request, layer = record_place(later // ROW_BLOCKS, HV, batch)
    slot = tl.load(sources + request * s_sources).to(tl.int64)
    if (slot > null_block_id) & (tl.load(counts + request * s_counts) > 0):
        fetch(state + layer * s_state_l + slot * s_state + head * (V * K), later % ROW_BLOCKS * BV, V, K, BV)


@triton.jit(do_not_specialize=PLAIN)
def _fold(
    state, rawv, rawk, solved, sources, targets, counts, track_slots, track_steps,
    s_state_l, s_state, s_rawv_l, s_rawv, s_rawk_l, s_rawk, s_sources, s_targets, s_counts, s_track_slots,
    s_track_steps, batch, HV, heads_per_key, null_block_id,
    T: tl.constexpr, V: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, BLOCKS: tl.constexpr, BV: tl.constexpr,
    WARPS: tl.constexpr, TP: tl.constexpr, E: tl.constexpr, STATE_PARTS: tl.constexpr, OPERAND: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """BV rows of one head's state after the first tokens of its window, in BLOCKS tiles of KB columns."""
    if OVERLAP:
        gdc_launch_dependents()
    ROW_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    MASKED: tl.constexpr = (V % BV != 0) or (KB * BLOCKS != K)
    first_row = tl.program_id(0) % ROW_BLOCKS * BV
    head, request, layer = record_place(tl.program_id(0) // ROW_BLOCKS, HV, batch)
    source, target, count, live = record_slots(
        request, sources, targets, counts, s_sources, s_targets, s_counts, null_block_id
    )
    if live:
        pool = state
        state += layer * s_state_l + head * (V * K)
        rawv += layer * s_rawv_l + source * s_rawv + head * (T * V)
        rawk += layer * s_rawk_l + source * s_rawk + head // heads_per_key * (T * K)
        tiles = load_tiles(state + source * s_state, first_row, V, K, KB, BV, WARPS, E, BLOCKS, MASKED)
        if targets is not None and count == 0:
            for b in tl.static_range(BLOCKS):
                store_tile(state + target * s_state, tiles[b], b * KB, first_row, V, K, KB, BV, WARPS, E, MASKED)
            if OVERLAP:
                gdc_wait()
        else:
            if AHEAD > 0:
                _fetch_ahead(
                    pool, sources, counts, s_state_l, s_state, s_sources, s_counts, batch, HV, null_block_id, V, K, BV,
                    ROW_BLOCKS, AHEAD,
                )  # fmt: skip
            n = first_row + tl.arange(0, BV)
            t = tl.arange(0, TP)
            v_in = (t < count)[:, None] & (n < V)[None, :]
            values = tl.load(rawv + t[:, None] * V + n[None, :], mask=v_in, other=0.0)
            keys = _keys(rawk, count, K, KB, TP, E, BLOCKS, OPERAND, ASM)
            # A sum of its own for every size of terms, as in the verify.
            large = tl.zeros((BV, 16), tl.float32)
            medium = tl.zeros((BV, 16), tl.float32)
            small = tl.zeros((BV, 16), tl.float32)
            for b in tl.static_range(BLOCKS):
                x = tl.trans(keys[b])
                S0, S = part(as_operand(tiles[b].to(tl.float32), BV, KB, WARPS, E), OPERAND)
                large = tl.dot(S0, x, large, input_precision="ieee")
                if STATE_PARTS > 1:
                    S1, S = part(S, OPERAND)
                    medium = tl.dot(S1, x, medium, input_precision="ieee")
                if STATE_PARTS > 2:
                    S2, S = part(S, OPERAND)
                    small = tl.dot(S2, x, small, input_precision="ieee")
            Sk = large + (medium + small)
            if TP == 8:
                Sk, _ = halves(Sk)
            if OVERLAP:
                gdc_wait()
            solved += (tl.program_id(0) // ROW_BLOCKS).to(tl.int64) * (4 * TP + 3 * TP * TP)
            factor = load_factor(solved + 4 * TP, TP, OPERAND)
            factors = held(tl.load(solved + t), ASM)
            after = held(tl.load(solved + TP + t), ASM)
            decay = tl.load(solved + 3 * TP)
            factor = held(factor, ASM)
            W = tl.trans(held(values, ASM)).to(tl.float32) - Sk * factors[None, :]
            U = product(W, factor, OPERAND)
            if track_slots is not None:
                place = tl.load(track_slots + request * s_track_slots).to(tl.int64)
                step = tl.load(track_steps + request * s_track_steps).to(tl.int32)
                if (place > null_block_id) & (step >= 0) & (step < count):
                    _advance(
                        state + place * s_state, tiles, keys, U * tl.load(solved + 2 * TP + t)[None, :],
                        tl.load(solved + 3 * TP + 1), first_row, V, K, KB, BV, WARPS, TP, E, BLOCKS, MASKED, OPERAND,
                    )  # fmt: skip
            _advance(
                state + target * s_state, tiles, keys, U * after[None, :], decay, first_row, V, K, KB, BV, WARPS, TP, E,
                BLOCKS, MASKED, OPERAND,
            )  # fmt: skip
    elif OVERLAP:
        gdc_wait()


def fold(
    checkpoint_state: Tensor, rings: tuple[Tensor, Tensor, Tensor, Tensor], sources: Tensor, targets: Tensor | None,
    counts: Tensor, starts: Tensor | None, track_slots: Tensor | None, track_steps: Tensor | None, norm: bool,
    null: int,
) -> None:  # fmt: skip
    """``recorded.apply`` for what ``can_fold`` allows; there are no ``starts`` then."""
    rawv, rawk, g, beta = rings
    layers, _, HV, V, K = checkpoint_state.shape
    H, T = rawk.shape[2:4]
    batch = sources.shape[0]
    heads = layers * batch * HV
    if heads == 0:
        return
    interpreted = triton.knobs.runtime.interpret
    overlap, operand = overlaps(rawk.device), tl.float32 if interpreted else tl.bfloat16
    early = {"launch_pdl": True} if overlap else {}
    tile = fold_tile(V, K, checkpoint_state.element_size(), T)
    solved = torch.empty(heads * (4 + 3 * tile.tokens) * tile.tokens, dtype=torch.float32, device=rawk.device)
    together = 2 - HV // H % 2
    solve_recorded[(heads // together,)](
        solved, rawk, g, beta, sources, counts, track_steps, *(s for ring in rings[1:] for s in ring.stride()[:2]),
        sources.stride(0), counts.stride(0), stride(track_steps, 0), batch, HV, HV // H, null,
        T=T, TP=tile.tokens, K=K, KP=tile.columns, E=16 // rawk.element_size(), HEADS=together, NORM=norm,
        OPERAND=operand, ASM=overlap, OVERLAP=overlap, num_warps=1, enable_fp_fusion=False, **early,
    )  # fmt: skip
    _fold[(heads * triton.cdiv(V, tile.rows),)](
        checkpoint_state, rawv, rawk, solved, sources, targets, counts, track_slots, track_steps,
        *checkpoint_state.stride()[:2], *rawv.stride()[:2], *rawk.stride()[:2], sources.stride(0), stride(targets, 0),
        counts.stride(0), stride(track_slots, 0), stride(track_steps, 0), batch, HV, HV // H, null,
        T=T, V=V, K=K, KB=tile.block, BLOCKS=tile.columns // tile.block, BV=tile.rows, WARPS=tile.warps,
        TP=tile.tokens, E=16 // checkpoint_state.element_size(), STATE_PARTS=PARTS[checkpoint_state.dtype],
        OPERAND=operand, ASM=overlap, OVERLAP=overlap, AHEAD=tile.ahead if overlap else 0, num_warps=tile.warps,
        num_stages=1, enable_fp_fusion=False, **early, **({"maxnreg": 128} if overlap and tile.ahead else {}),
    )  # fmt: skip
