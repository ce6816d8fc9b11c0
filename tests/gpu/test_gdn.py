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
bf16, f16 = torch.bfloat16, torch.float16
SIMT = {"backend": ("simt",)}


def few(test, **cases):
    """The test with the given values of its parameters alone; parameters that go together are joined by ``_``."""
    copy = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy.pytestmark = []
    for mark in test.pytestmark:
        names = mark.args[0] if isinstance(mark.args[0], str) else "_".join(mark.args[0])
        values = cases.pop(names, mark.args[1])
        copy.pytestmark.append(pytest.mark.parametrize(mark.args[0], values).mark)
    assert not cases, f"{test.__name__} has no parameters {list(cases)}"
    return copy


@pytest.fixture(autouse=True)
def _on_the_device():
    with torch.device("cuda"):
        yield


verify, commit, lazy, ops = test_gdn_verify, test_gdn_commit, test_gdn_lazy, test_gdn_ops
test_frozen = few(verify.test_frozen_with_windows, shape=((17, 5, 2, 8), (2, 8, 3, 3)), **SIMT)
test_variants = few(verify.test_variants, T=(2,), **SIMT)
test_types = few(verify.test_types_of_states_and_inputs, dtype=(bf16,), state_dtype=(bf16, f16), **SIMT)
test_sizes = few(verify.test_sizes, sizes=((3, 6, 256, 2), (2, 14, 33, 65)), **SIMT)
test_separate_write_slots = few(verify.test_separate_write_slots, **SIMT)
test_scatter = few(verify.test_scatter_equals_snapshots_equals_updates, batch_T=((3, 4),), **SIMT)
test_memory = few(
    verify.test_a_request_has_the_same_bits_in_any_batch_order_and_memory, sizes=((1, 3, 65, 33),), **SIMT
)  # fmt: skip
test_nan_in_one_request = few(verify.test_nan_in_one_request_leaves_the_others_alone, **SIMT)
test_later_tokens = verify.test_simt_outputs_do_not_see_later_tokens
test_narrow_windows = few(verify.test_narrow_windows_round_what_is_used, window_dtype=(bf16,))
test_all_padding = verify.test_all_padding_and_no_requests

test_two_rounds = few(commit.test_two_rounds_of_every_prefix, T=(8,), norm=(True, False), track=(True,), **SIMT)
test_null_block = commit.test_null_block
test_types_and_strides = few(
    commit.test_types_and_strides, state_dtype=(bf16,), index_dtype=(torch.int32, torch.int64), **SIMT
)  # fmt: skip
test_nothing_to_do = commit.test_nothing_to_do
test_a_thousand_rounds = few(commit.test_a_thousand_rounds_of_random_accepts, **SIMT)
test_where_memory_starts = few(commit.test_where_memory_starts_does_not_matter, accepted=(6,), **SIMT)
test_materialize = few(commit.test_materialize_writes_what_a_commit_would, norm=(True,), **SIMT)
test_materialize_from_a_ring = few(commit.test_materialize_from_a_ring, rows=(80,), **SIMT)

test_lazy_types = few(lazy.test_mixed_batch_of_every_dtype, dtype=(bf16,), state_dtype=(bf16, f16))
test_the_ring_wraps = few(lazy.test_the_ring_wraps_at_every_row, start=(0, 7, 12))
test_lengths = few(
    lazy.test_lengths_and_the_edge_of_the_window, T_window_live=((1, 16, (15, 16)), (5, 64, (64, 59, 60)))
)  # fmt: skip
test_lazy_sizes = few(lazy.test_sizes, sizes=((3, 6, 256, 2), (2, 14, 33, 65)), backend=("tensor_core",))
test_lazy_extreme_gates = lazy.test_extreme_gates
test_lazy_equals_committing = few(lazy.test_lazy_equals_committing_every_step, backend=("auto",), dtype=(bf16,))
test_lazy_bits = few(
    lazy.test_a_request_has_the_same_bits_in_any_batch_order_cursor_and_memory, K=(65,), backend=("tensor_core",)
)  # fmt: skip
test_lazy_nan = lazy.test_nan_in_one_request_leaves_the_others_alone
test_lazy_padding = few(lazy.test_padding_touches_nothing, pad=(2,))
test_lazy_op = lazy.test_the_op_of_torch_library

test_opcheck_mtp = few(ops.test_opcheck_mtp, windows=(True,), **SIMT)
test_opcheck_commit_and_materialize = ops.test_opcheck_commit_and_materialize
test_compiled = ops.test_verify_and_commit_compiled_equal_eager
