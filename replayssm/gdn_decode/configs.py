"""Tiles of the GDN kernels: pure functions of shapes and dtypes, never of values. No result depends on them."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a simt kernel cuts the state of one head; a program is one warp.

    Attributes:
        columns: columns of a quarter of the tile, ``KP / 4``.
        rows: rows of a block. A warp reads ``128 / columns`` rows with one instruction, and holds a block in registers.
        blocks: blocks of a program, one after the other.
        hold: read the next block ahead into registers; otherwise into the L2 cache.
    """

    columns: int
    rows: int
    blocks: int
    hold: bool = True


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
    rows = max(lanes, min((4 if heads >= 128 else 2) * lanes, next_power_of_2(V)))
    blocks = -(-V // rows)
    together = blocks if heads >= 4096 else 2 if heads >= 1024 else 1
    return Tile(columns, rows, min(together, blocks))


class TensorCoreTile(NamedTuple):
    """How the tensor_core verify cuts the state of one head.

    Attributes:
        tokens: rows of a tile of keys, and of one of queries.
        columns: columns of the state's tile, a power of two.
        block: columns that are in registers at a time.
        rows: rows of a program.
        warps: warps of a program, 16 rows each.
        alone: whether a program does by itself what else a kernel ahead does for all programs of a head.
        early: whether a program reads what that kernel did before it reads the state.
        registers: most registers of a thread; None leaves it to the compiler.
    """

    tokens: int
    columns: int
    block: int
    rows: int
    warps: int
    alone: bool
    early: bool
    registers: int | None


def tensor_core_tile(
    V: int, K: int, state_bytes: int, input_bytes: int, seq_len: int, heads: int, exact: bool
) -> TensorCoreTile:
    """Tile of ``gated_delta_rule_mtp`` with ``tensor_core``. The rows follow from V alone, as they may change bits.

    Args:
        V: rows of a head's state.
        K: columns.
        state_bytes: bytes of one element of the state.
        input_bytes: bytes of one element of q.
        seq_len: T.
        heads: heads of all requests.
        exact: whether keys and queries are bf16, which the matrix unit takes as they are.
    """
    columns = max(64 // state_bytes, 64 // input_bytes, next_power_of_2(K))
    rows = max(16, min(64, next_power_of_2(V)))
    tokens = 8 if seq_len <= 8 else 16
    if exact and rows == 64 and columns <= 128 and heads <= 64:
        return TensorCoreTile(tokens, columns, columns, rows, 4, True, False, None)
    return TensorCoreTile(tokens, columns, min(columns, 64), rows, rows // 16, False, False, None)


def lazy_tile(V: int, K: int, heads: int) -> Tile:
    """Tile of the lazy step in which queries are carried back; see ``simt_tile``."""
    return simt_tile(V, K, heads)
