"""Exact decode as torch.library sees it, and the adapter for a mixer."""

from types import SimpleNamespace

import pytest
import torch
from exact_cases import INPUTS, Decoder
from op_cases import OPCHECK, handed_to
from ssd_cases import int32, random_case

from replayssm.batch_invariant_decode import (
    BatchInvariantDecodeBuffers,
    MambaBatchInvariantDecode,
    _mamba_chunk_scan_decode_rows,
    _masked_update_rows,
    batch_invariant_decode_buffered_scan,
    ops,
)


def finite_decoder(max_tokens):
    case = random_case(20)
    decoder = Decoder(case, max_tokens=max_tokens, sums=True)
    for tensor in (*decoder.buffers.per_slot().values(), decoder.state):
        if tensor.is_floating_point():
            tensor.zero_()  # opcheck compares with NaN unequal
    decoder.prefill((2, case.tokens(0, 15)))
    return case, decoder


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_opcheck_step(max_tokens):
    case, decoder = finite_decoder(max_tokens)
    args = handed_to(ops, "step", lambda: decoder.step([2, -1], [case.tokens(15, 15 + max_tokens)] * 2))
    torch.library.opcheck(torch.ops.replayssm.batch_invariant_decode_step.default, args, test_utils=OPCHECK)


@pytest.mark.parametrize("verb", ["seed", "extend"])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_opcheck_store(verb, max_tokens):
    case, decoder = finite_decoder(max_tokens)
    named = {name: getattr(case, name) for name in INPUTS}
    args = handed_to(ops, "store_tails", lambda: getattr(decoder.buffers, verb)(
        **named, cu_seqlens=int32(0, 12, 20), batch_indices=int32(2, 0)))  # fmt: skip
    torch.library.opcheck(torch.ops.replayssm.batch_invariant_decode_store.default, args, test_utils=OPCHECK)


def test_opcheck_commit():
    _, decoder = finite_decoder(3)
    args = handed_to(ops, "commit", lambda: decoder.commit([2, -1], [3, 1]))
    torch.library.opcheck(torch.ops.replayssm.batch_invariant_decode_commit.default, args, test_utils=OPCHECK)


def test_opcheck_refresh():
    shadow, state = torch.zeros(3, 2, 4, 8, dtype=torch.float16), torch.ones(3, 2, 4, 8)
    args = shadow, state, int32(1, -1)
    torch.library.opcheck(torch.ops.replayssm.batch_invariant_decode_refresh.default, args, test_utils=OPCHECK)


def test_opcheck_rows():
    args = handed_to(
        ops, "masked_update_rows", lambda: _masked_update_rows(torch.zeros(3, 2), int32(1, -1), torch.ones(2, 2))
    )
    torch.library.opcheck(torch.ops.replayssm.masked_update_rows.default, args, test_utils=OPCHECK)
    case = random_case(32)
    args = handed_to(ops, "decode_rows", lambda: _mamba_chunk_scan_decode_rows(
        case.x, case.z, case.dt, case.A, case.B, case.C, 16, int32(16, 0), int32(1, 0), int32(15, -1), int32(1, 0),
        torch.zeros(2, *case.state_shape), torch.zeros(2, 6, 5), case.D, case.dt_bias, True))  # fmt: skip
    torch.library.opcheck(torch.ops.replayssm.batch_invariant_decode_rows.default, args, test_utils=OPCHECK)


def test_the_schemas_tell_what_is_written():
    def written(op):
        return {a.name for a in op.default._schema.arguments if a.alias_info is not None}

    rows = {"x_rows", "z_rows", "dt_rows", "B_rows", "C_rows", "num_buffered", "ring_start"}
    named = torch.ops.replayssm
    rows |= {"num_summed"}
    step = rows | {"ssm_state", "target_rows", "chunk_flags", "out", "shadow", "arrivals", "sums"}
    assert written(named.batch_invariant_decode_step) == step
    assert written(named.batch_invariant_decode_store) == rows
    assert written(named.batch_invariant_decode_rows) == {"initial_states", "out"}


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_compiled_equals_eager(max_tokens):
    results = []
    for compiled in (False, True):
        case, decoder = finite_decoder(max_tokens)

        lane = torch.tensor([2])  # out here: compiled code does not see a default device

        def run(x, case=case, decoder=decoder, lane=lane):
            out = batch_invariant_decode_buffered_scan(
                decoder.buffers, x * 0.5, case.z[15 : 15 + max_tokens][None], case.dt[15 : 15 + max_tokens][None],
                case.B[15 : 15 + max_tokens][None], case.C[15 : 15 + max_tokens][None], case.A, case.D, case.dt_bias,
                lane, decoder.state,
            )  # fmt: skip
            return out * 2

        run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        results.append((run(case.x[15 : 15 + max_tokens][None]), decoder.slot_bytes(2)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[1][1][name], value) for name, value in results[0][1].items())


def mixer(case, **changes):
    D = case.D.flatten()
    named = {"A_log": torch.log(-case.A), "D": D, "dt_bias": case.dt_bias, "D_has_hdim": case.D.dim() == 2}
    return SimpleNamespace(**{**named, "chunk_size": 16, "rmsnorm": True, **changes})


@pytest.mark.parametrize("D", ["head", "element"])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_adapter(D, max_tokens):
    case = random_case(33, D=D)
    case = type(case)(**{**case.__dict__, "A": -torch.exp(torch.log(-case.A))})  # what the mixer makes of A_log
    adapter, state = MambaBatchInvariantDecode(mixer(case), max_tokens=max_tokens), torch.zeros(4, *case.state_shape)
    prefix = case.tokens(0, 12)
    adapter.seed(*(getattr(prefix, name) for name in INPUTS), int32(0, 12), int32(2), 4)
    assert adapter.buffers.z is not None and adapter.buffers.num_buffered.tolist() == [0, 0, 12, 0]
    for t in range(12, 33, max_tokens):
        token = case.tokens(t, t + max_tokens)
        x, z, dt, B, C = (torch.stack([getattr(token, name)] * 2) for name in INPUTS)
        out = adapter.step(x.flatten(2), z.flatten(2), dt, B.flatten(2), C.flatten(2), torch.tensor([-1, 2]), state)
        assert out.shape == (2, max_tokens, 30) and not out[0].any()
        assert torch.equal(out[1], case.whole()[0][t : t + max_tokens].flatten(1))
        if max_tokens > 1:
            adapter.buffers.commit(torch.tensor([2]), torch.tensor([max_tokens]))


def test_the_adapter_refuses():
    case = random_case(20)
    with pytest.raises(AssertionError, match="mixer: batch-invariant decode requires rmsnorm=True"):
        MambaBatchInvariantDecode(mixer(case, rmsnorm=False))
    adapter = MambaBatchInvariantDecode(mixer(case))
    first = adapter._get_buffers(4, case.x, case.B)
    assert isinstance(first, BatchInvariantDecodeBuffers) and adapter._get_buffers(4, case.x, case.B) is first
    with pytest.raises(ValueError, match="max_requests: expected 4, as when the buffers were allocated, got 5"):
        adapter._get_buffers(5, case.x, case.B)


def test_trimmed_buffers_are_smaller_and_decode_the_same():
    case = random_case(40)
    bytes_of = []
    for trimmed in (False, True):
        decoder = Decoder(case, trimmed=trimmed)
        decoder.prefill((1, case.tokens(0, 20)))
        out = torch.cat([decoder.step([1], [case.tokens(t, t + 1)])[0] for t in range(20, 40)])
        assert torch.equal(out, case.whole()[0][20:])
        bytes_of.append(sum(tensor.nbytes for tensor in decoder.buffers.per_slot().values()))
    assert bytes_of[1] < 0.6 * bytes_of[0]
