"""What the tests of ops as torch.library sees them, and those of wrong calls, have in common."""

import re

import pytest
import torch

OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def handed_to(module, name, run):
    """The arguments that a public function, called by ``run``, hands to the op under this name in its module."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *args: seen.append(args))
        run()
    return seen[0]


def refuse_call(function, call, message, error=ValueError, **changes):
    """``function`` refuses a call with some of its arguments changed, and has written nothing."""
    arguments, before = {**call.arguments(), **changes}, call.memory()
    with pytest.raises(error, match=re.escape(message)):
        function(**arguments)
    for name, after in call.memory().items():
        assert torch.equal(after, before[name]), f"{name} was written before the error"
