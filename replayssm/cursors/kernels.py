"""The cursor rule of ``replayssm.cursors`` in Triton: one launch where torch needs thirty."""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128


# One form for any batch and wherever its tensors begin: another would cost a call's first user 50 ms.
@triton.jit(
    do_not_specialize=["batch", "seq_len", "s_slots", "s_seq_lens", "s_accepted"],
    do_not_specialize_on_alignment=["slots", "seq_lens", "num_accepted"],
)
def _commit(
    ring_start, num_live, conv_start, last_accepted, slots, seq_lens, num_accepted, seq_len,
    s_slots, s_seq_lens, s_accepted, batch, window, ring_len, conv_len,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_batch = row < batch
    slot = tl.load(slots + row * s_slots, mask=in_batch, other=-1).to(tl.int64)
    accepted = tl.load(num_accepted + row * s_accepted, mask=in_batch, other=0).to(tl.int32)
    if seq_lens is not None:
        length = tl.load(seq_lens + row * s_seq_lens, mask=in_batch, other=0).to(tl.int32)
    else:
        length = tl.zeros((ROWS,), tl.int32) + seq_len
    changed = in_batch & (slot >= 0) & (length > 0)
    live = tl.load(num_live + slot, mask=changed, other=0)
    start = tl.load(ring_start + slot, mask=changed, other=0)
    conv = tl.load(conv_start + slot, mask=changed, other=0)
    folded = tl.where(live + length > window, live, 0)
    tl.store(ring_start + slot, (start + folded) % ring_len, mask=changed)
    tl.store(num_live + slot, live + accepted - folded, mask=changed)
    tl.store(conv_start + slot, (conv + accepted) % conv_len, mask=changed)
    tl.store(last_accepted + slot, accepted, mask=changed)


def commit(
    cursors: tuple[Tensor, ...],
    slots: Tensor,
    seq_lens: Tensor | int,
    num_accepted: Tensor,
    window: int,
    ring_len: int,
    conv_len: int,
) -> None:
    """See :func:`replayssm.cursors.commit`; ``cursors`` in the order of their fields, arguments checked."""
    batch = slots.shape[0]
    if not batch:
        return
    lengths, length = (seq_lens, 0) if isinstance(seq_lens, Tensor) else (None, seq_lens)
    _commit[(triton.cdiv(batch, _ROWS),)](
        *cursors, slots, lengths, num_accepted, length,
        slots.stride(0), 0 if lengths is None else lengths.stride(0), num_accepted.stride(0),
        batch, window, ring_len, conv_len, ROWS=_ROWS, num_warps=1,
    )  # fmt: skip
