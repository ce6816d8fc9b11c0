"""The kernels on a CUDA device: against the fp64 reference, and bits that must not depend on how a batch is cut."""

from dataclasses import fields, replace

import pytest
import torch

from replayssm.conv import causal_conv1d_replay
from replayssm.mamba import checkpointing_ssu, replayssm_materialize
from replayssm.rounding import decode, encode, layer_seed, noise_bits
from replayssm.testing import STATE_DTYPES, SsuCall, as_bytes, random_ssu_call, using

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
f32, bf16, f16, int8, fp8 = torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn

# Norm of the difference over the norm of the reference. bf16 operands round by 2^-9 at most, twice on the way to an
# output; 8-bit outputs of a flush differ by the codes' rounding, which the reference reads and the kernel does not.
OUTPUT_ERROR = {f32: 4e-3, bf16: 4e-3, f16: 4e-3, int8: 1e-2, fp8: 5e-2}
STATE_ERROR = {f32: 2e-3, bf16: 4e-3, f16: 2e-3, int8: 1e-2, fp8: 4e-2}
SHAPES = [(64, 128), (80, 96), (96, 16), (5, 11), (128, 256)]


def on_device(call: SsuCall) -> SsuCall:
    """The call with its tensors on the device; broadcast axes stay broadcast."""
    moved = {}
    for f in fields(call):
        value = getattr(call, f.name)
        if isinstance(value, torch.Tensor):
            core = value
            for axis, stride in enumerate(value.stride()):
                core = core.narrow(axis, 0, 1) if stride == 0 and value.shape[axis] else core
            moved[f.name] = core.contiguous().cuda().expand(value.shape)
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in call.options.items()}
    return replace(call, **moved, options=options)


def error(actual, expected):
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())


def states(call):
    slots = call.state_batch_indices[call.state_batch_indices >= 0].long()
    return decode(call.state[slots], None if call.state_scale is None else call.state_scale[slots])


def compare(call, dtype):
    expected, call = call.clone(), on_device(call)
    untouched = [s for s in range(call.state.shape[0]) if s not in call.state_batch_indices.tolist()]
    before = as_bytes(call.state[untouched])
    with using("reference"):
        checkpointing_ssu(**expected.arguments())
    checkpointing_ssu(**call.arguments())
    live = expected.state_batch_indices >= 0
    assert error(call.out[live.cuda()], expected.out[live]) < OUTPUT_ERROR[dtype]
    assert error(states(call), states(expected)) < STATE_ERROR[dtype]
    assert torch.equal(as_bytes(call.state[untouched]), before)
    assert torch.equal(as_bytes(call.out[~live.cuda()]).cpu(), as_bytes(expected.out[~live]))
    for name in ("x_cache", "B_cache"):
        assert torch.equal(call.memory()[name].cpu(), expected.memory()[name]), name
    torch.testing.assert_close(call.dt_cache.cpu(), expected.dt_cache, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("seq_len", [1, 4])
@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_every_state_dtype(dtype, seq_len):
    live = (16, 0, -1, 5, 17 - seq_len, 16 - seq_len, 16)
    compare(
        random_ssu_call(live=live, seq_len=seq_len, window=16, headdim=64, dstate=128, state_dtype=dtype, dtype=bf16),
        dtype,
    )


@pytest.mark.parametrize(("headdim", "dstate"), SHAPES)
def test_every_shape(headdim, dstate):
    call = random_ssu_call(
        live=(11, 3, 9, -1, 0), seq_len=3, window=11, nheads=4, headdim=headdim, dstate=dstate, spare_rows=5,
        state_dtype=bf16, dtype=bf16, with_z=False,
    )  # fmt: skip
    compare(call, bf16)


@pytest.mark.parametrize(("seq_len", "window"), [(16, 64), (33, 40), (2, 1 + 1), (16, 16)])
def test_every_window(seq_len, window):
    live = (window, window - seq_len, 0, max(0, window - seq_len + 1))
    compare(random_ssu_call(live=live, seq_len=seq_len, window=window, headdim=24, dstate=40, dtype=bf16), f32)


@pytest.mark.parametrize("dtype", [f32, f16])
@pytest.mark.parametrize("seq_len", [1, 5])
def test_wider_inputs(dtype, seq_len):
    call = random_ssu_call(live=(9, 4, 0), seq_len=seq_len, window=9, headdim=64, dstate=32, dtype=dtype)
    expected, call = call.clone(), on_device(call)
    with using("reference"):
        checkpointing_ssu(**expected.arguments())
    checkpointing_ssu(**call.arguments())
    assert error(call.out, expected.out) < (2e-6 if dtype == f32 else 6e-4)
    assert error(states(call), states(expected)) < (1e-6 if dtype == f32 else 3e-5)


@pytest.mark.parametrize(
    ("dtype", "seq_len", "headdim", "dstate"),
    [
        (f32, 4, 64, 128),
        (bf16, 1, 64, 128),
        (bf16, 4, 64, 128),
        (int8, 1, 64, 128),
        (int8, 4, 64, 128),
        (fp8, 3, 80, 96),
        (bf16, 2, 80, 96),
    ],
)
def test_a_request_has_the_same_bits_in_every_batch(dtype, seq_len, headdim, dstate):
    """One request of 32 heads, forty and one hundred and thirty of them take three different tiles."""
    live = tuple((5 * row) % 17 for row in range(130))
    call = on_device(
        random_ssu_call(
            live=live,
            seq_len=seq_len,
            window=16,
            nheads=32,
            headdim=headdim,
            dstate=dstate,
            ngroups=4,
            state_dtype=dtype,
            dtype=bf16,
        )
    )
    full = replace(call, **{name: t.clone() for name, t in call._written().items()})
    checkpointing_ssu(**full.arguments())
    for rows in ([7], list(range(60, 20, -1))):
        part = some_rows(call, rows)
        checkpointing_ssu(**part.arguments())
        assert torch.equal(as_bytes(part.out), as_bytes(full.out[rows]))
        slots = part.state_batch_indices.long()
        assert torch.equal(as_bytes(part.state[slots]), as_bytes(full.state[slots]))


def some_rows(call, rows):
    pick = torch.tensor(rows, device="cuda")
    dt = call.dt[..., :1][pick].expand(len(rows), *call.dt.shape[1:])
    own = {name: t.clone() for name, t in call._written().items()}
    own |= {name: getattr(call, name)[pick] for name in ("x", "B", "C", "z", "out", "state_batch_indices")}
    return replace(call, **own, dt=dt)


@pytest.mark.parametrize("dtype", [f32, bf16, fp8])
def test_unequal_lengths_equal_the_padded_call(dtype):
    lengths = [3, 1, 4, 2, 0, 4]
    call = on_device(
        random_ssu_call(
            live=(0, 5, 10, 14, 8, 16),
            seq_len=4,
            window=16,
            nheads=4,
            headdim=64,
            dstate=128,
            state_dtype=dtype,
            dtype=bf16,
        )
    )
    tokens = [(row, t) for row, n in enumerate(lengths) for t in range(n)]
    rows, steps = (torch.tensor(axis, device="cuda") for axis in zip(*tokens, strict=True))
    packed = {name: getattr(call, name)[rows, steps].unsqueeze(0) for name in ("x", "B", "C", "z", "out")}
    dt = call.dt[..., :1][rows, steps].unsqueeze(0).expand(1, -1, *call.dt.shape[2:])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    own = {name: t.clone() for name, t in call._written().items()}
    varlen = replace(call, **{**own, **packed}, dt=dt, options={"cu_seqlens": bounds, "max_seqlen": 4})
    checkpointing_ssu(**varlen.arguments())
    checkpointing_ssu(**call.arguments())
    for row, length in enumerate(lengths):
        # With 14 live rows two tokens fit and four do not: there the padded call flushes and the other does not.
        if row != 3:
            assert torch.equal(varlen.out[0, bounds[row] : bounds[row + 1]], call.out[row, :length]), row


def test_the_seed_moves_the_state_and_not_the_output():
    for dtype in (bf16, f16, int8, fp8):
        call = random_ssu_call(
            live=(16, 16), seq_len=1, window=16, headdim=64, dstate=128, state_dtype=dtype, dtype=bf16
        )
        call, outs, codes = on_device(call), [], []
        for seed in (1, 1, 2, None):
            own = some_rows(call, [0, 1])
            random = {} if seed is None else {"rand_seed": torch.tensor([seed], device="cuda")}
            checkpointing_ssu(**replace(own, options=random).arguments())
            outs.append(own.out)
            codes.append(as_bytes(own.state))
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert torch.equal(codes[0], codes[1]) and not torch.equal(codes[0], codes[2])
        assert not torch.equal(codes[0], codes[3])


def test_a_graph_replays_the_same_bits():
    call = on_device(random_ssu_call(live=(3, 16, 9), seq_len=4, window=16, headdim=64, dstate=128, dtype=bf16))
    eager, graphed = some_rows(call, [0, 1, 2]), some_rows(call, [0, 1, 2])
    checkpointing_ssu(**call.arguments())
    checkpointing_ssu(**eager.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        checkpointing_ssu(**graphed.arguments())
    graph.replay()
    assert torch.equal(eager.out, graphed.out)
    for name, memory in eager.memory().items():
        assert torch.equal(memory, graphed.memory()[name]), name


def test_offsets_beyond_32_bits():
    call = on_device(
        random_ssu_call(
            live=(16, 2), seq_len=2, window=16, nheads=64, headdim=64, dstate=128, state_dtype=bf16, dtype=bf16
        )
    )
    far = 4200  # slots of 2^19 elements: the last ones lie beyond 2^31
    big = torch.empty(far, *call.state.shape[1:], dtype=bf16, device="cuda")
    slots = call.state_batch_indices.long()
    rings = {
        name: getattr(call, name)
        for name in ("x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens")
    }
    moved = {name: torch.zeros(far, *t.shape[1:], dtype=t.dtype, device="cuda") for name, t in rings.items()}
    new = torch.tensor([far - 1, far - 7], device="cuda")
    big[new] = call.state[slots]
    for name, t in rings.items():
        moved[name][new] = t[slots]
    distant = replace(call, state=big, **moved, state_batch_indices=new, out=torch.zeros_like(call.out))
    checkpointing_ssu(**distant.arguments())
    checkpointing_ssu(**call.arguments())
    assert torch.equal(distant.out, call.out)
    assert torch.equal(big[new], call.state[slots])


@pytest.mark.parametrize(
    ("dtype", "headdim", "dstate", "seed"),
    [
        *((d, 64, 128, None) for d in STATE_DTYPES),
        *((d, 64, 128, 5) for d in STATE_DTYPES[1:]),
        (bf16, 80, 96, None),
        (f32, 5, 11, None),
    ],
)
def test_materialize_equals_a_flush(dtype, headdim, dstate, seed):
    counts = (9, 3, 0, 16)
    call = on_device(
        random_ssu_call(
            live=counts, seq_len=1, window=16, nheads=8, headdim=headdim, dstate=dstate, state_dtype=dtype, dtype=bf16
        )
    )
    src = call.state_batch_indices.tolist()
    free = [slot for slot in range(7) if slot not in src]
    dst = [free[0], src[1], free[1], -1]
    flushes = [flushed(call, s, d, n, seed) for s, d, n in zip(src, dst, counts, strict=True)]
    int32 = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
    values = call.A[:, 0, 0].contiguous()
    numbers = [n for t in (call.state, call.x_cache, call.B_cache, call.dt_cache) for n in (t.data_ptr(), t.stride(0))]
    scale = [0, 0] if call.state_scale is None else [call.state_scale.data_ptr(), call.state_scale.stride(0)]
    sizes = {
        "dim": headdim,
        "dstate": dstate,
        "num_heads": 8,
        "heads_per_group": 4,
        "max_window": 16,
        "ring_buffer_len": 17,
    }
    random = {} if seed is None else {"rand_seed": torch.tensor([seed], device="cuda"), "philox_rounds": 10}
    before = as_bytes(call.state)
    replayssm_materialize(
        *(torch.tensor([n], device="cuda") for n in (*numbers, values.data_ptr(), *scale)), int32([src]), int32([dst]),
        int32([int(call.ring_start[slot]) for slot in src]), int32(counts), int32([2, 0, 3, 1]),
        state_dtype=dtype, input_dtype=bf16, matrixA_dtype=f32, **sizes, **random,
    )  # fmt: skip
    for slot, flush in zip(dst, flushes, strict=True):
        if slot >= 0:
            assert torch.equal(as_bytes(call.state[slot]), as_bytes(flush.state[slot]))
            assert call.state_scale is None or torch.equal(call.state_scale[slot], flush.state_scale[slot])
    others = [slot for slot in range(7) if slot not in dst]
    assert torch.equal(as_bytes(call.state)[others], before[others])


def flushed(call, src, dst, count, seed):
    """The call's memory after a step that flushes ``count`` rows of ``src`` in ``dst``; a copy for no rows."""
    own = some_rows(call, [0])
    for name in ("state", "state_scale", "x_cache", "B_cache", "dt_cache"):
        tensor = getattr(own, name)
        if tensor is not None and dst >= 0:
            tensor[dst] = tensor[src].clone()
    starts, lives = call.ring_start.clone(), call.prev_num_accepted_tokens.clone()
    starts[dst], lives[dst] = starts[src].item(), count
    random = {} if seed is None else {"rand_seed": torch.tensor([layer_seed(seed, 0)], device="cuda")}
    own = replace(
        own, ring_start=starts, prev_num_accepted_tokens=lives, max_window=max(count, 1), options=random,
        state_batch_indices=torch.tensor([dst], device="cuda"),
    )  # fmt: skip
    checkpointing_ssu(**own.arguments())
    return own


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", [bf16, f16, int8, fp8])
def test_rounding_has_the_bits_of_the_cpu(dtype, stochastic):
    """A fold of rows with dt = 0 changes nothing but the rounding: an fp32 product is not involved."""
    values = torch.randn(1, 4, 64, 128).to(f16).float() * 1.0009765625  # exact in fp32, in no narrower type
    call = random_ssu_call(live=(3,), seq_len=1, window=3, nheads=4, headdim=64, dstate=128, dtype=bf16)
    slot = int(call.state_batch_indices[0])
    codes, scale = encode(values, dtype)
    state = torch.zeros(call.state.shape, dtype=dtype)
    state[slot] = codes[0]
    scales = None
    if scale is not None:
        scales = torch.zeros(call.state.shape[:3])
        scales[slot] = scale[0]
    call.dt_cache[slot] = 0.0
    random = {"rand_seed": torch.tensor([-5])} if stochastic else {}
    call = on_device(replace(call, state=state, state_scale=scales, options=random))
    checkpointing_ssu(**call.arguments())
    noise = noise_bits(-5, slot, (4, 64, 128)) if stochastic else None
    exact = decode(codes[0], None if scale is None else scale[0])
    expected, new_scale = encode(exact, dtype, noise)
    assert torch.equal(as_bytes(call.state[slot]).cpu(), as_bytes(expected))
    assert new_scale is None or torch.equal(call.state_scale[slot].cpu(), new_scale)


@pytest.mark.parametrize(
    ("seq_len", "channels", "dtype"), [(1, 256, bf16), (4, 4352, bf16), (7, 300, f32), (16, 96, f16)]
)
def test_convolution(seq_len, channels, dtype):
    rows, start = torch.randn(6, seq_len + 5, channels).to(dtype), torch.tensor([0, 3, 5, 1, 2, 4], dtype=torch.int32)
    x, weight, bias = (
        torch.randn(3, seq_len, channels).to(dtype),
        torch.randn(channels, 4).to(dtype),
        torch.randn(channels).to(dtype),
    )
    slots = torch.tensor([4, -1, 2])
    given = (rows, start, x, weight, bias)
    device = [t.cuda() for t in given]
    out = causal_conv1d_replay(*given, activation="silu", state_batch_indices=slots)
    actual = causal_conv1d_replay(*device, activation="silu", state_batch_indices=slots.cuda())
    assert torch.equal(device[0].cpu(), rows)
    assert error(actual, out) < (1e-6 if dtype == f32 else 2e-3)
    # The bits of a token do not depend on how many come with it.
    short = [t.cuda() for t in (rows, start, x[:, :1].contiguous(), weight, bias)]
    alone = causal_conv1d_replay(*short, activation="silu", state_batch_indices=slots.cuda())
    assert torch.equal(alone[[0, 2], 0], actual[[0, 2], 0])
