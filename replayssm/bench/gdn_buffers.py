"""Buffers of the GDN benchmark, the bytes that a call must move, and the comparison with the fp64 reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.bench.timing import verify
from replayssm.gdn_decode import (
    gated_delta_rule_checkpointing,
    gated_delta_rule_mtp,
    gated_delta_rule_replayssm_commit,
)
from replayssm.testing import using

K = V = 128
WINDOW = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Norm of the error over the norm of the reference, by type of the state; what is checked has fp32 outputs.
_LIMIT = {"fp32": 2e-6, "bf16": 8e-3, "fp16": 1e-3}
_CHECKED = 3  # requests
_WINDOWS = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
_RINGS = ("v_cache", "k_cache", "g_cache", "beta_cache")


def _tokens(batch: int, heads: int, keys: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Random inputs of every token: bf16 on a GPU, fp32 on the CPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    randn = lambda *shape: torch.randn(batch, tokens, *shape, device=device).to(dtype)  # noqa: E731
    return {
        "q": randn(keys, K), "k": randn(keys, K), "v": randn(heads, V), "a": randn(heads), "b": randn(heads),
        "A_log": torch.randn(heads, device=device), "dt_bias": torch.randn(heads, device=device),
        "output": randn(heads, V),
    }  # fmt: skip


def _records(shape: tuple[int, ...], heads: int, keys: int, rows: int, device: torch.device) -> list[Tensor]:
    """Windows or rings of v, k, g and beta behind the axes of ``shape``."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    randn = lambda *rest: torch.randn(*shape, *rest, device=device)  # noqa: E731
    v, k = randn(heads, rows, V).to(dtype), randn(keys, rows, K).to(dtype)
    return [v, k, -randn(heads, rows).abs(), randn(heads, rows).sigmoid()]


def mtp_buffers(
    batch: int, heads: int, keys: int, tokens: int, state: str, mode: str, device: torch.device
) -> dict[str, Any]:
    """Arguments of ``gated_delta_rule_mtp``: every request in a slot of its own, in random order.

    Args:
        batch: requests.
        heads: value heads.
        keys: key heads.
        tokens: T.
        state: a key of `DTYPES`.
        mode: ``"frozen"``, ``"windows"`` (frozen, windows written) or ``"update"``.
        device: where they belong.
    """
    made: dict[str, Any] = {
        "initial_state": torch.randn(batch, heads, V, K, device=device).to(DTYPES[state]),
        "initial_state_indices": torch.randperm(batch, device=device).int(),
        "disable_state_update": mode != "update",
        **_tokens(batch, heads, keys, tokens, device),
    }
    if mode == "windows":
        windows = _records((batch,), heads, keys, tokens, device)
        made |= {"cache_replayssm": True} | dict(zip(_WINDOWS, windows, strict=True))
    return made


def commit_buffers(
    layers: int, batch: int, heads: int, keys: int, tokens: int, accepted: int, state: str, device: torch.device
) -> dict[str, Any]:
    """Arguments of ``gated_delta_rule_replayssm_commit``.

    Args:
        layers: layers of the model.
        batch: requests.
        heads: value heads.
        keys: key heads.
        tokens: T, rows of the windows.
        accepted: tokens that every request keeps.
        state: a key of `DTYPES`.
        device: where they belong.
    """
    rawv, rawk, g, beta = _records((layers, batch), heads, keys, tokens, device)
    checkpoint = torch.randn(layers, batch, heads, V, K, device=device).to(DTYPES[state])
    return {
        "checkpoint_state": checkpoint, "rawv_cache": rawv, "rawk_cache": rawk, "g_cache": g, "beta_cache": beta,
        "state_indices": torch.randperm(batch, device=device).int(),
        "accept_lens": torch.full((batch,), accepted, dtype=torch.int32, device=device),
    }  # fmt: skip


def lazy_buffers(batch: int, heads: int, keys: int, tokens: int, state: str, device: torch.device) -> dict[str, Any]:
    """Arguments of ``gated_delta_rule_checkpointing``, with the live rows of `lazy_cursors` at phase 0."""
    slots = torch.randperm(batch, device=device)
    rings = _records((batch,), heads, keys, WINDOW + tokens, device)
    return {
        "state": torch.randn(batch, heads, V, K, device=device).to(DTYPES[state]),
        **dict(zip(_RINGS, rings, strict=True)), "ring_start": torch.zeros(batch, dtype=torch.int32, device=device),
        "num_live": lazy_cursors(batch, tokens, 0).to(device), "state_batch_indices": slots.int(),
        "max_window": WINDOW, **_tokens(batch, heads, keys, tokens, device),
    }  # fmt: skip


def lazy_cursors(batch: int, tokens: int, phase: int) -> Tensor:
    """Live rows of every slot, int32 ``[batch]``: those of a cycle in which all tokens are kept, from ``phase`` on.

    A cycle has `lazy_cycle` steps, the last of which flushes.
    """
    steps = lazy_cycle(tokens)
    return (1 + (torch.arange(batch) + phase) % steps).int() * tokens


def lazy_cycle(tokens: int) -> int:
    """Steps from one flush to the next when all tokens are kept."""
    return WINDOW // tokens


def state_bytes(state: str, heads: int) -> int:
    """Bytes of one request's state in one layer."""
    return heads * V * K * DTYPES[state].itemsize


def token_bytes(heads: int, keys: int, width: int) -> int:
    """Bytes of one token in and out: q, k, v, a, b; output."""
    return width * (2 * keys * K + 2 * heads * V + 2 * heads)


def record_bytes(heads: int, keys: int, width: int) -> int:
    """Bytes of one recorded token: v, k; g, beta."""
    return width * (keys * K + heads * V) + 8 * heads


def _picked(batch: int, device: torch.device) -> Tensor:
    return torch.linspace(0, batch - 1, min(_CHECKED, batch)).long().to(device)


def _tokens_of(buffers: dict[str, Any], rows: Tensor, some: slice) -> dict[str, Any]:
    """Copies on the host of the tokens of some requests, for the value heads of the last key head."""
    heads = {name: buffers[name][rows][:, :, some].cpu() for name in ("v", "a", "b")}
    keys = {name: buffers[name][rows][:, :, -1:].cpu() for name in ("q", "k")}
    return heads | keys | {name: buffers[name][some].cpu() for name in ("A_log", "dt_bias")}


def _last_heads(buffers: dict[str, Any]) -> slice:
    heads, keys = buffers["v"].shape[2], buffers["k"].shape[2]
    return slice(heads - heads // keys, heads)


def check_mtp(name: str, buffers: dict[str, Any], state: str, backend: str) -> float:
    """Run it with fp32 outputs and compare outputs, states and windows of a few requests and heads with fp64.

    Args:
        name: the case, for the message.
        buffers: see `mtp_buffers`; one call has been done on them afterwards.
        state: a key of `DTYPES`.
        backend: of the call.

    Returns:
        The relative error of the outputs.

    Raises:
        WrongAnswer: something differs by more than its type allows.
    """
    rows, some = _picked(len(buffers["q"]), buffers["q"].device), _last_heads(buffers)
    slots = buffers["initial_state_indices"][rows].long()
    places = {
        "initial_state": some,
        _WINDOWS[0]: some,
        _WINDOWS[1]: slice(-1, None),
        _WINDOWS[2]: some,
        _WINDOWS[3]: some,
    }
    excerpt = lambda: {n: buffers[n][slots][:, heads].cpu() for n, heads in places.items() if n in buffers}  # noqa: E731
    expected = excerpt() | _tokens_of(buffers, rows, some)
    expected |= {"initial_state_indices": torch.arange(len(rows)), "output": expected["v"].float()}
    flags = {n: buffers[n] for n in ("disable_state_update", "cache_replayssm") if n in buffers}
    with using("reference"):
        gated_delta_rule_mtp(**expected, **flags)
    output = torch.empty_like(buffers["output"], dtype=torch.float32)
    gated_delta_rule_mtp(**{**buffers, "output": output}, backend=backend)
    actual = excerpt()
    for key, tensor in actual.items():
        limit = _LIMIT[state] if key == "initial_state" else 0.0 if key in _WINDOWS[:2] else 1e-6
        verify(f"{name}: {key}", tensor, expected[key], limit)
    return verify(name, output[rows][:, :, some], expected["output"], _LIMIT["fp32"])


def check_commit(name: str, buffers: dict[str, Any], state: str, backend: str) -> float:
    """Run it and compare the last layer's states of a few requests and heads with fp64; see `check_mtp`."""
    layers, slots, heads = buffers["checkpoint_state"].shape[:3]
    some = slice(heads - heads // buffers["rawk_cache"].shape[2], heads)
    rows = _picked(slots, buffers["state_indices"].device)
    places = {
        "checkpoint_state": some,
        "rawv_cache": some,
        "rawk_cache": slice(-1, None),
        "g_cache": some,
        "beta_cache": some,
    }
    at = buffers["state_indices"][rows].long()
    excerpt = lambda: {n: buffers[n][layers - 1 :, at][:, :, part].cpu() for n, part in places.items()}  # noqa: E731
    expected = excerpt()
    indices = torch.arange(len(rows), dtype=torch.int32)
    with using("reference"):
        gated_delta_rule_replayssm_commit(
            **expected, state_indices=indices, accept_lens=buffers["accept_lens"][rows].cpu()
        )
    gated_delta_rule_replayssm_commit(**buffers, backend=backend)
    return verify(name, excerpt()["checkpoint_state"], expected["checkpoint_state"], _LIMIT[state])


def check_lazy(name: str, buffers: dict[str, Any], state: str, backend: str) -> float:
    """Run it with fp32 outputs and compare outputs, states and rings of a few requests and heads; see `check_mtp`."""
    some = _last_heads(buffers)
    slots = buffers["state_batch_indices"].long()
    rows = buffers["num_live"][slots].argsort()[_picked(len(slots), slots.device)]
    at = slots[rows]
    places = dict.fromkeys(("state", *_RINGS), some) | {"k_cache": slice(-1, None)}
    excerpt = lambda: {n: buffers[n][at][:, part].cpu() for n, part in places.items()}  # noqa: E731
    expected = excerpt() | _tokens_of(buffers, rows, some) | {"max_window": WINDOW}
    expected |= {n: buffers[n][at].cpu() for n in ("ring_start", "num_live")} | {"output": expected["v"].float()}
    with using("reference"):
        gated_delta_rule_checkpointing(**expected)
    output = torch.empty_like(buffers["output"], dtype=torch.float32)
    gated_delta_rule_checkpointing(**{**buffers, "output": output}, backend=backend)
    actual = excerpt()
    verify(f"{name}: state", actual["state"], expected["state"], _LIMIT[state])
    for ring in _RINGS:
        verify(f"{name}: {ring}", actual[ring], expected[ring], 0.0 if ring in _RINGS[:2] else 1e-6)
    limit = _LIMIT["fp32"] if state == "fp32" else 8e-3  # outputs of a flush read the state as it was stored
    return verify(name, output[rows][:, :, some], expected["output"], limit)
