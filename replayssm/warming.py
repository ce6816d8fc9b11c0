"""Compiling kernels ahead of the first request, and before a CUDA graph is captured."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from replayssm import cursors
from replayssm.batch_invariant_decode import batch_invariant_decode_buffered_scan
from replayssm.cache import ExactMamba2Layer, GDNLayer, Mamba2Layer, ReplayPool
from replayssm.cache.materialize import Materializer
from replayssm.checks import FLOATS, INDICES, check_flag, check_range, check_sequence, renamed
from replayssm.conv import causal_conv1d_replay
from replayssm.gdn_decode import gated_delta_rule_checkpointing
from replayssm.mamba import checkpointing_ssu
from replayssm.mamba.arguments import MAX_WINDOW

_MOST_BATCH = 1 << 20


@dataclass
class Warmup:
    """What a warm-up did.

    Attributes:
        kernels: specialisations that were loaded; those that the process had already are not counted.
        compiled: the part of them that was compiled, not found in Triton's cache on disk.
        seconds: wall time.
        names: what was loaded, one entry per specialisation.
    """

    kernels: int = 0
    compiled: int = 0
    seconds: float = 0.0
    names: list[str] = field(default_factory=list)


def warmup(
    target: Any,
    *,
    tokens: Sequence[int] | None = None,
    batch: Sequence[int] = (1,),
    window: int = 16,
    longest_prompt: int = 1024,
    exact: bool = False,
    parameter_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    conv_bias: bool = True,
    with_z: bool = False,
) -> Warmup:
    """Compile and load the Triton kernels that steps of a pool, or generations with a model, are going to launch.

    Triton compiles a kernel when it is first launched with a new combination of types, options and sizes, which takes
    0.5 to 4 seconds, and cannot do so while a CUDA graph is captured. Call this once when a server starts, on the
    device and in the process that will run the steps; a second process finds the kernels on disk. On the CPU nothing
    is compiled: the arguments are checked, and that is all.

    With a pool every op of its layers is called with padding only: nothing is read from the pool or written into it.
    The convolution is called with SiLU and packed channels, the recurrence with x, B, C (q, k, v) cut out of its output
    and packed fp32 time steps, in the pool's types. Calls with other types or with strides that are divisible by 16
    where these are not (or the other way round) compile again.

    Args:
        target: a :class:`replayssm.cache.ReplayPool`, or a transformers model as ``replayssm.hf.generate`` takes it,
            attached or not.
        tokens: tokens per request and step. For a pool its step sizes, by default ``(1, max_tokens)``. For a model one
            more than the longest drafts of the generations to come, by default ``(1, 12)``: without drafts, and with
            look-up drafts.
        batch: requests of a step. The tile depends on it roughly: name the smallest and the largest, and some between.
        window: of the generations, with a model; a pool has its own.
        longest_prompt: tokens of the longest prompt of the generations. Those above 1024 tokens, and all of models with
            experts, take kernels of their own, which make the warm-up several times as long.
        exact: of the generations, with a model.
        parameter_dtype: type of A, D and dt_bias (of A_log and dt_bias), for a pool; float32, bfloat16 or float16.
        index_dtype: type of the slot numbers that will be passed with a pool, int32 or int64.
        conv_bias: whether the convolution of the pool's layers has a bias.
        with_z: whether the gate ``z`` will be passed to ``checkpointing_ssu``.

    Returns:
        Counts and seconds.

    Raises:
        TypeError: neither a pool nor a model, or a number of another type.
        ValueError: a number or type out of range; a model that ``generate`` would refuse.
        NotImplementedError: a device without our ops.

    Example:
        >>> import replayssm
        >>> from replayssm.cache import Mamba2Layer, ReplayPool
        >>> pool = ReplayPool([Mamba2Layer(nheads=4, headdim=8, dstate=16, ngroups=2, conv_width=4)], num_slots=3)
        >>> replayssm.warmup(pool, tokens=(1, 4), batch=(1, 64)).kernels  # on the CPU there are none
        0
    """
    is_pool = isinstance(target, ReplayPool)
    if not is_pool and not isinstance(target, nn.Module):
        raise TypeError(f"target: expected a ReplayPool or a transformers model, got {type(target).__name__}")
    if tokens is None:
        tokens = (1, target.max_tokens) if is_pool else (1, 12)
    check_sequence("tokens", tokens, "ints")
    check_sequence("batch", batch, "ints")
    check_range("window", window, 1, MAX_WINDOW)
    check_range("longest_prompt", longest_prompt, 1, sys.maxsize)
    check_flag("conv_bias", conv_bias)
    check_flag("with_z", with_z)
    check_flag("exact", exact)
    for count in batch:
        check_range("batch", count, 1, _MOST_BATCH)
    for name, dtype, allowed in (
        ("parameter_dtype", parameter_dtype, FLOATS),
        ("index_dtype", index_dtype, INDICES),
    ):
        if dtype not in allowed:
            raise ValueError(f"{name}: expected {' or '.join(map(str, allowed))}, got {dtype}")
    if not is_pool:
        with renamed("model", "target"):
            return _model_warmup(target, tokens, batch, window, longest_prompt, exact)
    for count in tokens:
        check_range("tokens", count, 1, target.max_tokens, "the pool's max_tokens")
    if target.device.type == "cpu":
        return Warmup()
    with _counted(target.device) as done:
        slots_of = {count: torch.full((count,), -1, dtype=index_dtype, device=target.device) for count in batch}
        for index in {layer: index for index, layer in enumerate(target.layers)}.values():
            for count in tokens:
                for slots in slots_of.values():
                    _step(target, index, slots, count, parameter_dtype, conv_bias, with_z)
        for slots in slots_of.values():
            _materialize(target, slots.long(), parameter_dtype)
        _commit(target)
    return done


def _model_warmup(
    model: Any, tokens: Sequence[int], batch: Sequence[int], window: int, longest_prompt: int, exact: bool
) -> Warmup:
    # Imported here, because pools are used without transformers.
    from replayssm.hf.attach import attached, check_model
    from replayssm.hf.rehearsal import rehearse

    for count in tokens:
        check_range("tokens", count, 1, MAX_WINDOW, "a draft and the token before it")
    check_model(model)
    if model.device.type == "cpu":
        return Warmup()
    with attached(model), _counted(model.device) as done:
        for rows in batch:
            for count in tokens:
                rehearse(model, rows, count, window, longest_prompt, exact)
    return done


@contextmanager
def _counted(device: torch.device) -> Iterator[Warmup]:
    """Count what Triton loads inside the block on a device."""
    from triton import knobs

    done, began = Warmup(), time.perf_counter()
    before = knobs.compilation.listener

    def listen(**event: Any) -> None:
        done.kernels += 1
        done.compiled += not event["cache_hit"]
        done.names.append(event["metadata"]["name"])
        if before is not None:
            before(**event)

    knobs.compilation.listener = listen
    try:
        with torch.cuda.device(device), torch.inference_mode():
            yield done
            torch.cuda.synchronize()
    finally:
        knobs.compilation.listener = before
    done.seconds = time.perf_counter() - began


def _step(
    pool: ReplayPool, index: int, slots: Tensor, tokens: int, dtype: torch.dtype, conv_bias: bool, with_z: bool
) -> None:
    layer, buffers = pool.layers[index], pool.buffers[index]
    kind, device, batch = buffers.conv_rows.dtype, pool.device, slots.shape[0]
    channels = layer.conv_channels
    x = causal_conv1d_replay(
        buffers.conv_rows,
        pool.cursors.conv_start,
        torch.zeros(batch, tokens, channels, dtype=kind, device=device),
        torch.zeros(layer.conv_width, channels, dtype=dtype, device=device).t(),
        torch.zeros(channels, dtype=dtype, device=device) if conv_bias else None,
        activation="silu",
        state_batch_indices=slots,
    )
    if isinstance(layer, ExactMamba2Layer):
        _exact(pool, index, x, slots, dtype, with_z)
    elif isinstance(layer, Mamba2Layer):
        _ssu(pool, index, x, slots, dtype, with_z)
    elif isinstance(layer, GDNLayer):
        _gdn(pool, index, x, slots, dtype)


def _ssu(pool: ReplayPool, index: int, conv_out: Tensor, slots: Tensor, dtype: torch.dtype, with_z: bool) -> None:
    buffers: Any = pool.buffers[index]
    x, B, C = _split(pool.layers[index], conv_out)
    heads, headdim, dstate = buffers.state.shape[1:]
    number = torch.zeros(heads, dtype=dtype, device=pool.device)
    dt = torch.zeros(*x.shape[:3], 1, device=pool.device).expand(x.shape)
    checkpointing_ssu(
        buffers.state,
        buffers.x_cache,
        buffers.B_cache,
        buffers.dt_cache,
        pool.cursors.ring_start,
        pool.cursors.num_live,
        x,
        dt,
        number.float()[:, None, None].expand(heads, headdim, dstate),
        B,
        C,
        None,
        number[:, None].expand(heads, headdim),
        torch.zeros_like(x) if with_z else None,
        number[:, None].expand(heads, headdim),
        True,
        slots,
        state_scale=buffers.state_scale,
        rand_seed=pool.rand_seed,
        max_window=pool.window,
    )


def _exact(pool: ReplayPool, index: int, conv_out: Tensor, slots: Tensor, dtype: torch.dtype, with_z: bool) -> None:
    buffers: Any = pool.buffers[index]
    slots = slots[: pool.num_slots]  # the records have memory for as many lanes
    x, B, C = _split(pool.layers[index], conv_out[: pool.num_slots])
    number = torch.zeros(x.shape[2], dtype=dtype, device=pool.device)
    z = torch.zeros_like(x) if with_z else None
    dt = torch.zeros(x.shape[:3], dtype=x.dtype, device=pool.device)
    batch_invariant_decode_buffered_scan(
        buffers.records, x, z, dt, B, C, number.float(), number, number, slots, buffers.state
    )
    buffers.records.commit(slots, torch.zeros_like(slots))


def _split(layer: Any, conv_out: Tensor) -> list[Tensor]:
    """x, B and C of a Mamba-2 layer."""
    shapes = (layer.nheads, layer.headdim), (layer.ngroups, layer.dstate), (layer.ngroups, layer.dstate)
    parts = conv_out.split([heads * dim for heads, dim in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _gdn(pool: ReplayPool, index: int, conv_out: Tensor, slots: Tensor, dtype: torch.dtype) -> None:
    layer: Any = pool.layers[index]
    buffers: Any = pool.buffers[index]
    keys = (layer.key_heads, layer.key_dim)
    q, k, v = conv_out.split((*(2 * [keys[0] * keys[1]]), layer.value_heads * layer.value_dim), -1)
    gate = torch.zeros(*v.shape[:2], layer.value_heads, dtype=v.dtype, device=pool.device)
    number = torch.zeros(layer.value_heads, dtype=dtype, device=pool.device)
    gated_delta_rule_checkpointing(
        buffers.state,
        buffers.v_cache,
        buffers.k_cache,
        buffers.g_cache,
        buffers.beta_cache,
        pool.cursors.ring_start,
        pool.cursors.num_live,
        q.unflatten(-1, keys),
        k.unflatten(-1, keys),
        v.unflatten(-1, (layer.value_heads, layer.value_dim)),
        gate,
        gate,
        number,
        number,
        use_qk_l2norm=layer.use_qk_l2norm,
        state_batch_indices=slots,
        max_window=pool.window,
    )


def _materialize(pool: ReplayPool, slots: Tensor, dtype: torch.dtype) -> None:
    # Exact layers materialize by copying.
    held = [pair for pair in zip(pool.layers, pool.buffers, strict=True) if not isinstance(pair[0], ExactMamba2Layer)]
    if not held:
        return
    layers, buffers = zip(*held, strict=True)
    materializer = Materializer(layers, buffers, pool.window, pool.ring_len)
    decays = [
        torch.full((layer.nheads,), -1.0, dtype=dtype, device=pool.device) if isinstance(layer, Mamba2Layer) else None
        for layer in layers
    ]
    rates, starts = materializer.decays(decays), torch.zeros_like(slots, dtype=torch.int32)
    for prefix_len in (starts, starts.long()):  # as the caller's rewind is int32 or int64
        materializer.write_states(slots, slots, starts, prefix_len, rates, starts)


def _commit(pool: ReplayPool) -> None:
    nowhere = torch.full((1,), -1, device=pool.device)
    nothing = torch.zeros_like(nowhere)
    # Not the pool's own commit, which counts its seed up.
    for seq_len in (1, nothing):
        cursors.commit(
            pool.cursors, nowhere, seq_len, nothing, window=pool.window, ring_len=pool.ring_len, conv_len=pool.conv_len
        )
