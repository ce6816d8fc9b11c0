"""``replayssm.ssd`` on the CPU: one sequence after the other, chunk by chunk, in products of fixed shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.ssd.arithmetic import Chunk, Parameters, Rows, build, finish, fold, parameters, ring_rows, score
from replayssm.ssd.requests import plan


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
    shared = parameters(A, D, dt_bias, dt_softplus, dt_min, dt_max)
    new = Rows(x, dt, B)
    num_rows = 0 if x_buffer is None else x_buffer.shape[1]
    for sequence in plan(cu_seqlens, batch_indices, num_buffered, ring_start, num_rows, x.shape[0], chunk_size):
        if initial_states is None:
            state = x.new_zeros(*x.shape[1:], B.shape[2], dtype=torch.float32)
        else:
            state = initial_states[sequence.row].contiguous()
        rows = new.part(sequence.first, sequence.length)
        old = rows.part(0, 0)
        if x_buffer is not None and dt_buffer is not None and B_buffer is not None:
            old = Rows(x_buffer[sequence.slot], dt_buffer[sequence.slot], B_buffer[sequence.slot])
        part = slice(sequence.first, sequence.first + sequence.length)
        scan = _Scan(shared, chunk_size, state, sequence.first_boundary, chunk_states)
        scan.run(old, sequence.start, sequence.buffered, rows, C[part], None if z is None else z[part], out[part])
        if boundary_states is not None:
            boundary_states[sequence.row] = scan.state
        if final_states is not None:
            final_states[sequence.row] = scan.final_state()


class _Scan:
    """The walk over the chunks of one sequence; ``state`` is that of the last boundary."""

    def __init__(
        self, shared: Parameters, chunk_size: int, state: Tensor, boundary: int, chunk_states: Tensor | None
    ) -> None:
        self.shared = shared
        self.chunk_size = chunk_size
        self.state = state
        self.boundary = boundary
        self.chunk_states = chunk_states
        self.unfinished: Chunk | None = None

    def run(self, old: Rows, start: int, buffered: int, new: Rows, C: Tensor, z: Tensor | None, out: Tensor) -> None:
        """Write the outputs of the new rows, before which come ``buffered`` old rows from row ``start`` on."""
        total = buffered + new.x.shape[0]
        for origin in range(0, total, self.chunk_size):
            end = min(origin + self.chunk_size, total)
            split = min(max(buffered, origin), end)  # old rows before, new rows behind
            pieces = ring_rows(old, start + origin, split - origin) if split > origin else []
            part = slice(split - buffered, end - buffered)
            if split < end:
                pieces.append(new.part(split - buffered, end - split))
            chunk = build(pieces, self.chunk_size, self.shared)
            if split < end:
                y = score(chunk, self.state, C[part], split - origin)
                out[part] = finish(y, new.x[part], self.shared.D, None if z is None else z[part])
            self._close(chunk, split < end)

    def _close(self, chunk: Chunk, new: bool) -> None:
        if chunk.length < self.chunk_size:
            self.unfinished = chunk
            return
        self.state = fold(self.state, chunk)
        if not new:
            return
        if self.chunk_states is not None:
            self.chunk_states[self.boundary] = self.state
        self.boundary += 1

    def final_state(self) -> Tensor:
        """The state after the newest row, which never becomes a boundary."""
        return self.state if self.unfinished is None else fold(self.state, self.unfinished)
