"""The CPU's tests of the chunk scan and of exact decode, on a CUDA device: those of one size, which compile little."""

import pytest
import torch
from test_exact_decode import (  # noqa: F401
    test_a_neighbour_full_of_nan,
    test_a_poisoned_previous_tenant,
    test_a_rounded_copy_of_the_state_is_all_that_is_read,
    test_all_lanes_cross_in_one_call_in_any_order,
    test_inactive_lanes,
    test_large_dt_and_strong_decay,
    test_prefill_in_pieces_then_decode,
    test_seed_neither_reads_nor_copies_padding,
    test_seed_of_an_empty_sequence_empties_the_slot,
    test_seed_skips_sequences_that_are_padding,
    test_the_token_that_fills_a_chunk,
    test_three_runs,
    test_two_slots_in_one_call_and_in_any_lane,
    test_views_with_strides,
    test_weak_decay_shows_a_rounded_carry,
)
from test_exact_ops import test_compiled_equals_eager, test_opcheck_step  # noqa: F401
from test_exact_schedule import (  # noqa: F401
    test_a_draft_across_a_boundary,
    test_a_prefill_piece_after_lazily_folded_decode,
    test_chunk_states_are_those_that_new_tokens_complete,
    test_the_ring_goes_around_many_times,
    test_the_whole_draft_is_scored_whatever_is_accepted_later,
    test_verification_with_everything_accepted,
)
from test_ssd_splits import (  # noqa: F401
    test_a_sequence_in_any_pack,
    test_every_split_point,
    test_later_tokens_reach_no_earlier_output,
    test_places_in_memory_and_strides,
)
from test_ssd_values import (  # noqa: F401
    test_limits_of_dt,
    test_no_tokens_at_all,
    test_packed_sequences,
    test_padding_is_neither_read_nor_written,
    test_the_rows_of_chunk_states,
    test_weak_decay_over_many_chunks,
    test_without_softplus_a_negative_dt_is_clamped,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("made_on_the_device"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
