"""The examples run and show what they claim."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch):
    """Import an example as running it would: its folder comes first in the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_decode(example):
    assert 0 < example("decode").main() < 1e-4


def test_prefix(example):
    assert example("prefix").main()


def test_speculative(example, capsys):
    pytest.importorskip("transformers")
    texts = example("speculative").main(new_tokens=24)
    assert len(texts) == 3
    assert capsys.readouterr().out.count("tokens/s") == 3


def test_a_guess_may_be_shorter_than_asked_for(example):
    pytest.importorskip("transformers")
    import torch

    guess = example("speculative").common_successor
    assert guess(torch.tensor([4, 7, 4, 7, 9, 4]), 3).tolist() == [7, 4, 7]
    assert guess(torch.tensor([4, 7, 9]), 3).tolist() == []
