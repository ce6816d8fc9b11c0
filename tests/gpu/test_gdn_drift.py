"""Ten thousand tokens of chained verify and commit on a CUDA device, against the fp64 recurrence."""

import random

import pytest
import torch

from replayssm.delta_rule import reference
from replayssm.gdn_decode import gated_delta_rule_mtp as mtp
from replayssm.gdn_decode import gated_delta_rule_replayssm_commit as commit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKENDS = ("simt", "tensor_core")
H, HV, K, V, T, TOKENS = 2, 6, 128, 64, 8, 10_000


def chain(q, k, v, a, b, A_log, dt_bias, state, rows, tokens):
    """Largest relative errors of all rounds, one number per request: of outputs, and of states as a backend commits.

    A round verifies T tokens and keeps 1..T of them. ``rows [batch, 1, V]`` are the scales of the rows of the
    states. Outputs are those of the states that ``simt`` committed.
    """
    batch, _, _, K = q.shape
    H, (HV, V) = q.shape[2], v.shape[2:]
    slots, S, at = torch.arange(batch, dtype=torch.int32), state.double(), 0
    states = {backend: state.clone() for backend in BACKENDS}
    windows = [torch.empty(batch, heads, T, size, dtype=q.dtype) for heads, size in ((HV, V), (H, K))]
    windows += [torch.empty(batch, HV, T), torch.empty(batch, HV, T)]
    names = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
    places = dict(zip(names, windows, strict=True)) | {"cache_replayssm": True}
    g, beta = reference.log_decay(A_log, a, dt_bias).double().exp(), reference.strength(b).double()
    keys, queries = (reference.unit(x, True).repeat_interleave(HV // H, 2) for x in (k, q))
    worst = {
        name: torch.zeros(batch, dtype=torch.float64)
        for name in (*BACKENDS, *(f"state {backend}" for backend in BACKENDS))
    }
    norm = lambda x: x.flatten(1).norm(dim=1)  # noqa: E731
    choose = random.Random(0)
    while at < tokens:
        now = slice(at, at + T)
        inputs = [x[:, now] for x in (q, k, v)] + [states["simt"], slots, A_log, a[:, now], dt_bias, b[:, now]]
        outputs = {}
        for backend in BACKENDS:
            outputs[backend] = torch.empty(batch, T, HV, V)
            mtp(*inputs, output=outputs[backend], **places, backend=backend)
        kept = choose.randint(1, T)
        counts = torch.full((batch,), kept, dtype=torch.int32)
        for backend, own in states.items():
            commit(own[None], *(w[None] for w in windows), slots, counts, backend=backend)
        truth = []
        for t in range(at, at + kept):
            key = keys[:, t].unsqueeze(-1)
            S = S * g[:, t, :, None, None]
            u = beta[:, t, :, None, None] * (v[:, t].double().unsqueeze(-1) - S @ key)
            S = S + u @ key.mT
            truth.append((S @ queries[:, t].unsqueeze(-1)).squeeze(-1) * K**-0.5 / rows)
        expected = torch.stack(truth, 1)
        for backend, output in outputs.items():
            error = norm(output[:, :kept].double() / rows[:, None] - expected) / norm(expected)
            worst[backend] = torch.maximum(worst[backend], error)
        for backend, own in states.items():
            error = norm((own.double() - S) / rows[..., None]) / norm(S / rows[..., None])
            worst[f"state {backend}"] = torch.maximum(worst[f"state {backend}"], error)
        at += kept
    return worst


def test_errors_do_not_grow_over_ten_thousand_tokens():
    """Three requests: normal data; scales over e^±6; nearly equal keys with corrections that cancel."""
    count, generator = TOKENS + T, torch.Generator("cuda").manual_seed(0)
    with torch.device("cuda"):
        randn = lambda *shape: torch.randn(3, *shape, generator=generator)  # noqa: E731
        q, k, v, a, b = randn(count, H, K), randn(count, H, K), randn(count, HV, V), randn(count, HV), randn(count, HV)
        state = randn(HV, V, K)
        rows, columns = (torch.exp(6 - 12 * torch.rand(n, generator=generator)) for n in (V, K))
        scales = torch.ones(3, 1, V)
        scales[1] = rows
        v, state[1] = v * scales[:, None], state[1] * rows[:, None] * columns
        k[2] = randn(1, H, K)[2] + 1e-2 * k[2]
        b[2] = b[2].abs() + 3
        a[2] -= 2
        worst = chain(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), a, b, torch.full((HV,), -5.0), torch.zeros(HV), state,
            scales, TOKENS,
        )  # fmt: skip
    for name, errors in worst.items():
        # In a round of the third request the outputs may nearly cancel as well.
        limits = (1e-6, 3e-6, 5e-6 if "state" in name else 2e-5)
        for error, limit in zip(errors.tolist(), limits, strict=True):
            assert error < limit, (name, {key: value.tolist() for key, value in worst.items()})
