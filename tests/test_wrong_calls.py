"""Every public function, given one wrong argument after the other.

Its error names one of its own arguments in the words of ``replayssm.checks``, and nothing has been written.
"""

import pytest
from spoiling import complaints
from wrong_calls import CALLS

from replayssm import (
    batch_invariant_decode,
    cache,
    conv,
    gdn_decode,
    gumbel,
    mamba,
    rms_norm,
    row_product,
    ssd,
)

# What results consist of, what pools allocate, what takes a module of another library, what takes nothing.
NOT_CALLED = {
    "CapacityError", "ExactMamba2Buffers", "GDNBuffers", "Mamba2Buffers", "SlotBytes", "StateTraffic",
    "BatchInvariantDecodeBuffers", "MambaBatchInvariantDecode", "pin_mamba_ssm",
}  # fmt: skip
ARGUMENTS = [(name, argument) for name, make in CALLS.items() for argument in make().every()]


def test_no_public_function_is_forgotten():
    called = {getattr(make().function, "__name__", "") for make in CALLS.values()}
    families = batch_invariant_decode, cache, conv, gdn_decode, gumbel, mamba, rms_norm, row_product, ssd
    public = {name for family in families for name in family.__all__}
    assert public - called == NOT_CALLED
    methods = {name for name in vars(cache.ReplayPool) if not name.startswith("_")}
    assert methods - called == {"num_free", "bytes", "bytes_per_slot", "bytes_by_field", "per_slot"}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_to_be_spoiled_is_right(name):
    call = CALLS[name]()
    call.function(**call.every())


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_errors_name_an_argument_and_nothing_is_written(name, argument):
    found = complaints(CALLS[name], argument)
    assert not [each for each in found if each[1]]
    assert any(each is None for _, each in found), "every value was taken"
