"""Calls of every public function that are right, by its name: each in memory of its own, for tests that spoil them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from exact_cases import Decoder
from gdn_cases import lazy_call, mtp_call, windows_of_layers
from pool_model import every_tensor, fill_pool
from spoiling import Call
from ssd_cases import int32, random_case
from torch import Tensor

import replayssm
from replayssm import cache, conv, cursors, gdn_decode, gumbel, mamba, rms_norm, row_product, ssd
from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers, batch_invariant_decode_buffered_scan
from replayssm.testing import random_ssu_call

MAMBA2 = cache.Mamba2Layer(nheads=6, headdim=4, dstate=5, ngroups=2, conv_width=3)
GDN = cache.GDNLayer(value_heads=6, value_dim=3, key_dim=5, key_heads=2, conv_width=4)
EXACT = cache.ExactMamba2Layer(nheads=6, headdim=4, dstate=5, ngroups=2, conv_width=3, chunk_size=16)


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def of(function: Callable[..., Any], **arguments: Any) -> Call:
    return Call(function, arguments, tensors_in(arguments.values()))


def on_pool(method: str, **arguments: Any) -> Call:
    """Slots 0, 1, 2 are in use; 0 and 1 have a live row."""
    pool = cache.ReplayPool([MAMBA2, GDN, EXACT], 5, window=5, max_tokens=3)
    pool.allocate(3)
    fill_pool(pool)
    for name, values in {"ring_start": [3, 7, 0], "num_live": [1, 1, 0], "conv_start": [4, 5, 0],
                         "last_accepted": [1, 1, 0]}.items():  # fmt: skip
        getattr(pool.cursors, name)[:3] = torch.tensor(values, dtype=torch.int32)
    for buffers in pool.buffers:
        if isinstance(buffers, cache.ExactMamba2Buffers):
            buffers.records.num_buffered[:3] = int32(5, 3, 0)
            buffers.records.ring_start[:3] = int32(2, 17, 0)
    return Call(
        getattr(pool, method),
        arguments,
        [*(tensor for _, tensor in every_tensor(pool)), *tensors_in(arguments.values())],
    )


def on_snapshot(function: Callable[..., Any]) -> Call:
    method, _, memory = on_pool("reset", slots=[2, 0])
    pool: Any = method.__self__  # type: ignore[attr-defined]
    arguments = {"pool": pool, "slots": torch.tensor([2, 0])}
    if function is cache.restore:
        arguments["saved"] = cache.snapshot(pool, [1, 2])
    return Call(function, arguments, [*memory, arguments["slots"]])


def on_cursors(function: Callable[..., Any], **arguments: Any) -> Call:
    made = cursors.Cursors.allocate(3, torch.device("cpu"))
    memory = [made.ring_start, made.num_live, made.conv_start, made.last_accepted]
    return Call(function, {"cursors": made, **arguments}, memory)


def on_records(method: str, **arguments: Any) -> Call:
    decoder = Decoder(random_case(20), 4, max_tokens=3, shadow=False)
    decoder.prefill((0, decoder.case.tokens(0, 5)), (2, decoder.case.tokens(0, 9)))
    memory = [*decoder.buffers.per_slot().values(), decoder.state]
    return Call(getattr(decoder.buffers, method), arguments, memory)


def packed(tokens: int) -> dict[str, Any]:
    case = random_case(tokens)
    return {"x": case.x, "z": case.z, "dt": case.dt, "B": case.B, "C": case.C,
            "cu_seqlens": int32(0, 4, tokens), "batch_indices": torch.tensor([1, 3])}  # fmt: skip


def exact_step() -> Call:
    decoder, case = Decoder(random_case(20), 4, max_tokens=3), random_case(4)
    decoder.prefill((0, decoder.case.tokens(0, 5)), (2, decoder.case.tokens(0, 9)))
    named = {name: getattr(case, name).unflatten(0, (2, 2)) for name in ("x", "z", "dt", "B", "C")}
    arguments = {"buffers": decoder.buffers, **named, "A": case.A, "D": case.D, "dt_bias": case.dt_bias,
                 "batch_indices": torch.tensor([2, 0]), "ssm_state": decoder.state}  # fmt: skip
    memory = [*decoder.buffers.per_slot().values(), decoder.buffers.out, decoder.state]
    return Call(batch_invariant_decode_buffered_scan, arguments, memory)


def materialize_mamba2() -> Call:
    call = random_ssu_call(live=(3, 2), seq_len=2, window=4)
    rates = call.A[:, 0, 0].contiguous()
    tables: dict[str, Any] = {}
    for name in ("state", "x_cache", "B_cache", "dt_cache"):
        tensor = getattr(call, name)
        tables[f"{name}_ptrs"] = torch.tensor([tensor.data_ptr()])
        tables[f"{name}_slot_strides"] = torch.tensor([tensor.stride(0)])
    slots = call.state_batch_indices.to(torch.int32)
    arguments = {
        **tables, "A_ptrs": torch.tensor([rates.data_ptr()]), "state_scale_ptrs": torch.zeros(1, dtype=torch.int64),
        "state_scale_slot_strides": torch.zeros(1, dtype=torch.int64), "src_slots": slots[None],
        "dst_slots": slots[None].clone(), "ring_start": call.ring_start[slots.long()],
        "replay_prefix_len": int32(2, 1), "active_request_indices": int32(0, 1), "state_dtype": torch.float32,
        "input_dtype": torch.float32, "matrixA_dtype": torch.float32, "dim": 5, "dstate": 11, "num_heads": 6,
        "heads_per_group": 3, "max_window": 4, "ring_buffer_len": call.x_cache.shape[2],
        "dependency_inputs": [call.x_cache, call.B_cache, call.dt_cache, rates], "dependency_outputs": [call.state],
    }  # fmt: skip
    return Call(mamba.replayssm_materialize, arguments, [call.state, *tensors_in(arguments.values())])


def windows() -> dict[str, Tensor]:
    return windows_of_layers(2, 5, 4)


CALLS: dict[str, Callable[[], Call]] = {
    "Mamba2Layer": lambda: of(cache.Mamba2Layer, nheads=6, headdim=4, dstate=5, ngroups=2, conv_width=3),
    "GDNLayer": lambda: of(
        cache.GDNLayer, value_heads=6, value_dim=3, key_dim=5, key_heads=2, conv_width=4, use_qk_l2norm=True
    ),
    "ExactMamba2Layer": lambda: of(
        cache.ExactMamba2Layer, nheads=6, headdim=4, dstate=5, ngroups=2, conv_width=3, chunk_size=16
    ),
    "ReplayPool": lambda: of(
        cache.ReplayPool, layers=[MAMBA2, MAMBA2], num_slots=3, window=7, max_tokens=4, state_dtype=torch.bfloat16,
        activation_dtype=torch.float32, stochastic_rounding=True, seed=5, device="cpu",
    ),
    "slot_bytes": lambda: of(
        cache.slot_bytes, layers=[MAMBA2, GDN], window=7, max_tokens=4, state_dtype=torch.float32,
        activation_dtype=torch.float32,
    ),
    "state_traffic": lambda: of(
        cache.state_traffic, layers=[MAMBA2, GDN], num_tokens=4, mean_accepted=2.5, window=7,
        state_dtype=torch.float32, activation_dtype=torch.float32,
    ),
    "choose_window": lambda: of(
        cache.choose_window, layers=[MAMBA2, GDN], num_tokens=4, mean_accepted=2.5, state_dtype=torch.float32,
        activation_dtype=torch.float32,
    ),
    "snapshot_bytes": lambda: of(
        cache.snapshot_bytes, layers=[MAMBA2, GDN], num_tokens=4, state_dtype=torch.float32
    ),
    "can_allocate": lambda: on_pool("can_allocate", n=2),
    "allocate": lambda: on_pool("allocate", n=2),
    "free": lambda: on_pool("free", slots=torch.tensor([2, 0])),
    "reset": lambda: on_pool("reset", slots=torch.tensor([2, 0])),
    "fork": lambda: on_pool("fork", src_slots=torch.tensor([2, 0])),
    "copy": lambda: on_pool("copy", src_slots=torch.tensor([2, 0]), dst_slots=torch.tensor([1, 0])),
    "write_state": lambda: on_pool(
        "write_state", layer_index=1, slots=torch.tensor([2]), state=torch.randn(1, 6, 3, 5),
        conv_window=torch.randn(1, 38, 3), rows=None,
    ),
    "write_state of an exact layer": lambda: on_pool(
        "write_state", layer_index=2, slots=torch.tensor([2]), state=torch.randn(1, 6, 4, 5),
        conv_window=torch.randn(1, 44, 2),
        rows=(torch.randn(1, 9, 6, 4), torch.randn(1, 9, 6), torch.randn(1, 9, 2, 5)),
    ),
    "commit": lambda: on_pool(
        "commit", slots=torch.tensor([2, -1, 0]), num_accepted=torch.tensor([2, 9, 0]), seq_len=2
    ),
    "commit of several lengths": lambda: on_pool(
        "commit", slots=torch.tensor([2, 0]), num_accepted=torch.tensor([2, 0]), seq_len=torch.tensor([3, 1])
    ),
    "materialize": lambda: on_pool(
        "materialize", src_slots=torch.tensor([1, 0]), dst_slots=torch.tensor([2, 0]), rewind=torch.tensor([1, 0]),
        A=[-torch.rand(6) - 0.1, None, None],
    ),
    "snapshot": lambda: on_snapshot(cache.snapshot),
    "restore": lambda: on_snapshot(cache.restore),
    "cursors.commit": lambda: on_cursors(
        cursors.commit, slots=torch.tensor([2, -1, 0]), num_accepted=torch.tensor([2, 9, 0]), seq_len=2, window=5,
        ring_len=8, conv_len=6,
    ),
    "cursors.reset": lambda: on_cursors(cursors.reset, slots=torch.tensor([2, 0])),
    "checkpointing_ssu": lambda: of(
        mamba.checkpointing_ssu, **random_ssu_call(live=(3, 6), seq_len=3, window=7).arguments()
    ),
    "replayssm_materialize": materialize_mamba2,
    "causal_conv1d_replay": lambda: of(
        conv.causal_conv1d_replay, rows=torch.randn(5, 6, 7), conv_start=int32(0, 1, 2, 3, 4), x=torch.randn(2, 3, 7),
        weight=torch.randn(7, 4), bias=torch.randn(7), activation="silu", state_batch_indices=torch.tensor([3, 0]),
        out=torch.zeros(2, 3, 7),
    ),
    "gated_delta_rule_mtp": lambda: of(gdn_decode.gated_delta_rule_mtp, **mtp_call(3, 4).with_windows().arguments()),
    "gated_delta_rule_replayssm_commit": lambda: of(
        gdn_decode.gated_delta_rule_replayssm_commit, **windows(), state_indices=torch.tensor([3, 1]),
        accept_lens=int32(2, 4), track_state_indices=torch.tensor([2, -1]), track_steps=int32(1, 0),
    ),
    "gated_delta_rule_replayssm_materialize": lambda: of(
        gdn_decode.gated_delta_rule_replayssm_materialize, **windows(), src_slots=torch.tensor([3, 1]),
        dst_slots=torch.tensor([2, 1]), prefix_lens=int32(2, 4),
    ),
    "gated_delta_rule_checkpointing": lambda: of(
        gdn_decode.gated_delta_rule_checkpointing, **lazy_call((3, 1), 3, 7).arguments()
    ),
    "chunk_scan": lambda: of(
        ssd.chunk_scan, **random_case(20).arguments(), cu_seqlens=int32(0, 8, 20), out=torch.zeros(20, 6, 5),
        initial_states=torch.randn(2, 6, 5, 11), final_states=torch.zeros(2, 6, 5, 11),
        boundary_states=torch.zeros(2, 6, 5, 11),
    ),
    "BatchInvariantDecodeBuffers.allocate": lambda: of(
        BatchInvariantDecodeBuffers.allocate, max_requests=4, chunk_size=16, nheads=6, headdim=5, ngroups=2, dstate=11,
        device=torch.device("cpu"), dtype=torch.bfloat16, max_tokens=2, trimmed=True, shadow=True,
    ),
    "records.seed": lambda: on_records("seed", **packed(20)),
    "records.extend": lambda: on_records("extend", **packed(20)),
    "records.commit": lambda: on_records(
        "commit", batch_indices=torch.tensor([2, -1]), num_accepted=torch.tensor([1, 7])
    ),
    "batch_invariant_decode_buffered_scan": exact_step,
    "row_product": lambda: of(
        row_product.row_product, x=torch.randn(3, 5), weight=torch.randn(7, 5), bias=torch.randn(7),
        out=torch.zeros(3, 7),
    ),
    "rms_norm": lambda: of(
        rms_norm.rms_norm, x=torch.randn(3, 5), weight=torch.randn(5), gate=torch.randn(3, 5), eps=1e-5, offset=0.5,
        gate_first=True, out=torch.zeros(3, 5),
    ),
    "gumbel_noise": lambda: of(
        gumbel.gumbel_noise, seeds=torch.tensor([7, 8]), requests=torch.tensor([0, 1]), positions=torch.tensor([5, 5]),
        vocab_size=11,
    ),
    "warmup": lambda: of(
        replayssm.warmup, target=cache.ReplayPool([MAMBA2], 3, window=7, max_tokens=4), tokens=(1, 4), batch=(1, 3),
    ),
}  # fmt: skip
