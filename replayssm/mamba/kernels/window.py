"""What the step and the materialize kernel share: folding ring rows into rows of a state."""

import triton
import triton.language as tl

from replayssm.mamba.kernels.rounding import decode, decode_words, encode, encode_words, noise_tile


@triton.jit
def load(pointer, mask, MASKED: tl.constexpr):
    """Load with a mask where the tile overhangs, without one where the mask would hold everywhere."""
    if MASKED:
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def store(pointer, value, mask, MASKED: tl.constexpr):
    """Store with a mask where the tile overhangs."""
    if MASKED:
        tl.store(pointer, value, mask=mask)
    else:
        tl.store(pointer, value)


@triton.jit
def running_sums(dt):
    """Sums up to each row of ``dt`` [heads, WP]: a product of fp32, as its order of adding depends on no tile."""
    row = tl.arange(0, dt.shape[1])
    return tl.dot(dt, (row[:, None] <= row[None, :]).to(tl.float32), input_precision="ieee")


@triton.jit
def fold_weights(dt, A, live):
    """``(decay [heads], weights [heads, WP])`` of ``live`` rows: exp(G_k) and exp(G_k - G_i) dt_i, zero from there on.

    ``dt`` [heads, WP] is zero there, ``A`` [heads] holds fp32 numbers.
    """
    row = tl.arange(0, dt.shape[1])[None, :]
    sums = running_sums(dt)
    total = tl.sum(tl.where(row == live - 1, sums, 0.0), 1)
    weights = tl.where(row < live, tl.exp(A[:, None] * (total[:, None] - sums)) * dt, 0.0)
    return tl.exp(A * total), weights


@triton.jit
def weighted(x_rows, weights, OPERAND: tl.constexpr):
    """Rows ``[window, rows]`` of x times fold_weights' weights, turned; x has fewer elements than B in every tile."""
    return tl.trans((x_rows.to(tl.float32) * weights[:, None]).to(OPERAND))


@triton.jit
def planes(tile, COUNT: tl.constexpr):
    """``[rows, N]`` as COUNT tiles: of 4, tile j has the columns 4 m + j, which are byte j of word m of 8-bit codes."""
    if COUNT == 1:
        return (tile,)
    else:
        even, odd = tl.split(tile.reshape(tile.shape[0], tile.shape[1] // 4, 2, 2))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def turned(tiles):
    """Each of four tiles transposed."""
    return tl.trans(tiles[0]), tl.trans(tiles[1]), tl.trans(tiles[2]), tl.trans(tiles[3])


@triton.jit
def fold_rows(
    codes_in, scale_in, x_weighted, B_planes, decay, seed, slot, head, p,
    N: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, OPERAND: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Fold ring rows into the rows ``p`` of a head's state.

    Args:
        codes_in: the stored tile ``[rows, N]``, or its words ``[rows, N // 4]`` where ``B_planes`` are four.
        scale_in: fp32 ``[rows]``, read for the 8-bit types alone.
        x_weighted: ring rows from ``weighted``, ``[rows, window]``.
        B_planes: ``planes`` of ring rows ``[window, N]``, zero where not live.
        decay: exp(G_k) from fold_weights.
        seed: int64 random seed, read if ROUNDS > 0.
        slot: slot that is written, a counter word of the noise.
        head: head, another one.
        p: int32 ``[rows]``, rows of the state.
        N: columns of the tiles.
        KIND: storage type, a value of ``common.KINDS``.
        ROUNDS: rounds of the random generator, 0 to round to nearest.
        OPERAND: dtype of the product's operands.
        ARCH: see ``common.architecture``.

    Returns:
        (folded fp32 planes, codes or words to store, their scale).
    """
    STOCHASTIC: tl.constexpr = ROUNDS > 0 and KIND != "fp32"
    if KIND == "int8" or KIND == "fp8":
        decay = (decay * scale_in)[:, None]
    if len(B_planes) == 4:
        a, b, c, d = decode_words(codes_in, KIND, ARCH)
        a = tl.dot(x_weighted, B_planes[0].to(OPERAND), a * decay, input_precision="tf32x3")
        b = tl.dot(x_weighted, B_planes[1].to(OPERAND), b * decay, input_precision="tf32x3")
        c = tl.dot(x_weighted, B_planes[2].to(OPERAND), c * decay, input_precision="tf32x3")
        d = tl.dot(x_weighted, B_planes[3].to(OPERAND), d * decay, input_precision="tf32x3")
        noise = (a, b, c, d)
        if STOCHASTIC:
            noise = planes(noise_tile(seed, slot, head, p, N, ROUNDS), 4)
        codes, scale = encode_words((a, b, c, d), noise, KIND, STOCHASTIC, ARCH)
        return (a, b, c, d), codes, scale
    else:
        state = decode(codes_in, KIND, ARCH) * decay
        state = tl.dot(x_weighted, B_planes[0].to(OPERAND), state, input_precision="tf32x3")
        noise = state
        if STOCHASTIC:
            noise = noise_tile(seed, slot, head, p, N, ROUNDS)
        codes, scale = encode(state, noise, KIND, STOCHASTIC, ARCH)
        return (state,), codes, scale
