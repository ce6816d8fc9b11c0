"""gated_delta_rule_checkpointing: against the fp64 loop, and bit for bit against committing after every step."""

import re
from dataclasses import replace

import pytest
import torch
from gdn_cases import RINGS, WRITTEN, drawn, int32, lazy_call, normal
from op_cases import OPCHECK, handed_to
from torch import Tensor

from replayssm import cursors
from replayssm.gdn_decode import gated_delta_rule_checkpointing, gated_delta_rule_mtp, lazy
from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit
from replayssm.gdn_decode import gated_delta_rule_replayssm_materialize as materialize
from replayssm.testing import (
    as_bytes,
    assert_close,
    lifecycle,
    output_tolerance,
    poisoned,
    state_tolerance,
    using,
)

BACKENDS = ("simt", "tensor_core")


def check(call, **changes):
    actual = call.run(**changes)
    with using("reference"):
        expected = call.run(**changes)
    for row, slot in enumerate(call.state_batch_indices.tolist()):
        if slot < 0:
            assert torch.equal(actual.output[row], call.output[row])
            continue
        tolerance = output_tolerance(call.output.dtype, call.state.dtype)
        assert_close(f"output {row}", actual.output[row], expected.output[row], tolerance)
        assert_close(f"state {row}", actual.state[slot], expected.state[slot], state_tolerance(call.state.dtype))
        if call.num_live[slot] + call.q.shape[1] <= call.max_window:
            assert torch.equal(as_bytes(actual.state[slot]), as_bytes(call.state[slot])), "a step without flush wrote"
    assert torch.equal(actual.state.isnan(), expected.state.isnan())
    for name in RINGS:
        got, wanted = getattr(actual, name), getattr(expected, name)
        assert torch.equal(got.isnan(), wanted.isnan()), f"{name}: rows that are nobody's"
        assert torch.allclose(got.float(), wanted.float(), atol=0, rtol=2e-6, equal_nan=True), name
    return actual


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_batch_of_every_dtype(dtype, state_dtype, backend):
    # window - T = 5: no live rows, below the edge, at it, one past it, full; and a padded request.
    check(lazy_call((0, 3, 5, 6, -1, 8), 3, 8, dtype=dtype, state_dtype=state_dtype), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", range(13))
def test_the_ring_wraps_at_every_row(start, backend):
    check(lazy_call((0, 5, 6, 9), 4, 9, starts=(start,) * 4), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("T", "window", "live"), [(1, 1, (0, 1)), (1, 16, (15, 16)), (16, 16, (0, 16)), (5, 64, (64, 59, 60))]
)
def test_lengths_and_the_edge_of_the_window(T, window, live, backend):
    call = lazy_call(live, T, window, spare=3)
    after = check(call, backend=backend)
    for slot, count in zip(call.state_batch_indices.tolist(), live, strict=True):
        flushed = not torch.equal(after.state[slot], call.state[slot])
        assert flushed is (count + T > window and count > 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 5, 7, 3), (5, 5, 1, 256), (3, 6, 256, 2), (2, 14, 33, 65)])
def test_sizes(sizes, backend):
    H, HV, K, V = sizes
    check(lazy_call((2, 6), 3, 7, H=H, HV=HV, K=K, V=V), backend=backend)


@pytest.mark.parametrize("starts", [(0, 0), (6, 2)])  # behind (6, 2) both requests' new rows cross the ring's end
def test_narrow_rings_round_what_is_used(starts):
    call = lazy_call((2, 6), 3, 7, starts=starts, ring_dtype=torch.bfloat16)
    rounded = {name: getattr(call, name).bfloat16().float() for name in "kv"}
    assert torch.equal(check(call).output, call.run(**rounded).output)
    assert not torch.equal(call.k, rounded["k"])


@pytest.mark.parametrize("extreme", [{"a": -1e4, "b": 100.0}, {"a": 1e4, "b": -100.0}, {"a": 100.0, "b": 100.0}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_gates(extreme, backend):
    call = lazy_call((3, 6), 3, 7)
    call.g_cache[:, :, ::4] = torch.where(call.g_cache[:, :, ::4].isnan(), torch.nan, -torch.inf)
    after = call.run(**{name: torch.full_like(call.a, value) for name, value in extreme.items()}, backend=backend)
    with using("reference"):
        expected = call.run(**{name: torch.full_like(call.a, value) for name, value in extreme.items()})
    tolerance = output_tolerance(torch.float32, torch.float32)
    assert_close("output", normal(after.output), normal(expected.output), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["simt", "tensor_core", "auto"])
def test_lazy_equals_committing_every_step(backend, dtype):
    """Random lengths and accepts, rings that wrap, a slot used again: states always bit-equal, simt outputs too."""
    H, HV, K, V, window, most, slot = 2, 6, 16, 11, 7, 4, 2
    ring_len, g = window + most + 2, torch.Generator("cpu").manual_seed(4)
    randn = lambda *shape: drawn(torch.randn, *shape, generator=g)  # noqa: E731
    A_log, dt_bias = randn(HV), randn(HV)
    pool = cursors.Cursors.allocate(6, torch.get_default_device())
    index, flushes = torch.tensor([slot]), 0
    for sequence in range(2):
        call = lazy_call((0, 0, 0), most, window, spare=2, dtype=dtype)
        state, eager = torch.full_like(call.state, torch.nan), torch.full_like(call.state, torch.nan)
        state[slot] = eager[slot] = randn(HV, V, K)
        rings = [getattr(call, name) for name in RINGS]
        cursors.reset(pool, index)
        for T, accepted in lifecycle(seed=sequence, rounds=80, max_tokens=most):
            q, k, v = randn(1, T, H, K).to(dtype), randn(1, T, H, K).to(dtype), randn(1, T, HV, V).to(dtype)
            a, b = randn(1, T, HV), randn(1, T, HV)
            expected = gated_delta_rule_mtp(
                q, k, v, eager, index, A_log, a, dt_bias, b, disable_state_update=True, backend="simt"
            )[0]  # fmt: skip
            before = state.clone()
            output = gated_delta_rule_checkpointing(
                state, *rings, pool.ring_start, pool.num_live, q, k, v, a, b, A_log, dt_bias, max_window=window,
                state_batch_indices=index, backend=backend,
            )  # fmt: skip
            flushes += not torch.equal(before[slot], state[slot])
            if backend == "simt":
                assert torch.equal(output, expected)
            assert_close("output", output, expected, output_tolerance(dtype, torch.float32))
            cursors.commit(pool, index, T, torch.tensor([accepted]), window=window, ring_len=ring_len, conv_len=9)
            if accepted:
                kept = [tensor[:, :accepted] for tensor in (q, k, v, a, b)]
                gated_delta_rule_mtp(
                    *kept[:3], eager, index, A_log, kept[3], dt_bias, kept[4], disable_state_update=False
                )  # fmt: skip
            probe = state.clone()  # a step too long for what is left of the window would flush: compare that state
            live = int(pool.num_live[slot])
            if live:
                rows = (int(pool.ring_start[slot]) + torch.arange(live)) % ring_len
                v_row, k_row, g_row, beta_row = (ring[slot][:, rows][None, None] for ring in rings)
                records = (v_row, k_row, g_row, beta_row, int32([0]), int32([live]))
                commit(probe[None, slot : slot + 1], *records, backend="simt")
            assert torch.equal(probe[slot], eager[slot])
    assert flushes > 20


def test_materialize_stores_what_a_flush_does():
    call = lazy_call((5, 8), 3, 8, spare=2)
    flushed = call.run()
    slot = int(call.state_batch_indices[1])
    target = next(s for s in range(5) if s not in call.state_batch_indices.tolist())
    state = call.state.clone()
    materialize(
        state[None], *(getattr(call, name)[None] for name in RINGS), int32([slot]), int32([target]), int32([8]),
        ring_start=call.ring_start[slot : slot + 1],
    )  # fmt: skip
    assert torch.equal(state[target], flushed.state[slot])
    assert torch.equal(state[slot], call.state[slot])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("K", [16, 65])
def test_a_request_has_the_same_bits_in_any_batch_order_cursor_and_memory(K, backend):
    call = replace(lazy_call((5, 0, 7, 8, 3), 4, 8, K=K, H=1, HV=3), backend=backend)
    whole = call.run()
    rowwise = ("q", "k", "v", "a", "b", "output", "state_batch_indices")
    for rows in ([0], [3], [2, 4], [4, 3, 2, 1, 0]):
        part = call.run(**{name: getattr(call, name)[rows] for name in rowwise})
        assert torch.equal(part.output, whole.output[rows])
        for slot in part.state_batch_indices.tolist():
            for name in WRITTEN[:-1]:
                assert torch.equal(as_bytes(getattr(part, name)[slot]), as_bytes(getattr(whole, name)[slot]))
    for shift in (1, 2, 3):
        moved = {}
        for name in WRITTEN[:-1]:
            tensor = getattr(call, name)
            wide = poisoned((tensor.numel() + shift,), tensor.dtype)
            moved[name] = wide[shift:].view(tensor.shape).copy_(tensor.roll(shift, 2) if name in RINGS else tensor)
        moved["ring_start"] = (call.ring_start + shift) % call.v_cache.shape[2]
        arguments = {**call.arguments(), **moved, "output": None}
        assert torch.equal(gated_delta_rule_checkpointing(**arguments), whole.output)
        assert torch.equal(as_bytes(moved["state"]), as_bytes(whole.state))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_request_leaves_the_others_alone(backend):
    call = replace(lazy_call((3, 6, 1), 3, 6), backend=backend)
    expected = call.run()
    first, bad, last = call.state_batch_indices.tolist()
    call.v_cache[bad] = call.g_cache[bad] = torch.nan
    call.k[1] = torch.nan
    after = call.run()
    assert after.output[1].isnan().any() and torch.equal(after.output[[0, 2]], expected.output[[0, 2]])
    assert torch.equal(after.state[[first, last]], expected.state[[first, last]])


def test_without_indices_and_without_output():
    call = lazy_call((3, 5, 0), 3, 6)
    pooled, order = call.run(), call.state_batch_indices
    names = ("state", *RINGS, "ring_start", "num_live")
    direct = {**call.arguments(), **{name: getattr(call, name)[order] for name in names}}
    direct |= {"state_batch_indices": None, "output": None}
    assert torch.equal(gated_delta_rule_checkpointing(**direct), pooled.output)


@pytest.mark.parametrize("pad", [-1, -3, 2])
def test_padding_touches_nothing(pad):
    call = lazy_call((3, -1, 6), 3, 6)
    used = set(call.state_batch_indices.tolist())
    number = pad if pad < 0 else next(slot for slot in range(6) if slot not in used)
    call.state_batch_indices[1] = number
    check(replace(call, state_batch_indices=call.state_batch_indices.clone().index_fill_(0, torch.tensor(1), -1)))
    after = call.run(pad_slot_id=number)
    expected = call.run(state_batch_indices=call.state_batch_indices.clone().index_fill_(0, torch.tensor(1), -1))
    for name in WRITTEN:
        assert torch.equal(as_bytes(getattr(after, name)), as_bytes(getattr(expected, name)))


def refuse(call, message, error=ValueError, **changes):
    before = {name: as_bytes(getattr(call, name)) for name in WRITTEN}
    with pytest.raises(error, match=re.escape(message)):
        gated_delta_rule_checkpointing(**{**call.arguments(), **changes})
    for name, memory in before.items():
        assert torch.equal(as_bytes(getattr(call, name)), memory), f"{name} was written before the error"


def test_refused_tensors():
    call = lazy_call((3, 6), 3, 7)
    for name, tensor in call.arguments().items():
        if isinstance(tensor, Tensor):
            refuse(call, f"{name}: expected shape [", **{name: tensor.unsqueeze(0)})
            refuse(call, f"{name}: expected dtype ", **{name: torch.empty_like(tensor, dtype=torch.complex64)})
            refuse(call, f"{name}: expected a torch.Tensor, got list", TypeError, **{name: [1]})
            if name != "state":
                refuse(call, f"{name}: expected device cpu, got meta", **{name: tensor.to("meta")})
    for name in WRITTEN:
        tensor = getattr(call, name)
        refuse(call, f"{name}: expected axes ", **{name: torch.stack((tensor, tensor), -1)[..., 0]})
        refuse(call, f"{name}: expected elements with memory of", **{name: tensor[:1].expand(tensor.shape)})
    refuse(call, "k_cache: expected dtype torch.float32, got torch.float16", k_cache=call.k_cache.half())
    refuse(
        call, "g_cache: expected shape [slots=5, HV=6, ring_len=10], got", g_cache=call.g_cache[..., :9].contiguous()
    )


def test_refused_numbers_and_values():
    call = lazy_call((3, 6), 3, 7)
    refuse(call, "max_window: expected 1 <= max_window <= 64, got 0", max_window=0)
    refuse(call, "max_window: expected an int, got 7.0", TypeError, max_window=7.0)
    refuse(call, "q: expected T <= window=2 (max_window), got T=3", max_window=2)
    refuse(call, "v_cache: expected ring_len >= window + T = 8 + 3 rows, got ring_len=10", max_window=8)
    refuse(call, "T: expected 1 <= T <= 16 (tokens in q), got 17", **{
        name: getattr(lazy_call((3, 6), 17, 20), name) for name in ("q", "k", "v", "a", "b", "output")
    })  # fmt: skip
    refuse(call, "backend: expected one of auto, simt, tensor_core, got 'fast'", backend="fast")
    refuse(call, "backend: expected a string, got None", TypeError, backend=None)
    refuse(call, "scale: expected a number or None, got True", TypeError, scale=True)
    refuse(call, "use_qk_l2norm: expected a bool, got 1", TypeError, use_qk_l2norm=1)
    refuse(call, "pad_slot_id: expected an int, got None", TypeError, pad_slot_id=None)
    message = "state_batch_indices: expected values below slots=5, got 5 at [1]"
    refuse(call, message, state_batch_indices=torch.tensor([-1, 5]))
    slot = int(call.state_batch_indices[0])
    message = f"state_batch_indices: expected distinct slots, got {slot} more than once"
    refuse(call, message, state_batch_indices=torch.tensor([slot, slot]))
    message = f"ring_start: expected 0 <= ring_start < ring_len=10, got 10 at slot {slot} of [0]"
    refuse(call, message, ring_start=call.ring_start.clone().index_fill_(0, torch.tensor(slot), 10))
    message = f"num_live: expected 0 <= num_live <= window=7, got 8 at slot {slot} of [0]"
    refuse(call, message, num_live=call.num_live.clone().index_fill_(0, torch.tensor(slot), 8))
    few = {name: getattr(call, name)[:1] for name in ("state", *RINGS, "ring_start", "num_live")}
    message = "state_batch_indices: expected indices for batch=2 > slots=1, got None"
    refuse(call, message, state_batch_indices=None, **few)
    meta = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in call.arguments().items()}
    with pytest.raises(NotImplementedError, match="gdn_decode: tensors on device 'meta'"):
        gated_delta_rule_checkpointing(**meta)


def test_the_op_of_torch_library():
    call = lazy_call((2, 6), 3, 7)
    call = replace(call, **{name: getattr(call, name).nan_to_num(0.0) for name in WRITTEN})
    arguments = handed_to(lazy, "_op", lambda: gated_delta_rule_checkpointing(**call.arguments()))
    op = torch.ops.replayssm.gated_delta_rule_checkpointing.default
    torch.library.opcheck(op, arguments, test_utils=OPCHECK)
    assert {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write} == set(WRITTEN)
    expected, traced = call.run(), replace(call, **{name: getattr(call, name).clone() for name in WRITTEN})
    step = torch.compile(lambda a: gated_delta_rule_checkpointing(**a), backend="aot_eager", fullgraph=True)
    assert torch.equal(step(traced.arguments()), expected.output)
    assert torch.equal(traced.state, expected.state)
