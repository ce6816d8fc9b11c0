"""``causal_conv1d_replay`` in Triton: a program computes some channels of some tokens of one request."""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.conv.configs import tile as conv_tile
from replayssm.kernels import ring_row


@triton.jit
def _convolve(
    rows, conv_start, x, weight, bias, out, slots, cu_seqlens,
    s_rows, s_start, s_x_b, s_x_t, s_weight_c, s_weight_w, s_bias, s_out_b, s_out_t, s_slots,
    seq_len, conv_len, channels, pad_slot_id,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    slot = request
    if slots is not None:
        slot = tl.load(slots + request * s_slots).to(tl.int64)
    if (slot < 0) | (slot == pad_slot_id):
        return
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + request)
        seq_len = tl.load(cu_seqlens + request + 1) - first
        x += first.to(tl.int64) * s_x_t
        out += first.to(tl.int64) * s_out_t
    else:
        x += request * s_x_b
        out += request * s_out_b
    start = tl.load(conv_start + slot * s_start)
    rows += slot * s_rows
    c_in = (c < channels)[None, :]
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if bias is not None:
        total += tl.load(bias + c * s_bias, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        at = token + (tap - (WIDTH - 1))  # a token of this call, or history where negative
        ring = ring_row(start, token + tap, conv_len)
        source = tl.where(
            (at < 0)[:, None], rows + ring[:, None] * channels + c[None, :], x + at[:, None] * s_x_t + c[None, :]
        )
        value = tl.load(source, mask=(token < seq_len)[:, None] & c_in, other=0.0)
        tap_weight = tl.load(weight + c * s_weight_c + tap * s_weight_w, mask=c < channels, other=0.0)
        total += value.to(tl.float32) * tap_weight.to(tl.float32)[None, :]
        if tap == WIDTH - 1:
            tl.store(rows + ring[:, None] * channels + c[None, :], value, mask=(token < seq_len)[:, None] & c_in)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(
        out + token[:, None] * s_out_t + c[None, :],
        total.to(out.dtype.element_ty),
        mask=(token < seq_len)[:, None] & c_in,
    )


def causal_conv1d_replay(
    rows: Tensor,
    conv_start: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    state_batch_indices: Tensor | None,
    pad_slot_id: int,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    out: Tensor,
) -> None:
    """See :func:`replayssm.conv.causal_conv1d_replay`."""
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    seq_len = x.shape[1] if max_seqlen is None else max_seqlen
    channels, width = weight.shape
    if batch * seq_len * channels == 0:
        return
    tile = conv_tile(seq_len)
    grid = (batch, triton.cdiv(seq_len, tile.tokens), triton.cdiv(channels, tile.channels))
    _convolve[grid](
        rows, conv_start, x, weight, bias, out, state_batch_indices, cu_seqlens,
        rows.stride(0), conv_start.stride(0), x.stride(0), x.stride(1), weight.stride(0), weight.stride(1),
        0 if bias is None else bias.stride(0), out.stride(0), out.stride(1),
        0 if state_batch_indices is None else state_batch_indices.stride(0),
        seq_len, rows.shape[1], channels, pad_slot_id,
        WIDTH=width, TOKENS=tile.tokens, CHANNELS=tile.channels, SILU=activation == "silu", num_warps=tile.warps,
    )  # fmt: skip
