"""Every public function, given one wrong argument after the other.

Its error names one of its own arguments in the words of ``replayssm.checks``, and nothing has been written.
"""

import pytest
from spoiling import complaints
from wrong_calls import CALLS

ARGUMENTS = [(name, argument) for name, make in CALLS.items() for argument in make().every()]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_to_be_spoiled_is_right(name):
    call = CALLS[name]()
    call.function(**call.every())


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_errors_name_an_argument_and_nothing_is_written(name, argument):
    found = complaints(CALLS[name], argument)
    assert not [each for each in found if each[1]]
    assert any(each is None for _, each in found), "every value was taken"
