"""Noise for sampling that belongs to a token's place in its text."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.checks import check_device, check_dtype, check_range, check_tensor
from replayssm.custom_op import define
from replayssm.dispatch import by_device

__all__ = ["gumbel_noise"]

_MOST_TOKENS = (1 << 31) - 1


_op = define(
    "gumbel_noise(Tensor(a!) out, Tensor seeds, Tensor requests, Tensor positions) -> ()",
    by_device("gumbel", "gumbel_noise"),
)


def gumbel_noise(seeds: Tensor, requests: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token id at the given places.

    ``-log(-log(u))`` with ``u = (r + 1/2) / 2^32`` and ``r`` a 32-bit word of Philox-4x32-10 (Salmon et al., 2011)
    under the key ``seed`` and the counter ``(token id // 4, position, request, constant)``. The words are the same on
    every device; logarithms may differ in the last bit.

    Args:
        seeds: int64, any shape; all 64 bits are used.
        requests: int64, broadcastable to ``seeds`` like ``positions``: identity of the text, in ``0..2^32-1``.
        positions: int64, index of the token in its text.
        vocab_size: number of token ids.

    Returns:
        float64 of the broadcast shape plus ``[vocab_size]``.

    Raises:
        TypeError: an argument is no tensor, or no int.
        ValueError: wrong dtype or device, shapes that do not broadcast, or a number out of range.
        NotImplementedError: no implementation for this device.

    Example:
        >>> import torch
        >>> gumbel_noise(torch.tensor(7), torch.tensor([0, 1]), torch.tensor([5, 5]), 11).shape
        torch.Size([2, 11])
    """
    check_range("vocab_size", vocab_size, 1, _MOST_TOKENS)
    for name, tensor in (("seeds", seeds), ("requests", requests), ("positions", positions)):
        check_tensor(name, tensor)
        check_dtype(name, tensor, torch.int64)
        check_device(name, tensor, seeds.device)
    try:
        shape = torch.broadcast_shapes(seeds.shape, requests.shape, positions.shape)
    except RuntimeError as error:
        shapes = ", ".join(str(list(each.shape)) for each in (seeds, requests, positions))
        raise ValueError(f"seeds, requests, positions: expected shapes that broadcast, got {shapes}") from error
    width = shape[-1] if shape else 1
    places = [each.expand(shape).reshape(-1, width) for each in (seeds, requests, positions)]
    out = torch.empty(*places[0].shape, vocab_size, dtype=torch.float64, device=seeds.device)
    _op(out, *places)
    return out.view(*shape, vocab_size)
