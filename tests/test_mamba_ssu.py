"""checkpointing_ssu on the CPU against the fp64 token loop, on memory that is NaN wherever nobody may read."""

from dataclasses import replace

import pytest
import torch

from replayssm.mamba import checkpointing_ssu
from replayssm.rounding import decode, encode, noise_bits
from replayssm.testing import (
    STATE_DTYPES,
    as_bytes,
    assert_close,
    output_tolerance,
    poisoned,
    random_ssu_call,
    state_tolerance,
    using,
)

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(call):
    assert checkpointing_ssu(**call.arguments()) is call.out
    return call


def run_both(call):
    """The call on the CPU path and on the reference, each on its own memory."""
    actual, expected = call.clone(), call.clone()
    run(actual)
    with using("reference"):
        run(expected)
    return actual, expected


def check_against_reference(call):
    actual, expected = run_both(call)
    before = call.memory()
    for row, slot in enumerate(call.state_batch_indices.tolist()):
        if slot < 0:
            assert actual.out[row].isnan().all()
            continue
        tolerance = output_tolerance(call.out.dtype, call.state.dtype)
        assert_close(f"out of request {row}", actual.out[row], expected.out[row], tolerance)
        states = [
            decode(c.state[slot], None if c.state_scale is None else c.state_scale[slot]) for c in (actual, expected)
        ]
        assert_close(f"state of request {row}", *states, state_tolerance(call.state.dtype))
        if call.prev_num_accepted_tokens[slot] + call.x.shape[1] <= call.max_window:
            assert torch.equal(as_bytes(actual.state[slot]), as_bytes(call.state[slot])), "a step without flush wrote"
    for name in ("x_cache", "B_cache"):
        assert torch.equal(as_bytes(getattr(actual, name)), as_bytes(getattr(expected, name)))
    dt, expected_dt = actual.dt_cache, expected.dt_cache
    assert torch.equal(dt.isnan(), expected_dt.isnan())
    assert torch.allclose(dt.nan_to_num(), expected_dt.nan_to_num(), rtol=1e-6, atol=0)
    owned = set(call.state_batch_indices.tolist())
    for slot in set(range(call.state.shape[0])) - owned:
        for name, after in actual.memory().items():
            if name != "out":
                step = after.numel() // call.state.shape[0]
                rows = slice(slot * step, (slot + 1) * step)
                assert torch.equal(after.flatten()[rows], before[name].flatten()[rows]), f"{name} of a foreign slot"
    return actual


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_mixed_batch_of_every_dtype(state_dtype, dtype):
    # window - T = 5: no live rows, below the edge, at it, one past it, full; and a padded request.
    check_against_reference(
        random_ssu_call(live=(0, 3, 5, 6, -1, 8), seq_len=3, window=8, state_dtype=state_dtype, dtype=dtype)
    )


@pytest.mark.parametrize("start", range(13))
def test_ring_wraps_at_every_row(start):
    for live in (0, 4, 6, 9):
        check_against_reference(random_ssu_call(live=(live,), seq_len=4, window=9, ring_start=(start,), seed=live))


@pytest.mark.parametrize(("live", "flushes"), [(0, False), (10, False), (11, True), (12, True), (16, True)])
def test_flush_exactly_past_the_edge(live, flushes):
    call = random_ssu_call(live=(live,), seq_len=6, window=16, spare_rows=3)
    slot = int(call.state_batch_indices[0])
    after = check_against_reference(call)
    assert torch.equal(after.state[slot], call.state[slot]) is not flushes


@pytest.mark.parametrize(
    ("seq_len", "window", "live"), [(1, 1, 0), (1, 1, 1), (1, 16, 16), (7, 7, 0), (7, 7, 7), (64, 64, 64), (2, 64, 62)]
)
def test_extreme_lengths(seq_len, window, live):
    check_against_reference(random_ssu_call(live=(live, 0), seq_len=seq_len, window=window))


@pytest.mark.parametrize(("nheads", "ngroups"), [(1, 1), (5, 1), (6, 3), (4, 4)])
@pytest.mark.parametrize(("headdim", "dstate"), [(1, 3), (64, 16), (3, 128), (80, 96)])
def test_sizes(nheads, ngroups, headdim, dstate):
    sizes = {"nheads": nheads, "ngroups": ngroups, "headdim": headdim, "dstate": dstate}
    check_against_reference(random_ssu_call(live=(2, 4), seq_len=3, window=5, **sizes))


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "dt_softplus"])
def test_options_may_be_absent(absent):
    call = random_ssu_call(live=(2, 5), seq_len=2, window=5)
    if absent == "dt_softplus":
        positive = call.dt[..., :1].abs().expand_as(call.dt)
        call = replace(call, dt_softplus=False, dt_bias=None, dt=positive)
    else:
        call = replace(call, **{absent: None})
    check_against_reference(call)


@pytest.mark.parametrize(("lower", "upper"), [(0.25, 0.6), (0.0, 0.6), (0.25, torch.inf)])
def test_dt_limit_comes_last_and_is_what_the_ring_keeps(lower, upper):
    call = random_ssu_call(live=(2,), seq_len=3, window=8)
    call = replace(call, options={"dt_limit": (lower, upper)})
    after = check_against_reference(call)
    slot = int(call.state_batch_indices[0])
    rows = (call.ring_start[slot] + 2 + torch.arange(3)) % call.x_cache.shape[2]
    written = after.dt_cache[slot][:, rows]
    assert lower == 0.0 or written.min() == lower
    assert upper == torch.inf or written.max() == torch.tensor(upper)


def test_softplus_is_the_identity_above_20_and_survives_large_negative_numbers():
    call = random_ssu_call(live=(0,), seq_len=3, window=8)
    dt = torch.tensor([-200.0, 20.5, 90.0]).view(1, 3, 1, 1).expand(call.dt.shape)
    after = run(replace(call, dt=dt, dt_bias=None).clone())
    slot, start = int(call.state_batch_indices[0]), int(call.ring_start[call.state_batch_indices[0]])
    rows = (start + torch.arange(3)) % call.x_cache.shape[2]
    assert after.dt_cache[slot][0, rows].tolist() == [0.0, 20.5, 90.0]
    assert after.out.isfinite().all()


def test_exponents_of_a_long_window_of_long_steps_keep_their_digits():
    call = random_ssu_call(live=(50,), seq_len=4, window=64)
    call.dt_cache[call.state_batch_indices] += 300.0
    A = torch.full((6, 1, 1), -0.01).expand(call.A.shape)
    check_against_reference(replace(call, A=A))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_the_small_arguments(index_dtype, dtype):
    call = random_ssu_call(live=(2, 6), seq_len=3, window=6)
    call = replace(
        call,
        state_batch_indices=call.state_batch_indices.to(index_dtype),
        dt=call.dt[..., :1].to(dtype).expand_as(call.dt), A=call.A[:, :1, :1].to(dtype).expand_as(call.A),
        D=call.D[:, :1].to(dtype).expand_as(call.D), dt_bias=call.dt_bias[:, :1].to(dtype).expand_as(call.dt_bias),
    )  # fmt: skip
    check_against_reference(call)


def test_without_indices_request_b_owns_slot_b():
    call = random_ssu_call(live=(3, 5, 0), seq_len=3, window=6)
    order = call.state_batch_indices
    names = ("state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens")
    pooled = run(call.clone())
    direct = replace(call, **{name: getattr(call, name)[order] for name in names}, state_batch_indices=None)
    assert torch.equal(run(direct.clone()).out, pooled.out)


def test_out_is_allocated_when_absent():
    call = random_ssu_call(live=(3, 5), seq_len=3, window=6)
    expected = run(call.clone()).out
    permuted = call.x.transpose(0, 1).contiguous().transpose(0, 1)
    out = checkpointing_ssu(**{**call.clone().arguments(), "x": permuted, "out": None})
    assert torch.equal(out, expected) and out.is_contiguous()


@pytest.mark.parametrize("pad", [-1, -3, -(2**31), 2])  # -3 would be a slot, counted from the end
def test_padding_touches_nothing(pad):
    call = random_ssu_call(live=(3, -1, 6), seq_len=3, window=6)
    indices = call.state_batch_indices.clone()
    used = set(indices.tolist())
    indices[1] = pad if pad < 0 else next(slot for slot in range(6) if slot not in used)
    call = replace(call, state_batch_indices=indices, options={} if pad < 0 else {"pad_slot_id": int(indices[1])})
    after = run(call.clone())
    expected = run(replace(call, state_batch_indices=indices.clone().index_fill_(0, torch.tensor(1), -1)).clone())
    assert after.out[1].isnan().all()
    for name, memory in after.memory().items():
        assert torch.equal(memory, expected.memory()[name])


def test_empty_batch_and_all_padding():
    call = random_ssu_call(live=(-1, -1), seq_len=2, window=4)
    before = call.memory()
    run(call)
    assert all(torch.equal(before[name], after) for name, after in call.memory().items())
    empty = random_ssu_call(live=(), seq_len=2, window=4)
    assert run(empty).out.shape == (0, 2, 6, 5)


def test_rejected_rows_may_hold_nan():
    """Rows that an earlier step wrote and that were not accepted are overwritten or dead, never read."""
    call = random_ssu_call(live=(2,), seq_len=4, window=8)
    expected = run(call.clone())
    slot = int(call.state_batch_indices[0])
    rows = (call.ring_start[slot] + 2 + torch.arange(call.x_cache.shape[2] - 2)) % call.x_cache.shape[2]
    dirty = call.clone()
    dirty.x_cache[slot][:, rows], dirty.B_cache[slot][:, rows] = torch.inf, -torch.inf
    assert torch.equal(run(dirty).out, expected.out)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_nan_in_one_request_leaves_the_others_alone(state_dtype):
    call = random_ssu_call(live=(3, 6, 1), seq_len=3, window=6, state_dtype=state_dtype)
    expected = run(call.clone())
    poison = call.clone()
    bad, first, last = call.state_batch_indices.tolist()[1], *call.state_batch_indices.tolist()[::2]
    poison.x_cache[bad] = torch.nan
    poison.dt_cache[bad] = torch.nan
    poison.x[1] = torch.nan
    run(poison)
    assert poison.out[1].isnan().any()
    for row, slot in ((0, first), (2, last)):
        assert torch.equal(poison.out[row], expected.out[row])
        assert torch.equal(as_bytes(poison.state[slot]), as_bytes(expected.state[slot]))
        assert torch.equal(as_bytes(poison.x_cache[slot]), as_bytes(expected.x_cache[slot]))


@pytest.mark.parametrize(("state_dtype", "dtype"), [(torch.float32, torch.float32), (torch.int8, torch.bfloat16)])
@pytest.mark.parametrize(
    "sizes", [{}, {"nheads": 16, "ngroups": 1, "headdim": 32, "dstate": 64}, {"ngroups": 3, "dstate": 33}]
)
def test_a_request_has_the_same_bits_in_any_batch_and_order(state_dtype, dtype, sizes):
    call = random_ssu_call(live=(5, 0, 7, 8, 3), seq_len=4, window=8, state_dtype=state_dtype, dtype=dtype, **sizes)
    whole = run(call.clone())
    for rows in ([0], [3], [2, 4], [4, 3, 2, 1, 0]):
        part = call.rows(rows)
        run(part)
        assert torch.equal(part.out, whole.out[rows])
        for slot in part.state_batch_indices.tolist():
            for name in ("state", "x_cache", "B_cache", "dt_cache"):
                assert torch.equal(as_bytes(getattr(part, name)[slot]), as_bytes(getattr(whole, name)[slot])), name


@pytest.mark.parametrize("state_dtype", STATE_DTYPES[1:])
@pytest.mark.parametrize("rounds", [2, 10])
def test_stochastic_states_have_the_noise_of_seed_and_slot(state_dtype, rounds):
    call = random_ssu_call(live=(5, 8, 7), seq_len=4, window=8, state_dtype=state_dtype)
    seed = (7 << 32) | 5
    rounded = run(replace(call.clone(), options={"rand_seed": torch.tensor([seed]), "philox_rounds": rounds}))
    exact = run(replace(call.clone(), state=decode(call.state, call.state_scale), state_scale=None))
    for slot in call.state_batch_indices.tolist():
        noise = noise_bits(seed, slot, tuple(call.state.shape[1:]), rounds)
        codes, scale = encode(exact.state[slot], state_dtype, noise)
        assert torch.equal(as_bytes(rounded.state[slot]), as_bytes(codes))
        assert scale is None or torch.equal(rounded.state_scale[slot], scale)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_varlen_equals_the_padded_batch_bit_for_bit(state_dtype):
    lengths, live = [3, 1, 4, 2, 4, 0], (0, 5, 8, 7, 6, 2)
    call = random_ssu_call(live=live, seq_len=4, window=8, state_dtype=state_dtype, dtype=torch.bfloat16)
    keep = [row * 4 + i for row, length in enumerate(lengths) for i in range(length)]
    packed = {name: getattr(call, name).flatten(0, 1)[keep][None] for name in ("x", "B", "C", "z", "out")}
    dt = call.dt[..., :1].flatten(0, 1)[keep][None].expand(1, len(keep), 6, 5)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    varlen = replace(call.clone(), **packed, dt=dt, options={"cu_seqlens": bounds, "max_seqlen": 4})
    run(varlen)
    for row, length in enumerate(lengths):
        slot = int(call.state_batch_indices[row])
        rows = slice(int(bounds[row]), int(bounds[row + 1]))
        count, start = live[row], int(call.ring_start[slot])
        flushes = count + length > 8
        padded = run(call.clone())
        if flushes == (count + 4 > 8):
            assert torch.equal(varlen.out[0, rows], padded.out[row, :length])
            assert torch.equal(as_bytes(varlen.state[slot]), as_bytes(padded.state[slot]))
        assert torch.equal(as_bytes(varlen.state[slot]), as_bytes(call.state[slot])) is not flushes
        written = (start + count + torch.arange(length)) % 12
        for name in ("x_cache", "B_cache", "dt_cache"):
            ring, full, before = (getattr(c, name)[slot] for c in (varlen, padded, call))
            assert torch.equal(ring[:, written], full[:, written])
            others = [r for r in range(12) if r not in written.tolist()]
            assert torch.equal(as_bytes(ring[:, others]), as_bytes(before[:, others]))


def test_varlen_tokens_outside_every_request_stay():
    call = random_ssu_call(live=(3, 2), seq_len=3, window=6)
    token = {name: getattr(call, name).flatten(0, 1)[None] for name in ("x", "B", "C", "z", "out")}
    dt = call.dt[..., :1].flatten(0, 1)[None].expand(1, 6, 6, 5)
    bounds = torch.tensor([1, 3, 5], dtype=torch.int32)
    varlen = run(replace(call, **token, dt=dt, options={"cu_seqlens": bounds, "max_seqlen": 3}))
    assert varlen.out[0, [0, 5]].isnan().all() and varlen.out[0, 1:5].isfinite().all()


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8])
def test_strided_pools_and_trackers_equal_contiguous_ones(state_dtype):
    call = random_ssu_call(live=(3, 6, 2), seq_len=3, window=6, state_dtype=state_dtype)
    expected = run(call.clone())

    def spread(tensor, *, axis=0):
        """The same numbers with a gap of foreign memory after each element of an axis."""
        shape = list(tensor.shape)
        shape[axis] *= 3
        wide = poisoned(tuple(shape), tensor.dtype) if tensor.dtype != torch.int32 else torch.full(shape, -99).int()
        view = wide[::3] if axis == 0 else wide[:, ::3]
        view.copy_(tensor)
        return view

    pools = ("state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens")
    strided = {name: spread(getattr(call, name)) for name in pools}
    strided |= {name: spread(getattr(call, name), axis=1) for name in ("x", "B", "C", "z", "out")}
    if call.state_scale is not None:
        strided["state_scale"] = spread(call.state_scale)
    wide_dt = spread(call.dt[..., 0].contiguous(), axis=1)
    after = run(replace(call, **strided, dt=wide_dt[..., None].expand(call.dt.shape)))
    for name, memory in after.memory().items():
        assert torch.equal(memory, expected.memory()[name]), name
    assert after.state.untyped_storage().nbytes() >= 3 * call.state.nbytes


@pytest.mark.parametrize(
    ("nheads", "ngroups", "headdim", "dstate", "seq_len"),
    [(8, 2, 8, 33, 1), (8, 2, 8, 64, 3), (8, 1, 8, 80, 1), (12, 3, 8, 7, 2), (2, 1, 1, 19, 1)],
)
def test_bits_depend_neither_on_where_memory_starts_nor_on_the_cursor(nheads, ngroups, headdim, dstate, seq_len):
    """Products are summed differently off the multiples of 16 bytes, where slots, rows and views may start."""
    call = random_ssu_call(
        live=(12, 3, 16, 12, 15), seq_len=seq_len, window=16, nheads=nheads, ngroups=ngroups, headdim=headdim,
        dstate=dstate, ring_start=(0, 1, 2, 3, 4),
    )  # fmt: skip
    expected = run(call.clone())
    slots, names = call.state_batch_indices, ("state", "x_cache", "B_cache", "dt_cache")
    for shift in (1, 2, 3):

        def moved(tensor, shift=shift):
            wide = poisoned((tensor.numel() + shift,), tensor.dtype)
            return wide[shift:].view(tensor.shape).copy_(tensor)

        tensors = {name: moved(getattr(call, name)) for name in (*names, "x", "B", "C", "z", "out")}
        for name in names[1:]:
            tensors[name].copy_(tensors[name].roll(shift, 2))
        start = (call.ring_start + shift) % call.x_cache.shape[2]
        after = run(replace(call, **tensors, ring_start=start))
        assert torch.equal(after.out, expected.out)
        assert torch.equal(as_bytes(after.state[slots]), as_bytes(expected.state[slots]))


def test_slots_beyond_two_gigabytes_of_elements_are_addressed_with_64_bits():
    """The slot stride is free: a view of a huge, never touched reservation must not overflow an offset."""
    call = random_ssu_call(live=(6,), seq_len=3, window=6)
    slot = int(call.state_batch_indices[0])
    per_slot = call.state[0].numel()
    stride = (1 << 31) // 5
    memory = torch.empty(5 * stride + per_slot + 1, dtype=torch.bfloat16)  # reserved by the system, not filled
    state = memory.as_strided((6, *call.state.shape[1:]), (stride, *call.state.stride()[1:]))[1:]
    live = torch.zeros(5, dtype=torch.int32)
    live[4] = 6
    start = torch.zeros(5, dtype=torch.int32)
    state[4] = call.state[slot].bfloat16()
    rings = {}
    for name in ("x_cache", "B_cache", "dt_cache"):
        ring = getattr(call, name)[slot].roll(-int(call.ring_start[slot]), 1)
        rings[name] = ring[None].expand(5, *ring.shape).clone()
    far = replace(
        call, state=state, **rings, ring_start=start, prev_num_accepted_tokens=live,
        state_batch_indices=torch.tensor([4]), out=call.out.clone(),
    )  # fmt: skip
    near = replace(
        far, state=state[4:].clone(), **{name: ring[4:].clone() for name, ring in rings.items()},
        ring_start=start[4:], prev_num_accepted_tokens=live[4:], state_batch_indices=torch.tensor([0]),
        out=call.out.clone(),
    )  # fmt: skip
    assert torch.equal(run(far).out, run(near).out)
    assert torch.equal(far.state[4], near.state[0])
