"""Buffers of the Mamba-2 benchmark, the bytes that a call must move, and the comparison with the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from replayssm.bench.timing import verify
from replayssm.mamba import checkpointing_ssu, replayssm_materialize
from replayssm.rounding import decode, encode
from replayssm.testing import using

P, N, WINDOW = 64, 128, 16
DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
# Norm of the error over the norm of the reference, by type of the state. bf16 operands round by 2^-9, twice on the way
# to an output; a flush's outputs see the codes' rounding, where the two sides may fall on different sides of a tie.
_OUTPUT_LIMIT = {"fp32": 4e-3, "bf16": 4e-3, "fp16": 4e-3, "int8": 1e-2, "fp8": 5e-2}
_STATE_LIMIT = {"fp32": 2e-3, "bf16": 4e-3, "fp16": 2e-3, "int8": 1e-2, "fp8": 4e-2}
_CHECKED = 3  # requests


def step_buffers(batch: int, heads: int, groups: int, tokens: int, state: str, live: Tensor) -> dict[str, Any]:
    """Arguments of ``checkpointing_ssu``: every request in a slot of its own, in random order.

    Args:
        batch: requests.
        heads: heads.
        groups: groups.
        tokens: T.
        state: a key of `DTYPES`.
        live: live rows of every request, int64 ``[batch]``; its device is that of the buffers. Activations are bf16 on
            a GPU and fp32 on the CPU.
    """
    device = live.device
    ring_len = WINDOW + tokens
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rand = lambda *shape: torch.rand(*shape, device=device)  # noqa: E731
    randn = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    codes, scale = encode(torch.randn(batch, heads, P, N, device=device), DTYPES[state])
    slots = torch.randperm(batch, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    counts[slots] = live.int()
    return {
        "state": codes, "state_scale": scale, "x_cache": randn(batch, heads, ring_len, P),
        "B_cache": randn(batch, groups, ring_len, N), "dt_cache": rand(batch, heads, ring_len) * 0.1,
        "ring_start": torch.zeros(batch, dtype=torch.int32, device=device), "prev_num_accepted_tokens": counts,
        "x": randn(batch, tokens, heads, P), "dt": randn(batch, tokens, heads, 1).expand(-1, -1, -1, P),
        "A": (-rand(heads, 1, 1) - 1).expand(-1, P, N), "B": randn(batch, tokens, groups, N),
        "C": randn(batch, tokens, groups, N), "out": randn(batch, tokens, heads, P),
        "D": randn(heads, 1).expand(-1, P), "dt_bias": (rand(heads, 1) - 4).to(dtype).expand(-1, P),
        "dt_softplus": True, "state_batch_indices": slots.int(),
    }  # fmt: skip


def live_rows(mode: str, batch: int) -> Tensor:
    """Live rows of every request, int64 ``[batch]``: 8 (hold), 0, 1, ..., 16, 0, ... (mix), 16 (flush)."""
    rows = torch.arange(batch) % (WINDOW + 1)
    return rows if mode == "mix" else torch.full_like(rows, 8 if mode == "hold" else WINDOW)


def state_bytes(state: str, heads: int) -> int:
    """Bytes of one request's state, with the scales of the 8-bit types."""
    return heads * (P * N * DTYPES[state].itemsize + (4 * P if state in ("int8", "fp8") else 0))


def step_bytes(heads: int, groups: int, tokens: int, state: str, live: Tensor, width: int) -> int:
    """Bytes that a step must move: states, live rows and their dt, tokens in, rows and outputs out.

    Args:
        heads: heads.
        groups: groups.
        tokens: T.
        state: a key of `DTYPES`.
        live: live rows of every request.
        width: bytes of an activation.
    """
    passes = live.numel() + int((live + tokens > WINDOW).sum())
    ring = int(live.sum()) * (heads * (width * P + 4) + groups * width * N)
    # In: x, dt, B, C. Out: y, and x, B, processed dt as rows.
    new = live.numel() * tokens * (heads * (3 * width * P + width + 4) + groups * 3 * width * N)
    return passes * state_bytes(state, heads) + ring + new


def check_step(name: str, buffers: dict[str, Any]) -> float:
    """Run the step and compare outputs, states and rings of a few requests and one group's heads with fp64.

    Args:
        name: the case, for the message.
        buffers: see `step_buffers`; the step has been done on them afterwards.

    Returns:
        The relative error of the outputs.

    Raises:
        WrongAnswer: something differs by more than its type allows.
    """
    counts, slots = buffers["prev_num_accepted_tokens"], buffers["state_batch_indices"].long()
    order = counts[slots].argsort()
    picked = order[torch.linspace(0, len(order) - 1, min(_CHECKED, len(order))).long().to(order.device)]
    heads, groups = buffers["x"].shape[2], buffers["B"].shape[2]
    some = slice(heads - heads // groups, heads)
    expected = _excerpt(buffers, picked, slots[picked], some)
    with using("reference"):
        checkpointing_ssu(**expected)
    checkpointing_ssu(**buffers)
    actual = _excerpt(buffers, picked, slots[picked], some)
    state = next(key for key, dtype in DTYPES.items() if dtype == buffers["state"].dtype)
    exact = buffers["x"].dtype == torch.float32 and state == "fp32"
    _verify_states(name, state, 1e-5 if exact else _STATE_LIMIT[state], actual, expected)
    for ring in ("x_cache", "B_cache", "dt_cache"):
        verify(f"{name}: {ring}", actual[ring], expected[ring], 1e-6 if ring == "dt_cache" else 0.0)
    return verify(name, actual["out"], expected["out"], 1e-5 if exact else _OUTPUT_LIMIT[state])


def _verify_states(name: str, state: str, limit: float, actual: dict[str, Any], expected: dict[str, Any]) -> float:
    codes, truth = (decode(each["state"], each["state_scale"]) for each in (actual, expected))
    return verify(f"{name}: state", codes, truth, limit)


def _excerpt(buffers: dict[str, Any], rows: Tensor, slots: Tensor, heads: slice) -> dict[str, Any]:
    """Copies on the host, of some requests and the heads of the last group."""
    result: dict[str, Any] = {"dt_softplus": buffers["dt_softplus"]}
    for name in ("state", "state_scale", "x_cache", "dt_cache"):
        result[name] = None if buffers[name] is None else buffers[name][slots, heads].cpu()
    result["B_cache"] = buffers["B_cache"][slots, -1:].cpu()
    for name in ("x", "out"):
        result[name] = buffers[name][rows, :, heads].cpu().contiguous()
    for name in ("B", "C"):
        result[name] = buffers[name][rows, :, -1:].cpu().contiguous()
    for name in ("ring_start", "prev_num_accepted_tokens"):
        result[name] = buffers[name][slots].cpu()
    result["dt"] = buffers["dt"][rows, :, heads, :1].cpu().expand(-1, -1, -1, P)
    result["A"] = buffers["A"][heads, :1, :1].cpu().expand(-1, P, N)
    for name in ("D", "dt_bias"):
        result[name] = buffers[name][heads, :1].cpu().expand(-1, P)
    return result | {"state_batch_indices": torch.arange(len(rows), dtype=torch.int32)}


def materialize_arguments(pool: list[dict[str, Any]], batch: int, prefix: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Arguments of ``replayssm_materialize`` that write slots ``batch..2 * batch - 1`` from the slots before them.

    Args:
        pool: one dict of buffers per layer, see `step_buffers`, of ``2 * batch`` slots.
        batch: requests.
        prefix: rows to apply.

    Returns:
        The tensors, and the options. The addresses of A are good as long as ``pool`` lives.
    """
    device, first = pool[0]["x"].device, pool[0]
    int64 = lambda values: torch.tensor(values, device=device)  # noqa: E731
    tables: list[Tensor] = []
    for name in ("state", "x_cache", "B_cache", "dt_cache", "A", "state_scale"):
        tensors = [layer[name] for layer in pool]
        present = tensors[0] is not None
        tables.append(int64([t.data_ptr() if present else 0 for t in tensors]))
        if name != "A":
            tables.append(int64([t.stride(0) if present else 0 for t in tensors]))
    request = torch.arange(batch, dtype=torch.int32, device=device)
    source = request.repeat(len(pool), 1).contiguous()
    tables += [source, source + batch, torch.zeros_like(request), torch.full_like(request, prefix), request]
    heads, groups = first["x"].shape[2], first["B"].shape[2]
    return tables, {
        "state_dtype": first["state"].dtype, "input_dtype": first["x"].dtype, "matrixA_dtype": first["A"].dtype,
        "dim": P, "dstate": N, "num_heads": heads, "heads_per_group": heads // groups, "max_window": WINDOW,
        "ring_buffer_len": first["x_cache"].shape[2],
    }  # fmt: skip


def check_materialize(name: str, pool: list[dict[str, Any]], tables: list[Tensor], options: dict[str, Any]) -> float:
    """Run it and compare the last layer's state of the last request, one group's heads, with fp64.

    Args:
        name: the case, for the message.
        pool: the layers.
        tables: see `materialize_arguments`.
        options: the same.

    Returns:
        The relative error of the state.

    Raises:
        WrongAnswer: it is larger than the type of the state allows.
    """
    replayssm_materialize(*tables, **options)
    batch, heads = tables[-1].numel(), slice(options["num_heads"] - options["heads_per_group"], options["num_heads"])
    source, target = (torch.tensor([slot], device=tables[0].device) for slot in (batch - 1, 2 * batch - 1))
    layer = _excerpt(pool[-1], source, torch.cat([source, target]), heads)
    actual = {key: layer[key] if layer[key] is None else layer[key][1:].clone() for key in ("state", "state_scale")}
    layer["B"] = layer["B"][:, :, :1]
    host, host_options = materialize_arguments([layer], 1, int(tables[-2][-1]))
    with using("reference"):
        replayssm_materialize(*host, **host_options)
    expected = {key: layer[key] if layer[key] is None else layer[key][1:] for key in ("state", "state_scale")}
    state = next(key for key, dtype in DTYPES.items() if dtype == options["state_dtype"])
    return _verify_states(name, state, _STATE_LIMIT[state], actual, expected)


def ordinary_step(buffers: dict[str, Any]) -> Callable[[], Tensor]:
    """Return what a decoder without a ring does, in torch operations on the same buffers: the state changes in place.

    With several tokens, of which some may be rejected, it keeps a copy of the state behind each of them.
    """
    state, x, out = buffers["state"], buffers["x"], buffers["out"]
    order = buffers["state_batch_indices"].long().argsort()  # the request of every slot
    per_group, tokens = x.shape[2] // buffers["B"].shape[2], x.shape[1]
    A, D, bias = buffers["A"][:, 0, 0], buffers["D"][:, :1], buffers["dt_bias"][:, 0]
    S = state if state.dtype == torch.float32 else state.float()
    snapshots = torch.zeros(tokens if tokens > 1 else 0, *state.shape, dtype=state.dtype, device=state.device)

    def step() -> Tensor:
        if S is not state:
            S.copy_(state)
        for t in range(tokens):
            dt = softplus(buffers["dt"][order, t, :, 0] + bias)
            x_t = x[order, t]
            B, C = (buffers[name][order, t].repeat_interleave(per_group, 1) for name in ("B", "C"))
            S.mul_(torch.exp(A * dt)[..., None, None]).addcmul_((dt[..., None] * x_t)[..., None], B[..., None, :])
            out[order, t] = (S @ C[..., None])[..., 0] + D * x_t
            if tokens > 1:
                snapshots[t].copy_(S)
        if S is not state:
            state.copy_(S)
        return out

    return step
