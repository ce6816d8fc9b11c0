"""Megatron-Core's batch-invariant decode and mamba_ssm's chunk scan beside ours, or what they took in another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from replayssm.bench import Row, flashinfer
from replayssm.bench.peers import ELSEWHERE, THIS_RUN, installed, on_an_h200, timed
from replayssm.bench.timing import Timer

# Microseconds on one H200 (torch 2.11, Triton 3.6; state dim 128, head dim 64): Megatron-Core of August 2026, its tiles
# pinned, rows all over the chunk, by chunk size, heads and batch; mamba_ssm of July 2026, by heads, chunk and length.
_MEGATRON = {
    (128, 16): {1: 58.3, 16: 68.5, 64: 91.4, 256: 180.2}, (128, 128): {1: 65.2, 16: 105.9, 64: 237.8, 128: 412.6},
}  # fmt: skip
_MAMBA_SSM = {
    (64, 128): {2048: 110.0, 8192: 365.0, 32768: 1446.0}, (64, 256): {2048: 104.0, 8192: 357.0, 32768: 1436.0},
    (128, 128): {2048: 190.0, 8192: 675.0, 32768: 2769.0}, (128, 256): {2048: 179.0, 8192: 656.0, 32768: 2717.0},
}  # fmt: skip
_MEGATRON_PATHS = (  # it has moved twice
    "megatron.core.ops.ssm.mamba2.batch_invariant_decode",
    "megatron.core.ssm.ops.mamba2.batch_invariant_decode",
    "megatron.core.ssm.ops.batch_invariant_decode",
)
# The tiles that its batch-invariant mode pins, by module beside it and kernel. Left alone, its kernels measure which is
# fastest in the first batch, and keep that one for all others; the kernel that folds would do so many times meanwhile.
_MEGATRON_TILES = {
    ("ssd_chunk_state", "_chunk_cumsum_fwd_kernel"): {"BLOCK_SIZE_H": 8},
    ("ssd_chunk_state", "_chunk_state_fwd_kernel"): {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32},
    ("ssd_bmm", "_bmm_chunk_fwd_kernel"): {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32},
    ("ssd_chunk_scan", "_chunk_scan_fwd_kernel"): {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32},
    ("ssd_state_passing", "_state_passing_fwd_kernel"): {"BLOCK_SIZE": 1024},
}


def beside_decode(
    timer: Timer, peers: bool, sizes: tuple[int, int, int, int, int], steps: Sequence[Mapping[str, Any]], live: Tensor,
    repeats: int,
) -> Row:  # fmt: skip
    """Columns of one step: Megatron-Core's, which has one token, and FlashInfer's ordinary update, always published.

    Args:
        timer: on the GPU.
        peers: measure Megatron-Core, if it is here.
        sizes: chunk, heads, groups, batch, tokens.
        steps: arguments of our calls, whose tensors theirs take in turn; its buffers are its own.
        live: rows that every slot holds at first.
        repeats: steps that are timed together.
    """
    chunk, heads, groups, batch, tokens = sizes
    found = installed("megatron-core", "megatron") if peers and tokens == 1 else None
    makers = [partial(_megatron, chunk, step, live) for step in steps]
    theirs = timed(timer, "Megatron-Core", makers, repeats) if found else None
    names = [f"Megatron-Core {found}, {THIS_RUN}"] if theirs else []
    plain = None
    if on_an_h200():
        plain = flashinfer.published_step("fp32", tokens, "plain", batch, heads, groups)
        known = _MEGATRON.get((chunk, heads), {}).get(batch) if tokens == 1 and theirs is None else None
        theirs = theirs or known
        other = [name for name, micros in (("Megatron-Core", known), ("FlashInfer 0.7.4", plain)) if micros]
        names += [", ".join([*other, ELSEWHERE])] if other else []
    return {"megatron_us": theirs, "plain_us": plain, "peers": "; ".join(names) or None}


def beside_scan(timer: Timer, peers: bool, sizes: tuple[int, int, int, int], inputs: Mapping[str, Any]) -> Row:
    """Columns of one scan: mamba_ssm's.

    Args:
        timer: on the GPU.
        peers: measure it, if it is here.
        sizes: chunk, heads, groups, length.
        inputs: x, z, dt, A, B, C, D and dt_bias of one sequence.
    """
    chunk, heads, groups, length = sizes
    found = installed("mamba-ssm", "mamba_ssm") if peers else None
    theirs = timed(timer, "mamba_ssm", [partial(_mamba_ssm, chunk, inputs)] * 2) if found else None
    if theirs is not None:
        return {"mamba_ssm_us": theirs, "peers": f"mamba_ssm {found}, {THIS_RUN}"}
    known = _MAMBA_SSM.get((heads, chunk), {}).get(length) if on_an_h200() and groups == 8 else None
    return {"mamba_ssm_us": known, "peers": known and f"mamba_ssm, {ELSEWHERE}"}


def megatron() -> ModuleType:
    """Megatron-Core's module of exact decode, its tiles pinned; raise ImportError if there is none."""
    path = next((path for path in _MEGATRON_PATHS if _exists(path)), _MEGATRON_PATHS[0])
    module = import_module(path)
    for (beside, name), tile in _MEGATRON_TILES.items():
        kernel = getattr(import_module(f"{path.rpartition('.')[0]}.{beside}"), name)
        kernel.configs = [config for config in kernel.configs if tile.items() <= config.kwargs.items()]
    return module


def _megatron(chunk: int, step: Mapping[str, Any], live: Tensor) -> Callable[[], object]:
    module, x = megatron(), step["x"]
    lanes, _, heads, headdim = x.shape
    groups, dstate = step["B"].shape[2:]
    buffers = module.BatchInvariantDecodeBuffers.allocate(
        lanes, chunk, heads, headdim, groups, dstate, x.device, x.dtype
    )
    for rows in (buffers.x, buffers.z, buffers.dt, buffers.B, buffers.C):
        rows.normal_()
    buffers.num_buffered.copy_(live)
    return partial(module.batch_invariant_decode_buffered_scan, **{**step, "buffers": buffers})


def _mamba_ssm(chunk: int, inputs: Mapping[str, Any]) -> Callable[[], object]:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as run

    x, z, dt, B, C = (inputs[name][None] for name in ("x", "z", "dt", "B", "C"))
    parameters = {name: inputs[name] for name in ("D", "dt_bias")}
    return lambda: run(x, dt, inputs["A"], B, C, chunk, z=z, dt_softplus=True, **parameters)


def _exists(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:  # a package above it
        return False
