"""Tiles of the GDN kernels: pure functions of shapes and dtypes, never of values. No result depends on them."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a simt kernel cuts the state of one head; a program is one warp.

    Attributes:
        columns: columns of a quarter of the tile, ``KP / 4``.
        rows: rows of a program. A warp reads ``128 / columns`` rows with one instruction, and holds ``rows`` of them.
    """

    columns: int
    rows: int


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number`` (at least 1)."""
    return 1 << (number - 1).bit_length()


def simt_tile(V: int, K: int, heads: int) -> Tile:
    """Tile of the kernels that run token by token.

    Args:
        V: rows of a head's state.
        K: columns.
        heads: heads of all requests and layers.
    """
    columns = max(4, next_power_of_2(K) // 4)
    lanes = 128 // columns
    held = 8 if heads >= 1024 else 4 if heads >= 128 else 2
    return Tile(columns, max(lanes, min(held * lanes, next_power_of_2(V))))


class TensorCoreTile(NamedTuple):
    """How the tensor_core verify cuts the state of one head.

    Attributes:
        tokens: rows of a tile of keys, and of one of queries.
        columns: columns of the state's tile, a power of two.
        block: columns that are in registers at a time. Sums over K depend on it.
        rows: rows of a program; no result depends on them.
        warps: warps of a program, 16 rows each or a multiple of that.
    """

    tokens: int
    columns: int
    block: int
    rows: int
    warps: int
    early: bool = False
    registers: int | None = None


def tensor_core_tile(V: int, K: int, state_bytes: int, seq_len: int) -> TensorCoreTile:
    """Tile of ``gated_delta_rule_mtp`` with ``tensor_core``.

    Args:
        V: rows of a head's state.
        K: columns.
        state_bytes: bytes of one element of the state.
        seq_len: T.
    """
    columns = max(64 // state_bytes, next_power_of_2(K))
    rows = max(16, min(64, next_power_of_2(V)))
    return TensorCoreTile(8 if seq_len <= 8 else 16, columns, min(columns, 128), rows, rows // 16, registers=128)


def lazy_tile(V: int, K: int, heads: int) -> Tile:
    """Tile of the lazy step in which queries are carried back; see ``simt_tile``."""
    return simt_tile(V, K, heads)
