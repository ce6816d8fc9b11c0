"""Constants of the noise, and the tile of the kernel: a pure function of the number of token ids."""

from __future__ import annotations

# Fourth counter word: keeps this stream apart from other uses of the same generator under the same seed.
STREAM = 0x47554D42


def blocks_per_program(vocab_size: int) -> int:
    """Blocks of four token ids that a program fills, a power of two."""
    return min(256, 1 << max((vocab_size + 3) // 4 - 1, 0).bit_length())
