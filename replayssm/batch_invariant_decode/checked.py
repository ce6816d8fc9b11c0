"""The checked mode (``REPLAYSSM_CHECK=1``): read everything a step will read, and refuse what cannot be right."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.batch_invariant_decode.requests import Lane, plan
from replayssm.checks import check_finite
from replayssm.recurrence import process_dt
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

    Also for kept sums that cannot be of these parameters. The arguments are those of ``cpu.step``; memory that the call
    does not read is not looked at.
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
    if sums is not None and num_summed is not None:
        limits = dt_softplus, dt_min, dt_max
        for each, summed in zip(lanes, num_summed[[each.slot for each in lanes]].tolist(), strict=True):
            if not 0 <= summed <= x_rows.shape[1]:
                raise ValueError(
                    f"num_summed: expected 0 <= num_summed <= {x_rows.shape[1]}, got {summed} at slot {each.slot} of "
                    f"[{each.lane}]"
                )
            if summed >= each.live:
                _check_sums(sums[each.slot], dt_rows[each.slot], A, dt_bias, limits, chunk_size, each)


def _check_sums(
    sums: Tensor,
    dt_rows: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    limits: tuple[bool, float, float],
    chunk_size: int,
    lane: Lane,
) -> None:
    """Raise ValueError where a slot's kept numbers are far from what its live rows give with these parameters."""
    if lane.live == 0:
        return
    at = (lane.start + torch.arange(lane.live, device=sums.device)) % dt_rows.shape[0]
    found, rates = sums[:, at].double().permute(2, 1, 0), A.double()
    dt = process_dt(dt_rows[at], dt_bias, *limits)
    total = torch.cat([rates * part.cumsum(0) for part in dt.split(chunk_size)])
    # Single precision loses the softplus of numbers far below zero, in a sum once for each of its rows.
    near = (found[0] - dt).abs() <= 1e-6 + 1e-3 * dt.abs()
    near &= (found[1] - total).abs() <= 1e-6 * chunk_size * rates.abs() + 1e-3 * total.abs()
    if not bool(near.all()):
        raise ValueError(
            f"buffers.sums: expected those of this A, dt_bias, dt_softplus and dt_limit (REPLAYSSM_CHECK=1), got "
            f"others in slot {lane.slot}; set num_summed to 0 where these change or rows are written by hand"
        )
