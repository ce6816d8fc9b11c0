"""Tiles of the chunk scan's kernels: what a GPU has room for, and enough programs for it."""

import pytest

from replayssm.ssd.configs import scan_tile, state_tile

HOPPER, AMPERE = 227 << 10, 163 << 10
SIZES = {"chunk_size": 128, "headdim": 64, "dstate": 128, "input_bytes": 2}


def test_programs_that_do_not_fit_are_not_chosen():
    large = scan_tile(**SIZES, heads_per_group=16, chunk_groups=512, shared=HOPPER)
    small = scan_tile(**SIZES, heads_per_group=16, chunk_groups=512, shared=AMPERE)
    assert (large.rows, large.heads, small.rows, small.heads) == (128, 16, 64, 0)
    stages = [state_tile(**SIZES, heads=128, shared=shared).stages for shared in (HOPPER, AMPERE)]
    assert stages == [3, 2]


@pytest.mark.parametrize(("chunk_groups", "heads"), [(512, 16), (100, 8), (40, 4), (33, 4), (8, 1), (1, 1)])
def test_few_chunks_are_spread_over_more_programs(chunk_groups, heads):
    assert scan_tile(**SIZES, heads_per_group=16, chunk_groups=chunk_groups, shared=HOPPER).heads == heads


def test_few_heads_read_further_ahead():
    assert state_tile(**SIZES, heads=64, shared=HOPPER).stages == 4
    assert state_tile(**SIZES, heads=65, shared=HOPPER).stages == 3
