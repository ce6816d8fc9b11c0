"""The public step of exact decode."""

from __future__ import annotations

from math import inf

from torch import Tensor

from replayssm.batch_invariant_decode import ops
from replayssm.batch_invariant_decode.arguments import check_step
from replayssm.batch_invariant_decode.buffers import BatchInvariantDecodeBuffers


def batch_invariant_decode_buffered_scan(
    buffers: BatchInvariantDecodeBuffers,
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    batch_indices: Tensor,
    ssm_state: Tensor,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """Decode tokens, each with the bits that ``replayssm.ssd.chunk_scan`` over the whole sequence gives it.

    The chunk's rows so far are replayed from the state at its boundary (``docs/maths.md`` §5); the new rows are stored
    behind them. With ``buffers.max_tokens == 1`` the token is committed: ``num_buffered`` moves, and when the chunk is
    full it is folded into ``ssm_state`` and the cursor returns to 0. With more, T tokens are verified and none is
    committed; :meth:`BatchInvariantDecodeBuffers.commit` keeps those that were accepted, and drafts may cross a chunk
    boundary. A chunk that commits have filled is folded into ``ssm_state`` by the next call.

    Sizes: lanes R (at most slots S), tokens T (1..max_tokens), nheads H, headdim P, ngroups G, dstate N.

    Args:
        buffers: written: the new rows, cursors, ``out``, ``target_rows`` and ``chunk_flags``; a ``shadow`` where a
            chunk is folded.
        x: ``[R, T, H, P]``, the buffers' dtype: after convolution and activation.
        z: ``[R, T, H, P]``, x's dtype: gate, before SiLU; None for none.
        dt: ``[R, T, H]``, dtype of ``buffers.dt``: before bias and softplus.
        B: ``[R, T, G, N]``, x's dtype.
        C: ``[R, T, G, N]``, x's dtype.
        A: ``[H]``, bf16, fp16 or fp32: negative.
        D: ``[H]`` or ``[H, P]``, bf16, fp16 or fp32, or None.
        dt_bias: ``[H]``, bf16, fp16 or fp32, or None.
        batch_indices: int32 or int64 ``[R]``: slot of each lane, distinct. A lane with a negative one is inactive: it
            returns exact zeros, and nothing of it is read or stored.
        ssm_state: fp32 ``[S, H, P, N]``, packed from axis 1: the state at each slot's last boundary. Written where a
            chunk is folded.
        dt_softplus: apply ``log(1 + exp(v))`` (the identity above 20) after the bias.
        dt_limit: bounds of dt, applied last, ``0 <= lower <= upper``.

    Returns:
        ``[R, T, H, P]``, a view of ``buffers.out``: the next call overwrites it.

    Raises:
        AssertionError: the state is not fp32, or there are more tokens or lanes than the buffers take.
        TypeError: an argument is no tensor, an option of another type.
        ValueError: a shape, dtype, device or stride does not fit; on the CPU also a slot or cursor out of range or a
            slot used twice. Nothing has been written then.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> H, P, N, G = 4, 8, 16, 2
        >>> buffers = BatchInvariantDecodeBuffers.allocate(3, 16, H, P, G, N, torch.device("cpu"), torch.float32)
        >>> x, dt, B = torch.ones(2, 1, H, P), torch.full((2, 1, H), 0.5), torch.ones(2, 1, G, N)
        >>> state = torch.zeros(3, H, P, N)
        >>> for _ in range(3):  # slot 2, and an inactive lane
        ...     y = batch_invariant_decode_buffered_scan(
        ...         buffers, x, None, dt, B, B, torch.full((H,), -1.0), None, None, torch.tensor([2, -1]), state,
        ...         dt_softplus=False)
        >>> round(y[0, 0, 0, 0].item(), 4), y[1].abs().max().item(), buffers.num_buffered.tolist()
        (15.7953, 0.0, [0, 0, 3])
    """
    if not isinstance(buffers, BatchInvariantDecodeBuffers):
        raise TypeError(f"buffers: expected BatchInvariantDecodeBuffers, got {type(buffers).__name__}")
    dt_limit = tuple(dt_limit) if isinstance(dt_limit, list) else dt_limit
    rows = buffers.x, buffers.z, buffers.dt, buffers.B, buffers.C, buffers.num_buffered, buffers.ring_start
    check_step(
        *rows, buffers.shadow, buffers.arrivals, buffers.sums, buffers.num_summed, buffers.target_rows,
        buffers.chunk_flags, buffers.out, x, z, dt, B, C, A, dt_bias, batch_indices, ssm_state, D, buffers.max_tokens,
        dt_softplus, dt_limit,
    )  # fmt: skip
    lanes, chunk_size = x.shape[0], buffers.chunk_size
    most_live = chunk_size - 1 if buffers.ring_start is None else chunk_size - 1 + buffers.max_tokens
    out = buffers.out.view(-1)[: x.numel()].view(x.shape)
    ops.step(
        ssm_state, *rows, buffers.target_rows[:lanes], buffers.chunk_flags[:lanes], out, buffers.shadow,
        buffers.arrivals, buffers.sums, buffers.num_summed, x, z, dt, B, C, A, D, dt_bias, batch_indices, chunk_size,
        most_live, dt_softplus, float(dt_limit[0]), float(dt_limit[1]),
    )  # fmt: skip
    return out
