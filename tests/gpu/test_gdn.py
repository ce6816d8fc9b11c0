"""Tests of the GDN ops once more, on a CUDA device: kernels against the fp64 reference, both on that device.

A few cases of each, as every size and dtype is a kernel to compile. ``tensor_core`` verify has tests of its own.
"""

import types

import pytest
import test_gdn_commit
import test_gdn_lazy
import test_gdn_ops
import test_gdn_verify
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
SIMT = {"backend": ("simt",)}


def few(test, **cases):
    """The test with the given values of its parameters alone."""
    copy = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy.pytestmark = []
    for mark in getattr(test, "pytestmark", []):
        values = cases.pop(mark.args[0], mark.args[1]) if mark.name == "parametrize" else None
        copy.pytestmark.append(mark if values is None else pytest.mark.parametrize(mark.args[0], values).mark)
    assert not cases, f"{test.__name__} has no parameters {list(cases)}"
    return copy


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device("cuda"):
        yield


verify, commit, lazy, ops = test_gdn_verify, test_gdn_commit, test_gdn_lazy, test_gdn_ops
test_frozen = few(verify.test_frozen_with_windows, shape=((17, 5, 2, 8), (257, 4, 1, 2), (2, 8, 3, 3)), **SIMT)
test_the_sizes_of_models = few(verify.test_the_sizes_of_models, T=(4,), **SIMT)
test_variants = few(verify.test_variants, T=(1, 8), **SIMT)
test_types = few(verify.test_types_of_states_and_inputs, dtype=(bf16, f16), state_dtype=(f32, bf16), **SIMT)
test_sizes = few(verify.test_sizes, **SIMT)
test_separate_write_slots = few(verify.test_separate_write_slots, **SIMT)
test_scatter = few(verify.test_scatter_equals_snapshots_equals_updates, **SIMT)
test_memory = few(verify.test_a_request_has_the_same_bits_in_any_batch_order_and_memory, **SIMT)
test_nan_in_one_request = few(verify.test_nan_in_one_request_leaves_the_others_alone, **SIMT)
test_later_tokens = verify.test_simt_outputs_do_not_see_later_tokens
test_narrow_windows = few(verify.test_narrow_windows_round_what_is_used, window_dtype=(bf16,))
test_all_padding = verify.test_all_padding_and_no_requests
test_output_is_allocated = verify.test_output_is_allocated_with_zeros_for_padding

test_two_rounds = few(commit.test_two_rounds_of_every_prefix, T=(1, 8), norm=(True,), track=(True, False), **SIMT)
test_null_block = commit.test_null_block
test_only_accepted_tokens_are_tracked = commit.test_only_accepted_tokens_are_tracked
test_types_and_strides = few(commit.test_types_and_strides, state_dtype=(f32, bf16), **SIMT)
test_nothing_to_do = commit.test_nothing_to_do
test_commit_equals_snapshots = few(commit.test_commit_equals_snapshots, **SIMT)
test_a_thousand_rounds = few(commit.test_a_thousand_rounds_of_random_accepts, **SIMT)
test_commit_bits = few(commit.test_requests_and_layers_have_their_bits_alone, **SIMT)
test_where_memory_starts = few(commit.test_where_memory_starts_does_not_matter, accepted=(6,), **SIMT)
test_two_gigabytes = commit.test_layers_and_slots_beyond_two_gigabytes_of_elements
test_materialize = few(commit.test_materialize_writes_what_a_commit_would, **SIMT)
test_materialize_from_a_ring = few(commit.test_materialize_from_a_ring, **SIMT)
test_materialize_types = few(commit.test_materialize_against_the_reference_and_null_block, state_dtype=(f16,))

test_lazy_types = few(lazy.test_mixed_batch_of_every_dtype, dtype=(bf16, f16), state_dtype=(f32, bf16))
test_the_ring_wraps = few(lazy.test_the_ring_wraps_at_every_row, start=(0, 7, 12))
test_lengths = lazy.test_lengths_and_the_edge_of_the_window
test_lazy_sizes = lazy.test_sizes
test_narrow_rings = lazy.test_narrow_rings_round_what_is_used
test_lazy_extreme_gates = lazy.test_extreme_gates
test_lazy_equals_committing = few(lazy.test_lazy_equals_committing_every_step, backend=("simt", "auto"), dtype=(bf16,))
test_materialize_stores_what_a_flush_does = lazy.test_materialize_stores_what_a_flush_does
test_lazy_bits = lazy.test_a_request_has_the_same_bits_in_any_batch_order_cursor_and_memory
test_lazy_nan = lazy.test_nan_in_one_request_leaves_the_others_alone
test_lazy_without_indices = lazy.test_without_indices_and_without_output
test_lazy_padding = few(lazy.test_padding_touches_nothing, pad=(-1, 2))
test_lazy_op = lazy.test_the_op_of_torch_library

test_opcheck_mtp = few(ops.test_opcheck_mtp, **SIMT)
test_opcheck_commit_and_materialize = ops.test_opcheck_commit_and_materialize
test_compiled = ops.test_verify_and_commit_compiled_equal_eager
