"""Tile of the convolution kernel: a pure function of shapes, never of values."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How the kernel cuts a request's tokens.

    Attributes:
        tokens: tokens that one program handles.
        channels: channels that one program handles.
        warps: warps of a program.
    """

    tokens: int
    channels: int
    warps: int


def tile(seq_len: int) -> Tile:
    """Tile for requests of at most ``seq_len`` tokens."""
    tokens = min(8, 1 << (seq_len - 1).bit_length())
    return Tile(tokens, 256, 4)
