"""The Triton kernels under Triton's interpreter: their logic, on a machine without a GPU.

fp32 and fp16 data only: the interpreter's bf16 products are wrong. Bits of bf16 are tested in ``tests/gpu``.
"""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu", allow_module_level=True)
import triton.language as tl  # noqa: E402

from replayssm.conv import causal_conv1d_replay  # noqa: E402
from replayssm.mamba import checkpointing_ssu, replayssm_materialize  # noqa: E402
from replayssm.mamba.kernels import rounding as twins  # noqa: E402
from replayssm.mamba.kernels.common import KINDS  # noqa: E402
from replayssm.mamba.kernels.order import turn  # noqa: E402
from replayssm.rounding import decode, encode, layer_seed, noise_bits  # noqa: E402
from replayssm.testing import as_bytes, random_ssu_call, using  # noqa: E402

f32, f16, int8, fp8 = torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn
STATE_ERROR = {f32: 1e-5, f16: 1e-3, int8: 1e-2, fp8: 4e-2}


def error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("state_dtype", "seq_len", "headdim", "dstate", "with_z"),
    [
        (f32, 1, 5, 11, True),
        (f32, 3, 20, 17, False),
        (f16, 2, 16, 16, True),
        (int8, 4, 7, 9, False),
        (fp8, 1, 9, 24, True),
        (int8, 3, 5, 36, True),  # columns as words of four
        (fp8, 2, 6, 40, False),
    ],
)
def test_step_equals_the_reference(state_dtype, seq_len, headdim, dstate, with_z):
    call = random_ssu_call(
        live=(9, 0, -1, 4, 10 - seq_len), seq_len=seq_len, window=9, nheads=4, headdim=headdim, dstate=dstate,
        spare_rows=1, state_dtype=state_dtype, with_z=with_z,
    )  # fmt: skip
    expected = call.clone()
    with using("reference"):
        checkpointing_ssu(**expected.arguments())
    with using("kernels"):
        checkpointing_ssu(**call.arguments())
    slots = [slot for slot in call.state_batch_indices.tolist() if slot >= 0]
    live = [row for row in range(5) if row != 2]
    # A flush of 8-bit codes: the reference's output reads the rounded state, ours the exact one.
    assert error(call.out[live], expected.out[live]) < max(1e-5, STATE_ERROR[state_dtype])
    decoded = [
        decode(c.state[slots], None if c.state_scale is None else c.state_scale[slots]) for c in (call, expected)
    ]
    assert error(*decoded) < STATE_ERROR[state_dtype]
    for name in ("x_cache", "B_cache"):
        assert torch.equal(call.memory()[name], expected.memory()[name]), name
    assert torch.equal(call.dt_cache.isnan(), expected.dt_cache.isnan())
    assert torch.equal(as_bytes(call.out[2]), as_bytes(expected.out[2]))
    kept = [slots[1], slots[2]]  # no flush: not a bit of these states may move
    assert torch.equal(as_bytes(call.state[kept]), as_bytes(expected.state[kept]))


def column(values):
    """The values as a column of a table, whose other one holds what must not be read."""
    return torch.stack((values, torch.full_like(values, 99)), 1)[:, 0]


def test_rows_of_unequal_length_equal_the_padded_call():
    lengths = [2, 3, 0, 1]
    call = random_ssu_call(live=(4, 6, 5, 7), seq_len=3, window=7, nheads=2, ngroups=1, headdim=6, dstate=10)
    tokens = [(row, t) for row, n in enumerate(lengths) for t in range(n)]
    rows, steps = (torch.tensor(axis) for axis in zip(*tokens, strict=True))
    packed = {name: getattr(call, name)[rows, steps].unsqueeze(0) for name in ("x", "B", "C", "z", "out")}
    dt = call.dt[..., :1][rows, steps].unsqueeze(0).expand(1, -1, 2, 6)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    varlen = replace(call.clone(), **packed, dt=dt, options={"cu_seqlens": column(bounds), "max_seqlen": 3})
    with using("kernels"):
        checkpointing_ssu(**varlen.arguments())
        for row, length in enumerate(lengths):
            if length:
                alone = call.rows([row])
                cut = {name: getattr(alone, name)[:, :length] for name in ("x", "B", "C", "z", "dt")}
                alone = replace(alone, **cut, out=torch.zeros(1, length, 2, 6))
                checkpointing_ssu(**alone.arguments())
                torch.testing.assert_close(
                    varlen.out[0, bounds[row] : bounds[row + 1]], alone.out[0], rtol=1e-5, atol=1e-5
                )


@pytest.mark.parametrize(
    ("dtype", "seed", "dim", "dstate"),
    [
        (f32, None, 6, 12), (f16, 77, 6, 12), (int8, 5, 6, 12), (fp8, None, 6, 12),
        (int8, None, 4, 36), (fp8, 9, 4, 36),  # columns as words of four
    ],
)  # fmt: skip
def test_materialize_equals_a_flush(dtype, seed, dim, dstate):
    count = 5
    call = random_ssu_call(
        live=(count, 3), seq_len=2, window=6, nheads=2, ngroups=1, headdim=dim, dstate=dstate, state_dtype=dtype
    )
    src = call.state_batch_indices.tolist()
    free = next(slot for slot in range(5) if slot not in src)
    flush, dst = call.rows([0]), [free, src[1]]
    for tensor in (flush.state, flush.state_scale, flush.x_cache, flush.B_cache, flush.dt_cache, flush.ring_start):
        if tensor is not None:
            tensor[free] = tensor[src[0]].clone()
    flush.prev_num_accepted_tokens[free] = count
    options = {} if seed is None else {"rand_seed": torch.tensor([layer_seed(seed, 0)])}
    flush = replace(flush, state_batch_indices=torch.tensor([free]), max_window=count, options=options)
    int32 = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    values = call.A[:, 0, 0].contiguous()
    numbers = [n for t in (call.state, call.x_cache, call.B_cache, call.dt_cache) for n in (t.data_ptr(), t.stride(0))]
    scale = [0, 0] if call.state_scale is None else [call.state_scale.data_ptr(), call.state_scale.stride(0)]
    sizes = {"dim": dim, "dstate": dstate, "num_heads": 2, "heads_per_group": 2, "max_window": 6, "ring_buffer_len": 8}
    random = {} if seed is None else {"rand_seed": torch.tensor([seed]), "philox_rounds": 10}
    before = call.memory()
    with using("kernels"):
        checkpointing_ssu(**flush.arguments())
        replayssm_materialize(
            *(torch.tensor([n]) for n in (*numbers, values.data_ptr(), *scale)), int32([src]), int32([dst]),
            int32([int(call.ring_start[slot]) for slot in src]), int32([count, 0]), int32([0, -1]),
            state_dtype=dtype, input_dtype=f32, matrixA_dtype=f32, **sizes, **random,
        )  # fmt: skip
    assert torch.equal(as_bytes(call.state[free]), as_bytes(flush.state[free]))
    if call.state_scale is not None:
        assert torch.equal(as_bytes(call.state_scale[free]), as_bytes(flush.state_scale[free]))
    others = [slot for slot in range(5) if slot != free]
    assert torch.equal(
        as_bytes(call.state[others]), before["state"].view(5, -1)[others].view(as_bytes(call.state[others]).shape)
    )


@pytest.mark.parametrize("dtype", [int8, fp8])
def test_8_bit_codes_may_lie_at_any_address(dtype):
    call = random_ssu_call(
        live=(8, 3), seq_len=2, window=9, nheads=4, headdim=5, dstate=36, spare_rows=1, state_dtype=dtype
    )
    slots, size = call.state.shape[0], call.state[0].numel()
    memory = torch.zeros(1 + slots * (size + 1), dtype=torch.uint8)
    odd = memory.view(dtype).as_strided(call.state.shape, (size + 1, *call.state.stride()[1:]), 1)
    odd.view(torch.uint8).copy_(call.state.view(torch.uint8))
    moved = replace(call.clone(), state=odd)
    with using("kernels"):
        checkpointing_ssu(**call.arguments())
        checkpointing_ssu(**moved.arguments())
    assert torch.equal(as_bytes(moved.out), as_bytes(call.out))
    assert torch.equal(moved.state.view(torch.uint8), call.state.view(torch.uint8))
    assert torch.equal(as_bytes(moved.state_scale), as_bytes(call.state_scale))


@triton.jit
def _turns(out, slots, num_live, batch, LISTED: tl.constexpr, BETWEEN: tl.constexpr):
    for rank in range(batch):
        tl.store(out + rank, turn(rank, batch, slots, 1, -1, num_live, 1, None, 2, 9, LISTED, BETWEEN))


@pytest.mark.parametrize(
    ("live", "between", "expected"),
    [
        ((3, 8, 0, 9, 7, 8, -1, 9, 2, 4, 5, 1), 0, "1357024689ab"),
        ((3, 8, 0, 9, 7, 8, -1, 9, 2, 4, 5, 1), 1, "1032547689ab"),
        ((3, 8, 0, 9, 7, 8, -1, 9, 2, 4, 5, 1), 2, "1023465897ab"),
        ((9, 8, 9, 8, 1), 2, "01234"),
        ((9, 8, 1, 9, 8, 1), 2, "013425"),
    ],
)
def test_requests_that_flush_take_turns_with_others(live, between, expected):
    batch = len(live)
    slots = torch.arange(batch).flip(0)  # -1 as live rows stands for padding
    slots[[row for row, rows in enumerate(live) if rows < 0]] = -1
    num_live = torch.tensor(live, dtype=torch.int32).flip(0).contiguous()
    out = torch.full((batch,), -1, dtype=torch.int32)
    _turns[(1,)](out, slots, num_live, batch, 16, between)
    assert out.tolist() == [int(digit, 16) for digit in expected]


@pytest.mark.parametrize(("seq_len", "varlen"), [(1, False), (4, False), (3, True)])
def test_convolution_equals_the_cpu(seq_len, varlen):
    rows, start = torch.randn(4, 8, 270), torch.tensor([0, 7, 3, 5], dtype=torch.int32)
    x = torch.randn(1 if varlen else 3, 4 if varlen else seq_len, 270)
    options = {"activation": "silu", "state_batch_indices": torch.tensor([2, -1, 1])}
    if varlen:
        options |= {"cu_seqlens": column(torch.tensor([0, 3, 3, 4], dtype=torch.int32)), "max_seqlen": 3}
    outputs, rings = [], []
    for module in ("cpu", "kernels"):
        with using(module):
            rings.append(rows.clone())
            weight = torch.linspace(-1, 1, 270 * 4).view(270, 4)
            outputs.append(causal_conv1d_replay(rings[-1], start, x, weight, weight[:, 0], **options))
    assert torch.equal(rings[0], rings[1])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


@triton.jit
def _encode(values, codes, scales, seed, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    row, column = tl.arange(0, 16), tl.arange(0, 32)
    at = row[:, None] * 32 + column[None, :]
    slot, head = tl.full((), 3, tl.int64), tl.full((), 0, tl.int32)
    noise = twins.noise_tile(tl.load(seed), slot, head, row, 32, 7)
    code, scale = twins.encode(tl.load(values + at), noise, KIND, STOCHASTIC)
    tl.store(codes + at, code)
    tl.store(scales + row, scale)
    tl.store(seed, twins.layer_seed(tl.load(seed), tl.full((), 5, tl.int32)))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, f16, int8, fp8])
def test_rounding_has_the_same_bits(dtype, stochastic):
    if dtype == torch.bfloat16 and not stochastic:
        pytest.skip("the interpreter truncates where the hardware rounds")
    values = torch.randn(16, 32) * torch.exp(4 * torch.randn(16, 32))
    values[3], values[4], values[5] = 0.0, values[4] * 1e-38, values[5] * 1e-6
    number = -987654321987
    noise = noise_bits(number, 3, (1, 16, 32), rounds=7)[0]
    expected, scale = encode(values, dtype, noise if stochastic else None)
    codes = torch.empty(16, 32, dtype=torch.uint8 if dtype == fp8 else dtype)
    scales, seed = torch.empty(16), torch.tensor([number])
    _encode[(1,)](values, codes, scales, seed, KINDS[dtype], stochastic)
    assert torch.equal(as_bytes(codes), as_bytes(expected))
    assert scale is None or torch.equal(scales, scale)
    assert seed.item() == layer_seed(number, 5)
