"""Tiles of the GDN kernels, and what "auto" is: pure functions of shapes and dtypes, never of values.

No result depends on a tile.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


def verify_backend(backend: str, device: torch.device, dtype: torch.dtype, seq_len: int) -> str:
    """The backend of a frozen verify on a GPU; "auto" is the one that was faster on an H200, at most batches.

    Args:
        backend: as the caller names it.
        device: of the tensors.
        dtype: of q.
        seq_len: T.
    """
    if backend != "auto":
        return backend
    few = 2 if dtype == torch.bfloat16 else 3
    return "tensor_core" if _measured(device) and seq_len > few else "simt"


def windows_backend(backend: str, state: torch.Tensor, keys: torch.Tensor) -> str:
    """The backend of commit and materialize on windows, likewise. How many tokens are accepted is not known to it.

    Args:
        backend: as the caller names it.
        state: checkpoint_state.
        keys: rawk_cache.
    """
    if backend != "auto":
        return backend
    fits = state.dtype == torch.float32 and keys.dtype == torch.bfloat16 and keys.shape[4] <= 128
    return "tensor_core" if _measured(state.device) and fits and keys.shape[3] > 3 else "simt"


@cache
def _measured(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


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


def _tile(V: int, K: int, held: int, blocks: int, hold: bool = True) -> Tile:
    """The tile in which a thread holds ``held`` rows of a block; no more blocks than cover V, a power of two."""
    columns = max(4, next_power_of_2(K) // 4)
    lanes = 128 // columns
    rows = max(lanes, min(held * lanes, next_power_of_2(V)))
    blocks = min(blocks, next_power_of_2(-(-V // rows)))
    return Tile(columns, rows, blocks, hold or blocks == 1)


def verify_tile(V: int, K: int, heads: int, seq_len: int) -> Tile:
    """Tile of the step that runs token by token.

    Args:
        V: rows of a head's state.
        K: columns.
        heads: heads of all requests.
        seq_len: T.
    """
    if heads < 128:
        return _tile(V, K, 2, 1)
    if seq_len == 1:
        return _tile(V, K, 4, 1)
    return _tile(V, K, 8, 1) if heads < 4096 else _tile(V, K, 8, 4, False)


def records_tile(V: int, K: int, heads: int) -> Tile:
    """Tile of commit and materialize; ``heads`` of all requests and layers, else as ``verify_tile``."""
    if heads < 128:
        return _tile(V, K, 2, 1)
    return _tile(V, K, 8, 1) if heads < 4096 else _tile(V, K, 4, 8)


def lazy_tile(V: int, K: int, heads: int) -> Tile:
    """Tile of the lazy ring's step behind the carrying back of queries; arguments as of ``verify_tile``."""
    return _tile(V, K, 2 if heads < 128 else 8, 1)


class TensorCoreTile(NamedTuple):
    """How the tensor_core verify cuts the state of one head.

    Attributes:
        tokens: rows of a tile of keys, and of one of queries.
        columns: columns of the state's tile, a power of two.
        block: columns that are in registers at a time.
        rows: rows of a program.
        warps: warps of a program, 16 rows each.
        ahead: whether a program reads the next block before it works on one.
    """

    tokens: int
    columns: int
    block: int
    rows: int
    warps: int
    ahead: bool


def tensor_core_tile(V: int, K: int, state_bytes: int, input_bytes: int, seq_len: int, heads: int) -> TensorCoreTile:
    """Tile of ``gated_delta_rule_mtp`` with ``tensor_core``. What may change bits does not depend on the heads.

    Args:
        V: rows of a head's state.
        K: columns.
        state_bytes: bytes of one element of the state.
        input_bytes: bytes of one element of q.
        seq_len: T.
        heads: heads of all requests.
    """
    columns = max(64 // state_bytes, 64 // input_bytes, next_power_of_2(K))
    rows = max(16, min(64, next_power_of_2(V)))
    return TensorCoreTile(8 if seq_len <= 8 else 16, columns, min(columns, 64), rows, rows // 16, heads <= 128)


class FoldTile(NamedTuple):
    """How the tensor_core commit cuts the state of one head; attributes as of ``TensorCoreTile``.

    Attributes:
        tokens: rows of a tile of corrections.
        columns: columns of the state's tile, a power of two; all are in registers at once.
        block: columns of an operand.
        rows: rows of a program.
        warps: warps of a program, 16 rows each.
        ahead: the state of the program so many places later is fetched into L2, with 128 registers a thread; 0: none.
    """

    tokens: int
    columns: int
    block: int
    rows: int
    warps: int
    ahead: int


def fold_tile(V: int, K: int, state_bytes: int, seq_len: int) -> FoldTile:
    """Tile of commit and materialize with ``tensor_core``.

    Args:
        V: rows of a head's state.
        K: columns.
        state_bytes: bytes of one element of the state.
        seq_len: T.
    """
    columns, rows = max(32, next_power_of_2(K)), max(16, min(64, next_power_of_2(V)))
    ahead = 132 if columns == 128 and rows == 64 and state_bytes == 4 and seq_len <= 8 else 0
    return FoldTile(8 if seq_len <= 8 else 16, columns, min(columns, 64), rows, rows // 16, ahead)
