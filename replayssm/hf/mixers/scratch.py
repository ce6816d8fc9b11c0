"""Sizes of what a prompt needs for a moment."""

from __future__ import annotations


def scratch_rows(rows: int) -> int:
    """Rows for the convolution of a prompt: at least ``rows``, in steps of 16.

    Triton compiles for numbers that are multiples of 16 and for others; so every prompt meets the same kernel.

    Example:
        >>> scratch_rows(3), scratch_rows(16), scratch_rows(17)
        (16, 16, 32)
    """
    return -(-rows // 16) * 16
