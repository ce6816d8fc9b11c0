"""The noise word by word, with Python's logarithms: the truth that the other implementations are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replayssm.gumbel.configs import STREAM
from replayssm.rounding import WORD, philox4x32


def gumbel_noise(out: Tensor, seeds: Tensor, requests: Tensor, positions: Tensor) -> None:
    """See :func:`replayssm.gumbel.gumbel_noise`."""
    rows, tokens, vocab_size = out.shape
    for row in range(rows):
        for token in range(tokens):
            seed, request, position = (int(each[row, token]) for each in (seeds, requests, positions))
            for token_id in range(vocab_size):
                block, place, text, stream = torch.tensor([token_id // 4, position & WORD, request & WORD, STREAM])
                words = philox4x32((block, place, text, stream), (seed & WORD, (seed >> 32) & WORD))
                uniform = (int(words[token_id % 4]) + 0.5) * 2.0**-32
                out[row, token, token_id] = -math.log(-math.log(uniform))
