"""From the rows of a window to outputs: decays of all heads of a program at once, then head by head."""

import triton
import triton.language as tl

from replayssm.mamba.kernels.window import running_sums


@triton.jit
def of_head(tiles, i):
    """Tile ``i`` of ``[heads, ...]``."""
    mine = tl.arange(0, tiles.shape[0]) == i
    if len(tiles.shape) == 3:
        return tl.sum(tl.where(mine[:, None, None], tiles, 0.0), 0)
    elif len(tiles.shape) == 2:
        return tl.sum(tl.where(mine[:, None], tiles, 0.0), 0)
    else:
        return tl.sum(tl.where(mine, tiles, 0.0), 0)


@triton.jit
def window_decays(dt, a, old, seq_len, TK: tl.constexpr):
    """What the window's rows and the checkpoint keep until the new tokens.

    Args:
        dt: processed dt of the window's rows ``[heads, WP]``, zero outside.
        a: A of the heads.
        old: rows before the new tokens.
        seq_len: new tokens.
        TK: tokens of the result.

    Returns:
        (rows' decays times their dt ``[heads, WP, TK]``, the checkpoint's decays ``[heads, TK]``).
    """
    w = tl.arange(0, dt.shape[1])
    t = tl.arange(0, TK)
    sums = running_sums(dt)
    at_token = w[:, None] == old + t[None, :]
    total = tl.sum(tl.where(at_token[None, :, :], sums[:, :, None], 0.0), 1)
    gaps = a[:, None, None] * (total[:, None, :] - sums[:, :, None])
    seen = (w[:, None] <= old + t[None, :]) & (t < seq_len)[None, :]
    return tl.where(seen[None, :, :], tl.exp(gaps) * dt[:, :, None], 0.0), tl.exp(a[:, None] * total)


@triton.jit
def to_columns(tile, TP: tl.constexpr, DIGITS: tl.constexpr):
    """``[rows, tokens]`` to the TP columns of products: DIGITS for each token, then the same tokens again."""
    ROWS: tl.constexpr = tile.shape[0]
    TK: tl.constexpr = tile.shape[1]
    if TK == 1:
        return tl.broadcast_to(tile, [ROWS, TP])
    else:
        if DIGITS > 1:
            tile = tl.broadcast_to(tile[:, :, None], [ROWS, TK, DIGITS]).reshape(ROWS, TK * DIGITS)
        if TK * DIGITS < TP:
            tile = tl.broadcast_to(tile[:, None, :], [ROWS, TP // (TK * DIGITS), TK * DIGITS]).reshape(ROWS, TP)
        return tile


@triton.jit
def add_rows(y, x_rows, scores, pick, skip, OPERAND: tl.constexpr, HAS_D: tl.constexpr):
    """Add what the window's rows and the skip give to ``y`` [rows, TP]."""
    x_rows = tl.trans(x_rows).to(OPERAND)
    y = tl.dot(x_rows, scores.to(OPERAND), y, input_precision="tf32x3")
    if HAS_D:
        # x by token and in y's layout: an exact product, cheaper than another load.
        y += tl.dot(x_rows, pick, input_precision="tf32x3") * skip
    return y


@triton.jit
def store_outputs(y, z, out, p, p_in, seq_len, s_z_t, s_out_t, DIGITS: tl.constexpr):
    """Gate ``y`` [rows, TP] and store it."""
    if DIGITS > 1:
        y = tl.sum(y.reshape(y.shape[0], y.shape[1] // DIGITS, DIGITS), 2)
    t = tl.arange(0, y.shape[1])
    mask = p_in[:, None] & (t < seq_len)[None, :]
    if z is not None:
        gate = tl.load(z + t[None, :] * s_z_t + p[:, None], mask=mask, other=0.0).to(tl.float32)
        y *= gate / (1.0 + tl.exp(-gate))
    tl.store(out + t[None, :] * s_out_t + p[:, None], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def skip_of(early, D, head, s_D, i, BLOCKS: tl.constexpr):
    """D of the i-th head of a program, which a program of one block has loaded early."""
    if D is None or BLOCKS == 1:
        return of_head(early, i)
    else:
        return tl.load(D + (head + i) * s_D).to(tl.float32)
