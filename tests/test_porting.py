"""docs/porting.md: callers of FlashInfer and Megatron-Core find their arguments, in order, with their defaults."""

from __future__ import annotations

import inspect
from math import inf

import pytest
import torch

from replayssm import batch_invariant_decode as exact
from replayssm import gdn_decode, mamba
from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers, MambaBatchInvariantDecode

REQUIRED = inspect.Parameter.empty
MATERIALIZE = (
    "state_ptrs state_slot_strides x_cache_ptrs x_cache_slot_strides B_cache_ptrs B_cache_slot_strides dt_cache_ptrs "
    "dt_cache_slot_strides A_ptrs state_scale_ptrs state_scale_slot_strides src_slots dst_slots ring_start "
    "replay_prefix_len active_request_indices"
)
MTP = "q k v initial_state initial_state_indices A_log a dt_bias b"
CHECKPOINTING = "state x_cache B_cache dt_cache ring_start prev_num_accepted_tokens x dt A B C"
ROWS = "x z dt B C"
DECODE_ROWS = "x z dt A B C chunk_size chunk_starts slots target_rows chunk_flags initial_states out"

# Function: its arguments without a default, in order, then those with one, then keywords.
CALLS = {
    mamba.checkpointing_ssu: (
        CHECKPOINTING,
        dict(out=None, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1,
             state_scale=None, rand_seed=None, philox_rounds=10),
        dict(cu_seqlens=None, max_seqlen=None),
    ),
    mamba.replayssm_materialize: (
        MATERIALIZE,
        {},
        dict.fromkeys(
            ["state_dtype", "input_dtype", "matrixA_dtype", "dim", "dstate", "num_heads", "heads_per_group",
             "max_window", "ring_buffer_len"], REQUIRED)
        | dict(pad_slot_id=-1, rand_seed=None, philox_rounds=0, dependency_inputs=None, dependency_outputs=None),
    ),
    gdn_decode.gated_delta_rule_mtp: (
        MTP,
        dict(scale=None, output=None, intermediate_states_buffer=None, ssm_state_indices=None,
             disable_state_update=None, use_qk_l2norm=True, output_state_indices=None, cache_replayssm=False,
             replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, replayssm_beta=None),
        {},
    ),
    gdn_decode.gated_delta_rule_replayssm_commit: (
        "checkpoint_state rawv_cache rawk_cache g_cache beta_cache state_indices accept_lens",
        {},
        dict(track_state_indices=None, track_steps=None, use_qk_l2norm=True, null_block_id=-1, backend="auto"),
    ),
    BatchInvariantDecodeBuffers.allocate: (
        "max_requests chunk_size nheads headdim ngroups dstate device dtype", {}, {}
    ),
    BatchInvariantDecodeBuffers.seed: (f"self {ROWS} cu_seqlens batch_indices", {}, {}),
    exact.batch_invariant_decode_buffered_scan: (f"buffers {ROWS} A D dt_bias batch_indices ssm_state", {}, {}),
    exact._mamba_chunk_scan_decode_rows: (
        DECODE_ROWS, dict(D=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, inf)), {}
    ),
    exact._masked_update_rows: ("states indices values", {}, {}),
    MambaBatchInvariantDecode: ("mixer", {}, {}),
    MambaBatchInvariantDecode._get_buffers: ("self max_requests x B", {}, {}),
    MambaBatchInvariantDecode.seed: (f"self {ROWS} cu_seqlens batch_indices max_requests", {}, {}),
    MambaBatchInvariantDecode.step: (f"self {ROWS} batch_indices ssm_state", {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_arguments_are_those_of_the_other_library(function):
    """All that one can pass by place stands where it stands there; what we add has a default and is a keyword."""
    required, optional, keywords = CALLS[function]
    expected = dict.fromkeys(required.split(), REQUIRED) | optional
    parameters = inspect.signature(function).parameters
    by_place = {name: each.default for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert list(by_place.items()) == list(expected.items())
    ours = {name: each.default for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert keywords.items() <= ours.items()
    assert REQUIRED not in [default for name, default in ours.items() if name not in keywords]


def test_fields_of_the_buffers():
    """Those of Megatron-Core come first, so that they can be given by place."""
    fields = list(inspect.signature(BatchInvariantDecodeBuffers).parameters.items())
    names = ["x", "z", "dt", "B", "C", "num_buffered", "out", "target_rows", "chunk_flags"]
    assert [name for name, _ in fields[: len(names)]] == names
    assert REQUIRED not in [each.default for _, each in fields[len(names) :]]
    buffers = BatchInvariantDecodeBuffers.allocate(3, 16, 4, 8, 2, 24, torch.device("cpu"), torch.float32)
    shapes = [(3, 16, 4, 8), (3, 16, 4, 8), (3, 16, 4), (3, 16, 2, 24), (3, 16, 2, 24), (3,), (3, 4, 8), (3,), (3,)]
    assert [tuple(getattr(buffers, name).shape) for name in names] == shapes


def test_what_has_no_meaning_here_is_refused_by_name():
    for name in ("d_split", "enable_pdl", "cb_scaled", "cumAdt_vec", "cb_old", "precompute_heads_per_cta", "algorithm"):
        with pytest.raises(TypeError, match=f"'{name}'"):
            mamba.checkpointing_ssu(**{name: None})
