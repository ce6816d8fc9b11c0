"""FlashInfer's and fla's GDN ops beside ours: called with the same buffers, or what they took in another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from replayssm.bench import Row
from replayssm.bench.peers import ELSEWHERE, THIS_RUN, installed, on_an_h200, timed
from replayssm.bench.timing import Timer

# By column of a table: the package, and what makes its calls when it is here.
CallsOf = Mapping[str, tuple[str, Callable[[], Sequence[Callable[[], Callable[[], object]]]]]]

# On one H200, torch 2.11, fp32 state, K = V = 128, bf16. Microseconds by batch.
PUBLISHED = f"FlashInfer 0.7.4, fla-core 0.6.0, {ELSEWHERE}"
_MODULES = {"flashinfer-python": "flashinfer", "fla-core": "fla"}
_BATCHES = (1, 16, 64, 256)
_MTP: dict[tuple[int, int, int], dict[str, tuple[float, ...]]] = {
    (32, 16, 4): {
        "frozen": (5.3, 26.3, 79.6, 286.4), "snapshots": (7.5, 51.7, 188.5, 723.7),
        "fla": (5.9, 32.4, 103.2, 385.3),
    },
    (32, 16, 8): {
        "frozen": (7.7, 49.8, 165.6, 617.3), "snapshots": (9.8, 96.0, 348.7, 1347.0),
        "fla": (10.1, 50.3, 161.4, 600.8),
    },
    (8, 4, 4): {
        "frozen": (3.9, 11.4, 26.4, 79.5), "snapshots": (5.2, 15.0, 51.9, 187.7), "fla": (5.3, 11.1, 32.3, 104.1),
    },
    (8, 4, 8): {
        "frozen": (5.2, 18.1, 49.8, 166.5), "snapshots": (6.8, 24.6, 96.7, 349.5), "fla": (9.0, 17.2, 50.8, 161.5),
    },
}  # fmt: skip
_UPDATE: dict[tuple[int, int], dict[str, tuple[float, ...]]] = {
    (32, 16): {"flashinfer": (3.4, 19.5, 68.8, 265.0), "fla": (3.0, 20.0, 69.9, 262.0)},
}


def beside(timer: Timer, peers: bool, calls_of: CallsOf, published: dict[str, float | None]) -> Row:
    """Return the other libraries' columns: measured, if that is asked for and one is here, else published.

    Args:
        timer: on the GPU.
        peers: measure.
        calls_of: by column, the package and what makes its calls.
        published: by column.
    """
    packages = dict.fromkeys(package for package, _ in calls_of.values())
    found = {package: installed(package, _MODULES[package]) if peers else None for package in packages}
    if any(found.values()):
        times = {
            column: timed(timer, package, make()) if found[package] else None
            for column, (package, make) in calls_of.items()
        }
        names = [f"{package} {version}" for package, version in found.items() if version]
        return times | {"peers": ", ".join([*names, THIS_RUN])}
    if not on_an_h200():
        return dict.fromkeys((*published, "peers"))
    return published | {"peers": PUBLISHED if any(published.values()) else None}


def published_mtp(heads: int, keys: int, tokens: int, batch: int) -> dict[str, float | None]:
    """Microseconds of ``gated_delta_rule_mtp``, frozen and with a state stored per token, and of fla's recurrence."""
    columns = {"frozen": "flashinfer_frozen_us", "snapshots": "flashinfer_snapshots_us", "fla": "fla_us"}
    return _at(_MTP.get((heads, keys, tokens)), columns, batch)


def published_update(heads: int, keys: int, batch: int) -> dict[str, float | None]:
    """Microseconds of one token that updates the state in place."""
    return _at(_UPDATE.get((heads, keys)), {"flashinfer": "flashinfer_update_us", "fla": "fla_us"}, batch)


def _at(known: dict[str, tuple[float, ...]] | None, columns: dict[str, str], batch: int) -> dict[str, float | None]:
    if known is None or batch not in _BATCHES:
        return dict.fromkeys(columns.values())
    return {column: known[name][_BATCHES.index(batch)] for name, column in columns.items()}


def flashinfer_mtp(buffers: dict[str, Any], snapshots: bool) -> Callable[[], object]:
    """Return FlashInfer's verify on our buffers: states frozen, or stored per token."""
    from flashinfer.gdn_decode import gated_delta_rule_mtp as run

    names = ("q", "k", "v", "initial_state", "initial_state_indices", "A_log", "a", "dt_bias", "b", "output")
    arguments = {name: buffers[name] for name in names} | {"disable_state_update": True}
    if snapshots:
        batch, tokens = buffers["q"].shape[:2]
        shape = (batch, tokens, *buffers["initial_state"].shape[1:])
        arguments["intermediate_states_buffer"] = torch.empty(shape, device=buffers["q"].device)
    return lambda: run(**arguments)


def flashinfer_update(buffers: dict[str, Any]) -> Callable[[], object]:
    """Return FlashInfer's update of one token, in place."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as run

    names = ("q", "k", "v", "initial_state", "A_log", "a", "dt_bias", "b")
    return lambda: run(*(buffers[name] for name in names), output=buffers["output"])


def fla_recurrence(buffers: dict[str, Any]) -> Callable[[], object]:
    """Return fla's recurrence, which stores the last state elsewhere; gates are given."""
    from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule as run

    g, beta = -torch.rand_like(buffers["a"], dtype=torch.float32), torch.rand_like(buffers["b"], dtype=torch.float32)
    options = {
        "g": g, "beta": beta, "initial_state": buffers["initial_state"], "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "state_v_first": True,
    }  # fmt: skip
    return lambda: run(buffers["q"], buffers["k"], buffers["v"], **options)
