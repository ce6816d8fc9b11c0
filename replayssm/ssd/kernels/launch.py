"""``chunk_scan`` in three launches, sums of dt, states between chunks, outputs, or four, with products of C and B."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from replayssm.ssd.configs import ScanTile, padded, scan_tile, state_tile
from replayssm.ssd.kernels.constants import MOST_HEADS, SUM_HEADS, SUM_WARPS
from replayssm.ssd.kernels.groups import group_outputs
from replayssm.ssd.kernels.products import group_products
from replayssm.ssd.kernels.scan import chunk_outputs
from replayssm.ssd.kernels.states import chunk_boundaries
from replayssm.ssd.kernels.sums import chunk_sums

OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def packed(tensor: Tensor, axis: int = 1) -> Tensor:
    """The tensor itself if it is packed from ``axis`` on, else a copy that is."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[axis:]), reversed(tensor.stride()[axis:]), strict=True):
        if size > 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor


def stride(tensor: Tensor | None, axis: int = 0) -> int:
    """A stride, zero where there is no tensor."""
    return 0 if tensor is None else tensor.stride(axis)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take there; under the interpreter as on the GPU that tiles were measured on."""
    if device.type != "cuda":
        return 227 << 10
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


Where = tuple["Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None"]


def launch_sums(
    dt: Tensor, A: Tensor, dt_bias: Tensor | None, chunk_size: int, dt_softplus: bool, dt_min: float, dt_max: float,
    where: Where, dt_buffer: Tensor | None, spare: int,
) -> Tensor:  # fmt: skip
    """What ``chunk_sums`` writes of each row, fp32 ``[chunks, H, chunk_size, 4]``: the first is the sum, the second dt.

    Args:
        dt: ``[tokens, H]``, packed rows.
        A: ``[H]``, packed.
        dt_bias: ``[H]``, packed, or None.
        chunk_size: Q.
        dt_softplus: see ``replayssm.ssd.chunk_scan``, as the two limits.
        dt_min: lower limit.
        dt_max: upper limit.
        where: cu_seqlens, batch_indices, num_buffered, ring_start.
        dt_buffer: ``[slots, rows, H]`` with packed rows, or None.
        spare: chunk numbers that a sequence owns beyond its own tokens' whole chunks.
    """
    (tokens, H), sequences = dt.shape, 1 if where[0] is None else where[0].shape[0] - 1
    chunks = tokens // chunk_size + spare * sequences
    numbers = torch.empty(chunks, H, chunk_size, 4, dtype=torch.float32, device=dt.device)
    chunk_sums[(chunks, triton.cdiv(H, SUM_HEADS))](
        dt, A, dt_bias, *where, dt_buffer, numbers,
        dt.stride(0), stride(dt_buffer), stride(dt_buffer, 1), tokens, sequences, H, chunk_size, spare,
        1 if dt_buffer is None else dt_buffer.shape[1], dt_min, dt_max,
        HEADS=SUM_HEADS, ROWS=padded(chunk_size), WHOLE=H % SUM_HEADS == 0, STEPS=sequences.bit_length(),
        SOFTPLUS=dt_softplus, num_warps=SUM_WARPS,
    )  # fmt: skip
    return numbers


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    initial_states: Tensor | None,
    x_buffer: Tensor | None,
    dt_buffer: Tensor | None,
    B_buffer: Tensor | None,
    num_buffered: Tensor | None,
    ring_start: Tensor | None,
    batch_indices: Tensor | None,
    out: Tensor,
    final_states: Tensor | None,
    boundary_states: Tensor | None,
    chunk_states: Tensor | None,
) -> None:
    """See ``replayssm.ssd.chunk_scan``."""
    (tokens, H, P), (G, N) = x.shape, B.shape[1:]
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if sequences == 0 or H * P * N == 0:
        return
    x, dt, B, C = packed(x), packed(dt), packed(B), packed(C)
    z = None if z is None else packed(z)
    A, dt_bias = packed(A, 0), None if dt_bias is None else packed(dt_bias, 0)
    ring_len = 1 if x_buffer is None else x_buffer.shape[1]
    if x_buffer is not None and dt_buffer is not None and B_buffer is not None:
        x_buffer, dt_buffer, B_buffer = packed(x_buffer, 2), packed(dt_buffer, 2), packed(B_buffer, 2)
    # Chunk numbers that a sequence owns beyond its own tokens' whole chunks.
    spare = 1 if x_buffer is None else ring_len // chunk_size + 2
    chunks = tokens // chunk_size + spare * sequences
    where: Where = (cu_seqlens, None if batch_indices is None else packed(batch_indices, 0), num_buffered, ring_start)
    numbers = launch_sums(dt, A, dt_bias, chunk_size, dt_softplus, dt_min, dt_max, where, dt_buffer, spare)
    entering = torch.empty(chunks, H, N, P, dtype=x.dtype, device=x.device)
    shared_memory = shared_bytes(x.device)
    tile = state_tile(chunk_size, P, N, x.element_size(), sequences * H, shared_memory)
    flags = torch.empty(sequences, H, triton.cdiv(P, tile.rows), dtype=torch.int32, device=x.device)
    chunk_boundaries[(sequences * H, triton.cdiv(P, tile.rows) * triton.cdiv(N, tile.columns))](
        x, B, x_buffer, B_buffer, numbers, *where,
        None if initial_states is None else initial_states.contiguous(), entering, flags, final_states, boundary_states,
        chunk_states, x.stride(0), B.stride(0), stride(x_buffer), stride(x_buffer, 1), stride(B_buffer),
        stride(B_buffer, 1), stride(final_states), stride(boundary_states), stride(chunk_states),
        tokens, H, H // G, chunk_size, spare, ring_len,
        P=P, N=N, BP=tile.rows, BN=tile.columns, BT=tile.tokens, TILES=triton.cdiv(chunk_size, tile.tokens),
        STAGES=tile.stages, OPERAND=OPERANDS[x.dtype], num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tokens == 0:
        return
    rows = scan_tile(chunk_size, P, N, x.element_size(), H // G, chunks * G, shared_memory)
    blocks = triton.cdiv(chunk_size, rows.rows)
    D_strides = stride(D), 0 if D is None or D.dim() == 1 else D.stride(1)
    shared = {
        "P": P, "N": N, "BT": rows.rows, "BP": tile.rows, "STEPS": sequences.bit_length(),
        "OPERAND": OPERANDS[x.dtype], "num_warps": rows.warps, "num_stages": rows.stages, "maxnreg": rows.registers,
    }  # fmt: skip
    if rows.heads == 0:
        products = _launch_products(B, C, B_buffer, where, chunk_size, spare, chunks, rows)
        chunk_outputs[(chunks, H, blocks * flags.shape[2])](
            x, C, D, z, x_buffer, products, numbers, entering, flags, *where, out,
            x.stride(0), C.stride(0), stride(z), out.stride(0), stride(x_buffer), stride(x_buffer, 1), *D_strides,
            tokens, sequences, H, H // G, chunk_size, spare, ring_len,
            ROWS=products.shape[3], BJ=rows.tokens, BN=rows.states, **shared,
        )  # fmt: skip
    else:
        group_outputs[(chunks, G * triton.cdiv(H // G, rows.heads), blocks * flags.shape[2])](
            x, B, C, D, z, x_buffer, B_buffer, numbers, entering, flags, *where, out,
            x.stride(0), B.stride(0), C.stride(0), stride(z), out.stride(0), stride(x_buffer), stride(x_buffer, 1),
            stride(B_buffer), stride(B_buffer, 1), *D_strides, tokens, sequences, H, H // G, chunk_size, spare,
            ring_len, rows.heads, NP=rows.states, BLOCKS=blocks, HEADS=MOST_HEADS, STAGES=rows.stages, **shared,
        )  # fmt: skip


def _launch_products(
    B: Tensor,
    C: Tensor,
    B_buffer: Tensor | None,
    where: Where,
    chunk_size: int,
    spare: int,
    chunks: int,
    tile: ScanTile,
) -> Tensor:
    """What ``group_products`` writes."""
    (tokens, G, N), sequences = B.shape, 1 if where[0] is None else where[0].shape[0] - 1
    rows = padded(chunk_size)
    block = min(64, rows)
    products = torch.empty(chunks, G, rows, rows, dtype=torch.float32, device=B.device)
    group_products[(chunks, G, (rows // block) ** 2)](
        B, C, B_buffer, *where, products, B.stride(0), C.stride(0), stride(B_buffer), stride(B_buffer, 1), tokens,
        sequences, G, chunk_size, spare, 1 if B_buffer is None else B_buffer.shape[1],
        N=N, ROWS=rows, BT=block, BN=tile.states, STEPS=sequences.bit_length(), num_warps=4, num_stages=tile.stages,
    )  # fmt: skip
    return products
