"""The convolution on both rungs: values, bits, what it writes, what it must not read."""

import inspect
import itertools

import pytest
import torch
from torch.library import opcheck

from replayssm.conv import causal_conv1d_replay, cpu, reference

CHANNELS, SLOTS = 11, 5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
NAN = float("nan")


def make(width=4, tokens=3, batch=2, dtype=torch.float32, conv_len=None, channels=CHANNELS, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    conv_len = conv_len or width - 1 + tokens
    return {
        "rows": random(SLOTS, conv_len, channels).to(dtype),
        "conv_start": torch.randint(0, conv_len, (SLOTS,), generator=generator, dtype=torch.int32),
        "x": random(batch, tokens, channels).to(dtype),
        "weight": random(channels, width),
        "bias": random(channels) if bias else None,
    }


def copied(case):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in case.items()}


def truth(case, activation, slots, cu_seqlens=None):
    """The reference rung on a copy in FP64."""
    case = copied(case)
    wide = {name: None if case[name] is None else case[name].double() for name in ("rows", "x", "weight", "bias")}
    out = torch.full_like(wide["x"], NAN)
    reference.causal_conv1d_replay(
        wide["rows"], case["conv_start"], wide["x"], wide["weight"], wide["bias"], activation, slots, -1,
        cu_seqlens, None, out,
    )  # fmt: skip
    return out, wide["rows"]


def history_of(case, slot, width):
    """The slot's last width - 1 inputs, oldest first."""
    rows, start = case["rows"][slot], int(case["conv_start"][slot])
    return torch.stack([rows[(start + j) % rows.shape[0]] for j in range(width - 1)])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width, tokens, conv_len, bias, activation", [
    (2, 1, None, True, None), (3, 5, 7, False, "silu"), (4, 3, 9, True, "silu"), (5, 8, None, False, None),
    (4, 1, 11, True, "silu"),
])  # fmt: skip
def test_against_the_reference(dtype, width, tokens, conv_len, bias, activation):
    case = make(width, tokens, 2, dtype, conv_len, bias=bias)
    slots = torch.tensor([3, 1])
    expected, expected_rows = truth(case, activation, slots)
    out = causal_conv1d_replay(**case, activation=activation, state_batch_indices=slots)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    assert out.dtype == dtype
    assert torch.equal(case["rows"].double(), expected_rows)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_against_torch_over_a_whole_sequence(activation):
    """Steps of changing length with rollbacks equal one convolution over the tokens that were kept."""
    width, most, channels = 4, 5, 6
    generator = torch.Generator().manual_seed(3)
    rows, start = torch.zeros(2, width - 1 + most, channels), torch.zeros(2, dtype=torch.int32)
    weight, bias = torch.randn(channels, width, generator=generator), torch.randn(channels, generator=generator)
    kept, outputs = [], []
    for tokens, accepted in [(5, 2), (1, 1), (4, 0), (3, 3), (5, 5), (2, 1), (5, 1), (1, 0), (4, 4)]:
        x = torch.randn(1, tokens, channels, generator=generator)
        slots = torch.tensor([1])
        out = causal_conv1d_replay(rows, start, x, weight, bias, activation=activation, state_batch_indices=slots)
        start[1] = (start[1] + accepted) % rows.shape[1]
        kept.append(x[0, :accepted])
        outputs.append(out[0, :accepted])
    sequence = torch.cat(kept).t().unsqueeze(0)
    padded = torch.nn.functional.pad(sequence, (width - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)[0].t()
    if activation == "silu":
        expected = torch.nn.functional.silu(expected)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accepted", range(4))
def test_next_output_depends_on_the_accepted_tokens_only(accepted):
    """Width 3, three tokens verified: the next one sees the two inputs before it, whatever was rejected."""
    case = make(3, 3, 1, conv_len=5)
    slots = torch.tensor([2])
    sequence = torch.cat([history_of(case, 2, 3), case["x"][0, :accepted]])
    causal_conv1d_replay(**case, state_batch_indices=slots)
    case["conv_start"][2] = (case["conv_start"][2] + accepted) % 5
    nxt = torch.randn(1, 1, CHANNELS)
    out = causal_conv1d_replay(**(case | {"x": nxt}), state_batch_indices=slots)
    window = torch.cat([sequence, nxt[0]])[-3:]
    torch.testing.assert_close(out[0, 0], case["bias"] + (window.t() * case["weight"]).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("channels", [1, 11, 33])
def test_bits_depend_on_no_split_batch_or_order(dtype, channels):
    case = make(4, 6, 3, dtype, channels=channels)
    slots = torch.tensor([4, 0, 2])
    whole = causal_conv1d_replay(**copied(case), activation="silu", state_batch_indices=slots)
    for first in range(1, 6):
        split = copied(case)
        parts = []
        for own in (slice(0, first), slice(first, 6)):
            part = split | {"x": split["x"][:, own]}
            parts.append(causal_conv1d_replay(**part, activation="silu", state_batch_indices=slots))
            split["conv_start"] = (split["conv_start"] + first) % split["rows"].shape[1]
        assert torch.equal(torch.cat(parts, 1), whole), first
    for order in itertools.permutations(range(3)):
        order = list(order)
        one = causal_conv1d_replay(
            **(copied(case) | {"x": case["x"][order]}), activation="silu", state_batch_indices=slots[order]
        )
        assert torch.equal(one, whole[order])
    for b in range(3):
        alone = copied(case) | {"x": case["x"][b : b + 1]}
        assert torch.equal(
            causal_conv1d_replay(**alone, activation="silu", state_batch_indices=slots[b : b + 1])[0], whole[b]
        )


def test_bits_of_weights_stored_by_tap_are_the_same():
    case = make()
    by_tap = case["weight"].t().contiguous().t()
    assert by_tap.stride() == (1, CHANNELS)
    assert torch.equal(
        causal_conv1d_replay(**copied(case)), causal_conv1d_replay(**(copied(case) | {"weight": by_tap}))
    )


def test_the_sum_begins_with_the_bias_and_the_oldest_tap():
    case = make(tokens=1, batch=1)
    window = torch.cat([history_of(case, 0, 4), case["x"][0]])
    expected = case["bias"].clone()
    for row, tap in zip(window, case["weight"].t(), strict=True):
        expected += row * tap
    assert torch.equal(causal_conv1d_replay(**case)[0, 0], expected)


def test_second_call_without_a_commit_repeats_itself():
    case = make(conv_len=8)
    first = causal_conv1d_replay(**case)
    rows, start = case["rows"].clone(), case["conv_start"].clone()
    assert torch.equal(causal_conv1d_replay(**case), first)
    assert torch.equal(case["rows"], rows)
    assert torch.equal(case["conv_start"], start)


@pytest.mark.parametrize("start", range(9))
def test_only_the_new_rows_are_written_at_every_wrap(start):
    case = make(4, 3, 1, conv_len=9)
    case["conv_start"][:] = start
    before = case["rows"].clone()
    causal_conv1d_replay(**case, state_batch_indices=torch.tensor([3]))
    new = [(start + 3 + i) % 9 for i in range(3)]
    assert torch.equal(case["rows"][3, new], case["x"][0])
    before[3, new] = case["rows"][3, new]
    assert torch.equal(case["rows"], before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_poison_and_padding(dtype):
    """Dead rows, other slots and padded inputs hold NaN; padded outputs keep what the caller put there."""
    case = make(4, 2, 4, conv_len=7)
    clean = causal_conv1d_replay(
        **(copied(case) | {"x": case["x"][[0, 2]]}), state_batch_indices=torch.tensor([3, 0], dtype=dtype)
    )
    poisoned = torch.full_like(case["rows"], NAN)
    for slot in (3, 0):
        for j in range(3):
            row = (int(case["conv_start"][slot]) + j) % 7
            poisoned[slot, row] = case["rows"][slot, row]
    case |= {"rows": poisoned, "x": case["x"].clone()}
    case["x"][[1, 3]] = NAN
    out = torch.full((4, 2, CHANNELS), -7.0)
    slots = torch.tensor([3, -1, 0, 2], dtype=dtype)
    before = poisoned.clone()
    assert causal_conv1d_replay(**case, state_batch_indices=slots, pad_slot_id=2, out=out) is out
    assert torch.equal(out[[0, 2]], clean)
    assert bool((out[[1, 3]] == -7.0).all())
    assert torch.equal(case["rows"][[1, 2, 4]].isnan(), before[[1, 2, 4]].isnan())
    assert int(case["rows"][3].isnan().any(-1).sum()) == 7 - 3 - 2


def test_one_request_with_nan_does_not_touch_another():
    case = make(batch=3)
    clean = causal_conv1d_replay(**copied(case), activation="silu")
    case["x"][1] = NAN
    out = causal_conv1d_replay(**case, activation="silu")
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert bool(out[1].isnan().all())


@pytest.mark.parametrize("pad", [-1, -3, -(2**31)])  # -3 would be a slot, counted from the end
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_of_an_allocated_output_is_zero(pad, dtype):
    case = make(batch=3)
    before = case["rows"].clone()
    out = causal_conv1d_replay(**case, state_batch_indices=torch.tensor([pad, 1, pad], dtype=dtype))
    assert bool((out[[0, 2]] == 0).all())
    assert bool((out[1] != 0).any())
    others = [0, 2, 3, 4]
    assert torch.equal(case["rows"][others], before[others])


@pytest.mark.parametrize("lengths", [[2, 4, 0, 1], [3, 3, 3, 3], [0, 0, 4, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
def test_varlen_has_the_bits_of_dense_calls(lengths):
    total, slots = sum(lengths) + 2, torch.tensor([4, 1, -1, 2])
    case = make(3, 4, 1, conv_len=7)
    case["x"] = torch.randn(1, total, CHANNELS)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    single = copied(case)
    out = torch.full_like(case["x"], -7.0)
    causal_conv1d_replay(**case, activation="silu", state_batch_indices=slots, cu_seqlens=bounds, max_seqlen=4, out=out)
    expected = torch.full_like(out, -7.0)
    for b, slot in enumerate(slots.tolist()):
        own = slice(int(bounds[b]), int(bounds[b + 1]))
        if slot >= 0 and lengths[b]:
            one = single | {"x": single["x"][:, own]}
            expected[:, own] = causal_conv1d_replay(**one, activation="silu", state_batch_indices=torch.tensor([slot]))
    assert torch.equal(out, expected)
    assert torch.equal(case["rows"], single["rows"])
    checked, rows = truth(make(3, 4, 1, conv_len=7) | {"x": case["x"]}, "silu", slots, bounds)
    owned = ~checked.isnan()
    torch.testing.assert_close(out[owned].double(), checked[owned], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case["rows"].double(), rows)


@pytest.mark.parametrize("pitch", [4 * 6 * CHANNELS, 6 * CHANNELS + 5])
def test_strided_pool_and_strided_tokens(pitch):
    """The update lands in the memory that the pool is a view of, also when slots do not begin at a whole row."""
    case = make(4, 3, 2)
    memory = torch.full((pitch * SLOTS,), NAN)
    rows = memory.as_strided((SLOTS, 6, CHANNELS), (pitch, CHANNELS, 1))
    rows.copy_(case["rows"])
    x = torch.full((2, 3, 3, CHANNELS), NAN)[:, :, 1]
    x.copy_(case["x"])
    out = torch.full((3, 2, CHANNELS), NAN).transpose(0, 1)
    expected = causal_conv1d_replay(**case, activation="silu")
    causal_conv1d_replay(**(case | {"rows": rows, "x": x}), activation="silu", out=out)
    assert torch.equal(out, expected)
    assert torch.equal(rows, case["rows"])
    assert int(memory.isnan().sum()) == memory.numel() - rows.numel()


def test_no_tokens():
    case = make() | {"x": torch.empty(2, 0, CHANNELS)}
    before = case["rows"].clone()
    assert causal_conv1d_replay(**case).shape == (2, 0, CHANNELS)
    assert torch.equal(case["rows"], before)


def test_opcheck_and_compile():
    case = make(conv_len=8)
    slots = torch.tensor([2, 4])
    args = (*case.values(), "silu", slots, -1, None, None, torch.empty_like(case["x"]))
    opcheck(torch.ops.replayssm.causal_conv1d_replay.default, args)
    ragged = (
        case["rows"], case["conv_start"], torch.randn(1, 4, CHANNELS), case["weight"], None, None, slots, -1,
        torch.tensor([0, 3, 4], dtype=torch.int32), 3, torch.empty(1, 4, CHANNELS),
    )  # fmt: skip
    opcheck(torch.ops.replayssm.causal_conv1d_replay.default, ragged)

    compiled = torch.compile(causal_conv1d_replay, backend="aot_eager", fullgraph=True)
    eager = copied(case)
    expected = causal_conv1d_replay(**eager, activation="silu", state_batch_indices=slots)
    assert torch.equal(compiled(**case, activation="silu", state_batch_indices=slots), expected)
    assert torch.equal(case["rows"], eager["rows"])


def test_compiled_for_sizes_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(causal_conv1d_replay, backend="aot_eager", dynamic=True, fullgraph=True)
    for tokens in (3, 2, 4, 1):
        case = make(conv_len=8) | {"x": torch.randn(2, tokens, CHANNELS)}
        eager = copied(case)
        assert torch.equal(compiled(**case), causal_conv1d_replay(**eager))
        assert torch.equal(case["rows"], eager["rows"])


def changed(**replacements):
    return lambda case: case | replacements


INT32 = torch.int32
WRONG = [
    (changed(rows=torch.zeros(5, 5, 11)), r"rows: expected conv_len >= .* = 6 \(width=4, T=3\), got conv_len=5"),
    (changed(rows=torch.zeros(5, 6, 11, dtype=torch.float64)), "rows: expected dtype .*got torch.float64"),
    (changed(rows=torch.zeros(5, 11, 6).transpose(1, 2)), "rows: expected axes 1..2 .*to be packed"),
    (changed(rows=[1.0]), "rows: expected a torch.Tensor, got list"),
    (changed(conv_start=torch.zeros(4, dtype=INT32)), r"conv_start: expected shape \[slots=5\], got \[4\]"),
    (changed(conv_start=torch.zeros(5, dtype=torch.int64)), "conv_start: expected dtype torch.int32, got torch.int64"),
    (changed(x=torch.zeros(2, 3, 12)), r"x: expected shape \[batch, T, channels=11\], got \[2, 3, 12\]"),
    (changed(x=torch.zeros(2, 3, 11, dtype=torch.bfloat16)), "x: expected dtype torch.float32, got torch.bfloat16"),
    (changed(x=torch.zeros(2, 3, 22)[..., ::2]), "x: expected axes 2..2 .*to be packed"),
    (changed(x=torch.zeros(2, 3, 11, device="meta")), "x: expected device cpu, got meta"),
    (changed(weight=torch.zeros(11, 4).to_sparse()), "weight: expected a torch.Tensor with strides"),
    (changed(bias=torch.zeros(11).to_sparse()), "bias: expected a torch.Tensor with strides, .*torch.sparse_coo"),
    (changed(out=torch.zeros(1, 3, 11).expand(2, 3, 11)), "out: expected elements with memory of their own"),
    (changed(rows=torch.zeros(1, 6, 11).expand(5, 6, 11)), "rows: expected elements with memory of their own"),
    (changed(pad_slot_id=1.0), "pad_slot_id: expected an int, got 1.0 of type float"),
    (changed(pad_slot_id=None), "pad_slot_id: expected an int, got None"),
    (
        changed(x=torch.zeros(1, 2, 11), cu_seqlens=torch.tensor([0, 2], dtype=INT32), max_seqlen=2.0),
        "max_seqlen: expected an int, got 2.0",
    ),
    (changed(weight=torch.zeros(11, 6)), "weight: expected 2 <= width <= 5, got width=6"),
    (changed(weight=torch.zeros(11, 1)), "weight: expected 2 <= width <= 5, got width=1"),
    (changed(weight=torch.zeros(11, 4, dtype=torch.float16)), "weight: expected dtype torch.float32"),
    (changed(bias=torch.zeros(10)), r"bias: expected shape \[channels=11\], got \[10\]"),
    (changed(bias=torch.zeros(11, dtype=torch.bfloat16)), "bias: expected dtype torch.float32, got torch.bfloat16"),
    (changed(activation="gelu"), "activation: expected None or 'silu', got 'gelu'"),
    (changed(state_batch_indices=torch.tensor([1.0, 2.0])), "state_batch_indices: expected dtype torch.int32 or"),
    (changed(state_batch_indices=torch.tensor([1])), r"state_batch_indices: expected shape \[batch=2\], got \[1\]"),
    (changed(x=torch.zeros(6, 3, 11)), "state_batch_indices: expected one slot per .*batch=6 exceeds slots=5"),
    (changed(state_batch_indices=torch.tensor([1, 5])), r"state_batch_indices: .*below slots=5, got 5 at \[1\]"),
    (changed(state_batch_indices=torch.tensor([2, 2])), "state_batch_indices: expected distinct slots, got 2"),
    (changed(conv_start=torch.tensor([0, 6, 0, 0, 0], dtype=INT32)), "conv_start: expected .* < conv_len=6, got 6"),
    (changed(out=torch.zeros(2, 3, 11, dtype=torch.bfloat16)), "out: expected dtype torch.float32, got torch.bfloat16"),
    (changed(out=torch.zeros(2, 2, 11)), r"out: expected shape \[batch=2, T=3, channels=11\], got \[2, 2, 11\]"),
    (changed(max_seqlen=3), "max_seqlen: expected together with cu_seqlens"),
    (changed(x=torch.zeros(1, 2, 11), cu_seqlens=torch.tensor([0, 2], dtype=INT32)), "max_seqlen: expected together"),
    (changed(cu_seqlens=torch.tensor([0, 2], dtype=INT32), max_seqlen=2), r"x: expected shape \[1, T, channels=11\]"),
    (
        changed(x=torch.zeros(1, 4, 11), cu_seqlens=torch.tensor([0, 4], dtype=INT32), max_seqlen=3),
        r"cu_seqlens: expected 0 to max_seqlen=3 tokens a request, got 4 at \[0\]",
    ),
    (
        changed(x=torch.zeros(1, 4, 11), cu_seqlens=torch.tensor([0, 2, 1], dtype=INT32), max_seqlen=3),
        r"cu_seqlens: expected 0 to max_seqlen=3 tokens a request, got -1 at \[1\]",
    ),
    (
        changed(x=torch.zeros(1, 4, 11), cu_seqlens=torch.tensor([0, 2, 5], dtype=INT32), max_seqlen=3),
        r"cu_seqlens: expected tokens within x's 4, got 2..5 at \[1\]",
    ),
    (
        changed(x=torch.zeros(1, 9, 11), cu_seqlens=torch.tensor([0, 4], dtype=INT32), max_seqlen=4),
        "rows: expected conv_len >= width - 1 .* = 7",
    ),
]  # fmt: skip


@pytest.mark.parametrize("change, message", WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_arguments_write_nothing(change, message):
    case = change(make())
    before = copied(case)
    with pytest.raises((TypeError, ValueError), match=message):
        causal_conv1d_replay(**case)
    for name in ("rows", "conv_start", "out"):
        if isinstance(case.get(name), torch.Tensor):
            assert torch.equal(case[name], before[name])


def test_an_activation_of_another_type():
    with pytest.raises(TypeError, match="activation: expected None or 'silu', got 3"):
        causal_conv1d_replay(**changed(activation=3)(make()))


def test_other_devices_are_refused_in_plain_words():
    case = {name: value.to("meta") for name, value in make().items()}
    with pytest.raises(NotImplementedError, match=r"replayssm.conv: tensors on device 'meta' are not supported yet"):
        causal_conv1d_replay(**case)


def test_both_rungs_have_one_signature():
    one, other = (inspect.signature(rung.causal_conv1d_replay) for rung in (cpu, reference))
    assert one == other


def test_a_layout_that_passed_does_not_hide_one_that_is_wrong():
    case = make()
    causal_conv1d_replay(**copied(case))
    strided = torch.zeros(2, 3, 2 * CHANNELS)[..., ::2]
    for wrong in ({"activation": "relu"}, {"x": case["x"].half()}, {"x": strided}, {"bias": [0.0] * CHANNELS}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            causal_conv1d_replay(**(copied(case) | wrong))


def test_a_default_device_that_the_caller_has_set_changes_nothing():
    case = make(tokens=9, conv_len=17)  # sizes of no other test
    first, second = copied(case), copied(case)
    with torch.device("meta"):
        out = causal_conv1d_replay(**first)
    assert torch.equal(out, causal_conv1d_replay(**second))
    assert torch.equal(first["rows"], second["rows"])
