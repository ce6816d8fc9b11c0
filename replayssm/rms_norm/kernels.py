"""``rms_norm`` in Triton: a program normalises one row."""

import triton
import triton.language as tl
from torch import Tensor

from replayssm.rms_norm.configs import tile as norm_tile


@triton.jit
def _normalise(
    out, x, weight, gate, s_out, s_x, s_gate, channels, eps, offset, C: tl.constexpr, GATE_FIRST: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C)
    c_in = c < channels
    value = tl.load(x + row * s_x + c, mask=c_in, other=0.0)
    w = tl.load(weight + c, mask=c_in, other=0.0).to(tl.float32) + offset
    factor = 1.0
    if gate is not None:
        g = tl.load(gate + row * s_gate + c, mask=c_in, other=0.0)
        factor = g / (1.0 + tl.exp(-g))
        if GATE_FIRST:
            value = value * factor
    value = value * tl.rsqrt(tl.sum(value * value, 0) / channels + eps) * w
    if gate is not None and not GATE_FIRST:
        value = value * factor
    tl.store(out + row * s_out + c, value, mask=c_in)


def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float, gate_first: bool
) -> None:
    """See :func:`replayssm.rms_norm.rms_norm`."""
    rows, channels = x.shape
    if not rows:
        return
    tile = norm_tile(channels)
    _normalise[(rows,)](
        out, x, weight, gate, out.stride(0), x.stride(0), 0 if gate is None else gate.stride(0), channels, eps, offset,
        C=tile.channels, GATE_FIRST=gate_first, num_warps=tile.warps,
    )  # fmt: skip
