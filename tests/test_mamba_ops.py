"""The ops as torch.library sees them: exact mutation lists, fake tensors, torch.compile, and the eager short cut."""

from dataclasses import replace

import pytest
import torch
from op_cases import OPCHECK, handed_to
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from replayssm import mamba
from replayssm.mamba import checkpointing_ssu, replayssm_materialize
from replayssm.testing import random_ssu_call

T, W = 3, 6


def finite_call(state_dtype=torch.float32, live=(2, 5)):
    """opcheck compares with NaN unequal: zeros in unowned memory."""
    call = random_ssu_call(live=live, seq_len=T, window=W, state_dtype=state_dtype)
    for name in ("state", "x_cache", "B_cache", "dt_cache", "out", "state_scale"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.dtype.is_floating_point:
            tensor.copy_(tensor.float().nan_to_num(0.0))
    return call


def arguments_of(call):
    return handed_to(mamba, "_checkpointing_ssu", lambda: checkpointing_ssu(**call.arguments()))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.int8])
def test_opcheck_checkpointing_ssu(state_dtype):
    op = torch.ops.replayssm.checkpointing_ssu.default
    torch.library.opcheck(op, arguments_of(finite_call(state_dtype)), test_utils=OPCHECK)


def materialize_case():
    call = finite_call()
    slot = int(call.state_batch_indices[1])
    target = next(s for s in range(5) if s not in call.state_batch_indices.tolist())
    A = call.A[:, 0, 0].contiguous()
    memory = (call.state, call.x_cache, call.B_cache, call.dt_cache)
    pointers = [torch.tensor([number]) for t in memory for number in (t.data_ptr(), t.stride(0))]
    pointers += [torch.tensor([A.data_ptr()]), torch.tensor([0]), torch.tensor([0])]
    metadata = [
        torch.tensor(v, dtype=torch.int32) for v in ([[slot]], [[target]], [int(call.ring_start[slot])], [4], [0])
    ]
    sizes = {
        "state_dtype": torch.float32, "input_dtype": torch.float32, "matrixA_dtype": torch.float32, "dim": 5,
        "dstate": 11, "num_heads": 6, "heads_per_group": 3, "max_window": W, "ring_buffer_len": W + T,
    }  # fmt: skip
    return call, A, target, pointers, metadata, sizes


def test_opcheck_replayssm_materialize():
    call, A, _, pointers, metadata, sizes = materialize_case()
    # opcheck gives the op copies of its tensors, which the addresses do not follow: nothing is anchored here.
    arguments = (*pointers, *metadata, *sizes.values(), -1, None, 0, [], [])
    torch.library.opcheck(torch.ops.replayssm.replayssm_materialize.default, arguments)
    assert A.numel() == 6 and call.state.isfinite().all()  # alive until here


def test_the_schema_tells_what_is_written():
    ssu = torch.ops.replayssm.checkpointing_ssu.default._schema
    written = {a.name for a in ssu.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"state", "state_scale", "x_cache", "B_cache", "dt_cache", "out"}
    assert not ssu.returns
    schema = torch.ops.replayssm.replayssm_materialize.default._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None] == ["dependency_outputs"]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float8_e4m3fn])
def test_compiled_equals_eager(state_dtype):
    def step(call_arguments, scale_x):
        out = checkpointing_ssu(**{**call_arguments, "x": call_arguments["x"] * scale_x})
        return out * 2 + call_arguments["state"].float().sum()

    call = finite_call(state_dtype)
    eager, compiled = call.clone(), call.clone()
    expected = step(eager.arguments(), 0.5)
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(compiled.arguments(), 0.5)
    assert torch.equal(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(compiled.memory().values(), eager.memory().values(), strict=True))


def test_compiled_for_sizes_that_change():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda arguments: checkpointing_ssu(**arguments), backend="aot_eager", dynamic=True, fullgraph=True
    )
    for seq_len in (3, 2, 4, 1):
        call = random_ssu_call(live=(2, 5), seq_len=seq_len, window=8, seed=seq_len)
        eager, traced = call.clone(), call.clone()
        assert torch.equal(compiled(traced.arguments()), checkpointing_ssu(**eager.arguments()))
        assert all(torch.equal(a, b) for a, b in zip(traced.memory().values(), eager.memory().values(), strict=True))


def test_traced_with_symbolic_sizes():
    call = finite_call()
    eager, traced = call.clone(), call.clone()
    names = [name for name, value in call.arguments().items() if isinstance(value, torch.Tensor)]
    others = {name: value for name, value in call.arguments().items() if name not in names}
    graph = make_fx(
        lambda *tensors: checkpointing_ssu(**dict(zip(names, tensors, strict=True)), **others), tracing_mode="symbolic"
    )(*[call.clone().arguments()[name] for name in names])
    assert torch.equal(graph(*[traced.arguments()[name] for name in names]), checkpointing_ssu(**eager.arguments()))
    assert torch.equal(traced.state, eager.state)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_materialize_sees_earlier_writes_and_is_seen_by_later_reads(backend):
    call, A, target, pointers, metadata, sizes = materialize_case()
    source, expected = int(metadata[0]), call.clone()
    expected.state[source] *= 2
    expected_pointers = [torch.tensor([expected.state.data_ptr()]), *pointers[1:]]
    replayssm_materialize(*expected_pointers, *metadata, **sizes)

    def step(state, rings):
        state[source].mul_(2)
        replayssm_materialize(*pointers, *metadata, **sizes, dependency_inputs=[*rings, A], dependency_outputs=[state])
        return state[target] * 3

    rings = [call.x_cache, call.B_cache, call.dt_cache]
    result = torch.compile(step, backend=backend)(call.state, rings)
    assert torch.equal(call.state, expected.state)
    assert torch.equal(result, expected.state[target] * 3)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="writes through addresses"):
        torch.compile(step, backend=backend, fullgraph=True)(call.state, rings)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_one_op_and_plain_eager_gives_the_same_bits():
    call = finite_call()
    plain, seen = call.clone(), call.clone()
    checkpointing_ssu(**plain.arguments())
    with Recorder() as recorder:
        checkpointing_ssu(**seen.arguments())
    assert recorder.names[0] == "replayssm::checkpointing_ssu"
    assert all(torch.equal(a, b) for a, b in zip(plain.memory().values(), seen.memory().values(), strict=True))


def test_no_gradient_is_recorded():
    call = finite_call()
    x = call.x.clone().requires_grad_()
    out = checkpointing_ssu(**{**call.arguments(), "x": x, "out": None})
    assert not out.requires_grad
    assert not call.x_cache.requires_grad


def test_cached_checks_do_not_let_another_layout_pass():
    call = finite_call()
    checkpointing_ssu(**call.arguments())
    wrong = replace(call, x=torch.stack((call.x, call.x), -1)[..., 0])
    for _ in range(2):
        with pytest.raises(ValueError, match="x: expected axes"):
            checkpointing_ssu(**wrong.arguments())


def test_a_default_device_that_the_caller_has_set_changes_nothing():
    call = random_ssu_call(live=(13, 7), seq_len=11, window=23, state_dtype=torch.int8)  # sizes of no other test
    first, second = call.clone(), call.clone()
    seed = {"rand_seed": torch.tensor([5])}
    with torch.device("meta"):
        checkpointing_ssu(**first.arguments(), **seed)
    checkpointing_ssu(**second.arguments(), **seed)
    assert all(torch.equal(a, b) for a, b in zip(first.memory().values(), second.memory().values(), strict=True))
    assert first.out.isfinite().all()


def test_autocast_changes_no_bit():
    call = finite_call()
    plain, cast = call.clone(), call.clone()
    checkpointing_ssu(**plain.arguments())
    with torch.autocast("cpu", torch.bfloat16):
        checkpointing_ssu(**cast.arguments())
    assert all(torch.equal(a, b) for a, b in zip(cast.memory().values(), plain.memory().values(), strict=True))
