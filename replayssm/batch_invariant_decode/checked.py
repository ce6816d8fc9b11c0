"""The checked mode (``REPLAYSSM_CHECK=1``): read everything a step will read, and refuse what cannot be right."""

from __future__ import annotations

from torch import Tensor

from replayssm.batch_invariant_decode.requests import plan
from replayssm.checks import check_finite
from replayssm.ssd.checked import check_parameters, check_rows


def check_values(
    ssm_state: Tensor,
    x_rows: Tensor,
    z_rows: Tensor | None,
    dt_rows: Tensor,
    B_rows: Tensor,
    C_rows: Tensor | None,
    num_buffered: Tensor,
    ring_start: Tensor | None,
    target_rows: Tensor,
    chunk_flags: Tensor,
    out: Tensor,
    shadow: Tensor | None,
    arrivals: Tensor | None,
    sums: Tensor | None,
    num_summed: Tensor | None,
    x: Tensor,
    z: Tensor | None,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    batch_indices: Tensor,
    chunk_size: int,
    most_live: int,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> None:
    """Raise ValueError for a slot or cursor out of range, a slot used twice, or a number that is not finite.

    The arguments are those of ``cpu.step``; memory that the call does not read is not looked at.
    """
    lanes = plan(batch_indices, num_buffered, ring_start, x_rows.shape[1], most_live)
    check_parameters(A, D, dt_bias)
    rings: dict[str, Tensor | None] = {"buffers.x": x_rows, "buffers.dt": dt_rows, "buffers.B": B_rows}
    for lane, slot, start, live in lanes:
        check_finite("ssm_state", ssm_state[slot], f" of slot {slot}")
        check_rows(rings, slot, start, live)
        for name, tensor in {"x": x, "dt": dt, "B": B, "C": C, "z": z}.items():
            if tensor is not None:
                check_finite(name, tensor[lane], f" of lane {lane}")
