"""Padded batches in, padded batches out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.checks import check_dtype, check_shape
from replayssm.hf.options import check_holds


def strip_padding(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> list[list[int]]:
    """Token ids of every row without its padding.

    Args:
        input_ids: int64 or int32 ``[batch, length]``.
        attention_mask: the same shape, 1 where there is a token; the zeros of a row lie on its left, on its
            right, or on both sides. None: no padding.
        vocab_size: ids of tokens must lie below.

    Raises:
        ValueError: wrong shape or dtype, an empty row, a mask of other values than 0 and 1, a hole in a row, or an id
            outside the vocabulary.
    """
    sizes: dict[str, int] = {}
    check_shape("input_ids", input_ids, "batch length", sizes)
    check_dtype("input_ids", input_ids, torch.int64, torch.int32)
    check_holds("input_ids", input_ids, "token ids")
    if not sizes["batch"]:
        raise ValueError("input_ids: expected at least one row, got none")
    rows = input_ids.tolist()
    masks: list[list[int]] = [[1] * sizes["length"]] * sizes["batch"]
    if attention_mask is not None:
        check_shape("attention_mask", attention_mask, "batch length", sizes)
        check_holds("attention_mask", attention_mask, "ones and zeros")
        if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
            raise ValueError("attention_mask: expected 1 at tokens and 0 at padding, got another value")
        masks = attention_mask.ne(0).int().tolist()
    prompts = []
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        if 1 not in mask:
            raise ValueError(f"input_ids: expected at least one token in every row, got an empty row {number}")
        begin, count = mask.index(1), sum(mask)
        if 0 in mask[begin : begin + count]:
            raise ValueError(f"attention_mask: expected padding at the ends of a row only, got a hole in row {number}")
        prompt = row[begin : begin + count]
        for wrong in (min(prompt), max(prompt)):
            if not 0 <= wrong < vocab_size:
                raise ValueError(f"input_ids: expected token ids in 0..{vocab_size - 1}, got {wrong} in row {number}")
        prompts.append(prompt)
    return prompts


def check_positions(position_ids: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raise ValueError unless positions, which transformers passes on for some models, count each row's tokens from 0.

    Args:
        position_ids: ``[batch or 1, length]`` or None.
        attention_mask: ``[batch, length]`` or None; positions of padding are of no interest.
    """
    if position_ids is None:
        return
    mask = torch.ones_like(position_ids) if attention_mask is None else attention_mask.long()
    counted = mask.cumsum(-1) - 1
    fits = position_ids.shape[-1:] == mask.shape[-1:] and position_ids.dim() == 2
    if not fits or not bool((position_ids == counted)[mask == 1].all()):
        raise ValueError("position_ids: expected none, or each row's tokens counted from 0, got other positions")


def join(input_ids: Tensor, new_tokens: Sequence[Sequence[int]], pad_token_id: int) -> Tensor:
    """The input as it came, followed by each row's new tokens, padded on the right to the longest row."""
    width = max(map(len, new_tokens))
    padded = [[*new, *[pad_token_id] * (width - len(new))] for new in new_tokens]
    return torch.cat([input_ids, torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
