"""Where a sequence's rows lie: its unfinished chunk in a slot of the buffers, the others in the packed tokens."""

import triton
import triton.language as tl


@triton.jit
def sequence_of(index, cu_seqlens, sequences, chunk_size, spare, STEPS: tl.constexpr):
    """The sequence to which chunk number ``index`` belongs.

    Chunk c of sequence i has number ``cu_seqlens[i] // chunk_size + spare * i + c``: sequences own ranges of numbers
    that can be told apart without counting their chunks, and some numbers belong to no chunk.
    """
    low = 0
    high = sequences - 1
    for _ in range(STEPS):
        middle = (low + high + 1) // 2
        inside = tl.load(cu_seqlens + middle) // chunk_size + spare * middle <= index
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    return low


@triton.jit
def sequence_bounds(sequence, cu_seqlens, num_tokens, chunk_size, spare):
    """``(first token int64, tokens, number of the first chunk)`` of a sequence."""
    if cu_seqlens is None:
        first = (sequence * 0).to(tl.int64)
        return first, num_tokens, sequence * 0
    else:
        begin = tl.load(cu_seqlens + sequence)
        length = tl.load(cu_seqlens + sequence + 1) - begin
        return begin.to(tl.int64), length, begin // chunk_size + spare * sequence


@triton.jit
def buffered_rows(sequence, slots, num_buffered, ring_start):
    """``(slot int64, rows in the buffers, the oldest of them)``; a negative slot is padding."""
    slot = (sequence * 0).to(tl.int64)
    buffered = sequence * 0
    start = sequence * 0
    if slots is not None:
        slot = tl.load(slots + sequence).to(tl.int64)
    if num_buffered is not None:  # noqa: SIM102 - one is known when compiling, the other is not
        if slot >= 0:
            buffered = tl.load(num_buffered + slot)
            if ring_start is not None:
                start = tl.load(ring_start + slot)
    return slot, buffered, start


@triton.jit
def chunk_bounds(
    chunk, cu_seqlens, slots, num_buffered, ring_start, num_tokens, sequences, chunk_size, spare, STEPS: tl.constexpr
):  # fmt: skip
    """The sequence to which chunk number ``chunk`` belongs, its ``sequence_bounds`` and its ``buffered_rows``."""
    sequence = chunk * 0
    if cu_seqlens is not None:
        sequence = sequence_of(chunk, cu_seqlens, sequences, chunk_size, spare, STEPS)
    first, length, first_chunk = sequence_bounds(sequence, cu_seqlens, num_tokens, chunk_size, spare)
    slot, buffered, start = buffered_rows(sequence, slots, num_buffered, ring_start)
    return sequence, first, length, first_chunk, slot, buffered, start


@triton.jit
def row_pointers(new, s_new, old, s_old, origin, row, first, buffered, start, ring_len):
    """Pointers to the rows at ``origin + row`` of a sequence; ``old`` is its slot, None without buffers.

    Only ``row``, int32, is a tensor: its products with a stride are one instruction each.
    """
    at = new + (first + origin - buffered) * s_new + row.to(tl.int64) * s_new
    if old is not None:
        position = origin + row
        at = tl.where(position < buffered, old + ((start + position) % ring_len).to(tl.int64) * s_old, at)
    return at


@triton.jit
def row_numbers(numbers, row, inside, ROWS: tl.constexpr):
    """``(sum, factor of the row in the state, dt, factor of the state in the row)``, see ``chunk_sums``."""
    at = numbers + row[:, None] * 4 + tl.arange(0, 4)[None, :]
    if inside is None:
        four = tl.load(at)
    else:
        four = tl.load(at, mask=inside[:, None], other=0.0)
    first_pair, second_pair = tl.split(tl.reshape(four, (ROWS, 2, 2)))
    total, scale = tl.split(first_pair)
    dt, decay = tl.split(second_pair)
    return total, scale, dt, decay
