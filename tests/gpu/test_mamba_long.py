"""The Mamba-2 ops on a CUDA device beyond one call: many steps, the size of the error, sick neighbours, compilation."""

from dataclasses import replace

import pytest
import torch

from replayssm import mamba
from replayssm.cursors import Cursors, commit
from replayssm.mamba import checkpointing_ssu
from replayssm.rounding import decode, encode
from replayssm.testing import STATE_DTYPES, SsuCall, as_bytes, random_ssu_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
f32, bf16, f16, int8, fp8 = torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
# Norm of the difference to the exact recurrence over the norm of that, of outputs, after any number of steps. A flush
# rounds the state once and 16 tokens decay it by a half here, so that a state's error stays below two of its roundings.
DRIFT = {f32: 4e-3, bf16: 6e-3, f16: 4e-3, int8: 2e-2, fp8: 8e-2}


def on_device(call: SsuCall) -> SsuCall:
    """The call with its tensors on the device; broadcast axes stay broadcast."""
    moved = {}
    for name, value in vars(call).items():
        if isinstance(value, torch.Tensor):
            core = value
            for axis, stride in enumerate(value.stride()):
                core = core.narrow(axis, 0, 1) if stride == 0 and value.shape[axis] else core
            moved[name] = core.contiguous().cuda().expand(value.shape)
    return replace(call, **moved)


def advance(S, dt, x, A, B):
    """One token of the exact recurrence for a batch: ``S`` fp64 ``[batch, H, P, N]``."""
    dt = dt.double()
    return torch.exp(A * dt)[..., None, None] * S + (dt[..., None] * x)[..., None] * B[:, :, None, :]


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_a_thousand_steps_do_not_drift(dtype):
    H, P, N, G, T, window, batch = 6, 64, 128, 2, 3, 16, 5
    g = torch.Generator("cuda").manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    A = -0.02 - 0.1 * torch.rand(H, generator=g, device="cuda")
    codes, scale = encode(randn(7, H, P, N), dtype)
    ring_len = window + T
    memory = {
        "state": codes, "state_scale": scale, "dt_cache": torch.full((7, H, ring_len), torch.nan, device="cuda"),
        "x_cache": torch.full((7, H, ring_len, P), torch.nan, dtype=bf16, device="cuda"),
        "B_cache": torch.full((7, G, ring_len, N), torch.nan, dtype=bf16, device="cuda"),
    }  # fmt: skip
    slots = torch.tensor([5, 0, 3, 6, 2], device="cuda")
    cursors = Cursors.allocate(7, torch.device("cuda"))
    S = decode(codes, scale)[slots].double()
    errors = []
    for _ in range(1000):
        x, B, C = randn(batch, T, H, P).to(bf16), randn(batch, T, G, N).to(bf16), randn(batch, T, G, N).to(bf16)
        dt = 0.3 + 0.2 * torch.rand(batch, T, H, generator=g, device="cuda")
        kept = torch.randint(0, T + 1, (batch,), generator=g, device="cuda")
        out = checkpointing_ssu(
            **memory, ring_start=cursors.ring_start, prev_num_accepted_tokens=cursors.num_live, x=x,
            dt=dt[..., None].expand(batch, T, H, P), A=A[:, None, None].expand(H, P, N), B=B, C=C, out=None,
            state_batch_indices=slots, max_window=window,
        )  # fmt: skip
        B, C = (t.double().repeat_interleave(H // G, 2) for t in (B, C))
        x, after, exact = x.double(), S, []
        for t in range(T):
            S = advance(S, dt[:, t], x[:, t], A.double(), B[:, t])
            exact.append((S * C[:, t, :, None, :]).sum(-1))
            after = torch.where((t < kept)[:, None, None, None], S, after)
        S, exact = after, torch.stack(exact, 1)
        errors.append((out.double() - exact).norm() / exact.norm())
        commit(cursors, slots, T, kept, window=window, ring_len=ring_len, conv_len=9)
    errors = torch.stack(errors)
    early, late = float(errors[100:300].mean()), float(errors[-200:].mean())
    assert errors.max() < DRIFT[dtype]
    assert late < 1.2 * early


def exact_outputs(call):
    """fp64 outputs of a call whose requests are all active, and states after the live rows: no rounding between."""
    heads_per_group = call.x.shape[2] // call.B.shape[2]
    outs, states = [], []
    for row, slot in enumerate(call.state_batch_indices.tolist()):
        live, start = int(call.prev_num_accepted_tokens[slot]), int(call.ring_start[slot])
        ring = (start + torch.arange(live, device="cuda")) % call.x_cache.shape[2]
        S = decode(call.state[slot], None if call.state_scale is None else call.state_scale[slot]).double()[None]
        A, D = call.A[:, 0, 0].double(), call.D[:, 0].double()
        spread = lambda t: t.double().repeat_interleave(heads_per_group, 0)[None]  # noqa: E731
        for w in ring.tolist():
            x, B, dt = call.x_cache[slot, :, w].double(), call.B_cache[slot, :, w], call.dt_cache[slot, :, w]
            S = advance(S, dt[None], x[None], A, spread(B))
        states.append(S[0])
        y = []
        for t in range(call.x.shape[1]):
            dt = torch.nn.functional.softplus(call.dt[row, t, :, 0].double() + call.dt_bias[:, 0].double())
            x = call.x[row, t].double()
            S = advance(S, dt[None], x[None], A, spread(call.B[row, t]))
            y.append((S[0] * spread(call.C[row, t])[0][:, None, :]).sum(-1) + D[:, None] * x)
        outs.append(torch.stack(y))
    return torch.stack(outs), torch.stack(states)


def rounded_outputs(call):
    """The same with the roundings of a kernel that multiplies in bf16 and adds in fp32, one by one."""
    r = lambda t: t.to(bf16).float()  # noqa: E731
    heads_per_group = call.x.shape[2] // call.B.shape[2]
    outs, states = [], []
    for row, slot in enumerate(call.state_batch_indices.tolist()):
        live, start = int(call.prev_num_accepted_tokens[slot]), int(call.ring_start[slot])
        ring = (start + torch.arange(live, device="cuda")) % call.x_cache.shape[2]
        scale = None if call.state_scale is None else call.state_scale[slot]
        h = decode(call.state[slot], scale).float()
        A, T = call.A[:, 0, 0].float(), call.x.shape[1]
        x_old, dt_old = call.x_cache[slot][:, ring].float(), call.dt_cache[slot][:, ring]
        spread = lambda t: t.float().repeat_interleave(heads_per_group, 0)  # noqa: E731
        B_old = spread(call.B_cache[slot][:, ring])
        B, C = (spread(t[row].transpose(0, 1)) for t in (call.B, call.C))
        s = A[:, None] * dt_old.cumsum(1)
        total = s[:, -1] if live else torch.zeros_like(A)
        weights = torch.exp(total[:, None] - s) * dt_old
        in_x = scale is not None
        left = r(x_old * weights[..., None]) if in_x else x_old
        right = B_old if in_x else r(B_old * weights[..., None])
        folded = h * torch.exp(total)[:, None, None] + left.mT @ right
        states.append(folded)
        dt = torch.nn.functional.softplus(call.dt[row, :, :, 0].float() + call.dt_bias[:, 0].float()).mT
        x = call.x[row].transpose(0, 1).float()
        c = A[:, None] * dt.cumsum(1)
        lower = torch.ones(T, T, device="cuda").tril().bool()
        new = torch.where(lower, torch.exp(c[:, :, None] - c[:, None, :]) * dt[:, None, :], 0.0) * (C @ B.mT)
        y = r(new) @ x
        if live + T > call.max_window and live:
            stored = decode(*encode(folded, call.state.dtype)) if scale is None else folded
            y += torch.exp(c)[..., None] * (C @ r(stored).mT)
        else:
            codes = call.state[slot].float() if scale is not None else r(h)
            read = (C @ codes.mT) * (1.0 if scale is None else scale[:, None, :])
            old = torch.exp(c[:, :, None] + (total[:, None] - s)[:, None, :]) * dt_old[:, None, :] * (C @ B_old.mT)
            y += torch.exp(c + total[:, None])[..., None] * read + r(old) @ x_old
        outs.append(r(y + call.D[:, 0].float()[:, None, None] * x).transpose(0, 1))
    return torch.stack(outs), torch.stack(states)


@pytest.mark.parametrize(("dtype", "seq_len"), [(bf16, 1), *((dtype, 4) for dtype in STATE_DTYPES)])
def test_the_error_is_that_of_the_named_roundings(dtype, seq_len):
    live = tuple(min(row % 18, 16) for row in range(36))
    call = on_device(
        random_ssu_call(live=live, seq_len=seq_len, window=16, nheads=6, headdim=64, dstate=128, state_dtype=dtype,
                        dtype=bf16, with_z=False)
    )  # fmt: skip
    exact, states = exact_outputs(call)
    emulated, folded = rounded_outputs(call)
    checkpointing_ssu(**call.arguments())
    flushed = torch.tensor([n + seq_len > 16 for n in live], device="cuda")
    for rows in (flushed, ~flushed):
        ours, theirs = ((out[rows].double() - exact[rows]).norm() / exact[rows].norm() for out in (call.out, emulated))
        assert ours < 1.03 * theirs
    slots = call.state_batch_indices[flushed].long()
    stored = decode(call.state[slots], None if call.state_scale is None else call.state_scale[slots])
    rounded = decode(*encode(folded[flushed], dtype))
    ours, theirs = ((S.double() - states[flushed]).norm() / states[flushed].norm() for S in (stored, rounded))
    assert ours < 1.03 * theirs


@pytest.mark.parametrize("dtype", [f32, bf16, int8])
@pytest.mark.parametrize("where", ["state", "x", "B", "C", "dt", "x_cache"])
def test_nan_stays_in_its_request(dtype, where):
    call = random_ssu_call(
        live=(3, 16, 9, 16), seq_len=2, window=16, nheads=4, headdim=64, dstate=128, state_dtype=dtype, dtype=bf16
    )
    sick = on_device(call.clone())
    call = on_device(call)
    slot = int(call.state_batch_indices[1])
    if where == "state" and dtype == int8:
        sick.state_scale[slot] = torch.nan
    elif where == "dt":
        sick = replace(sick, dt=sick.dt[..., :1].clone().index_fill_(0, torch.tensor([1], device="cuda"), torch.nan))
        sick = replace(sick, dt=sick.dt.expand(call.dt.shape))
    else:
        tensor = getattr(sick, where)
        tensor[slot if where in ("state", "x_cache") else 1] = torch.tensor(torch.nan).to(tensor.dtype)
    checkpointing_ssu(**call.arguments())
    checkpointing_ssu(**sick.arguments())
    assert sick.out[1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(as_bytes(sick.out[others]), as_bytes(call.out[others]))
    slots = call.state_batch_indices[others].long()
    for name in ("state", "x_cache", "B_cache", "dt_cache", "state_scale"):
        ours, theirs = getattr(sick, name), getattr(call, name)
        assert ours is None or torch.equal(as_bytes(ours[slots]), as_bytes(theirs[slots])), name


def finite(call):
    """opcheck compares with NaN unequal: zeros in unowned memory."""
    for name in ("state", "x_cache", "B_cache", "dt_cache", "out", "state_scale"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.dtype != int8:
            tensor.copy_(tensor.float().nan_to_num(0.0))
    return on_device(call)


@pytest.mark.parametrize("dtype", [bf16, int8])
def test_opcheck_and_compile(dtype):
    call = finite(
        random_ssu_call(live=(2, 5), seq_len=3, window=6, headdim=20, dstate=24, state_dtype=dtype, dtype=bf16)
    )
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba, "_checkpointing_ssu", lambda *args: seen.append(args))
        checkpointing_ssu(**call.arguments())
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.replayssm.checkpointing_ssu.default, seen[0], test_utils=tests)

    def step(arguments):
        return checkpointing_ssu(**{**arguments, "x": arguments["x"] * 0.5}) * 2

    copies = [replace(call, **{name: t.clone() for name, t in call._written().items()}) for _ in range(2)]
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(copies[0].arguments())
    assert torch.equal(actual, step(copies[1].arguments()))
    assert all(torch.equal(a, b) for a, b in zip(copies[0].memory().values(), copies[1].memory().values(), strict=True))
