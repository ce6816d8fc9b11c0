"""``pin_mamba_ssm`` against modules that look like mamba_ssm's."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from replayssm.ssd import pin, pin_mamba_ssm

if torch.cuda.is_available():
    pytest.skip("with a GPU the sums are compared too: tests/gpu", allow_module_level=True)
MODULE = "mamba_ssm.ops.triton.ssd_chunk_state"


def config(heads, warps=4, name="BLOCK_SIZE_H"):
    return SimpleNamespace(kwargs={name: heads}, num_warps=warps)


@pytest.fixture
def installed(monkeypatch):
    """A module in mamba_ssm's place whose kernel has the configs that a test gives it."""
    names = MODULE.split(".")
    for end in range(1, len(names)):
        package = ModuleType(".".join(names[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    module = ModuleType(MODULE)
    module._chunk_cumsum_fwd_kernel = SimpleNamespace(configs=[], cache={("key",): "chosen"})
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def test_only_the_class_of_eight_heads_and_four_warps_stays(installed):
    configs = [config(1), config(4), config(8, warps=8), config(8), config(16), config(64)]
    installed._chunk_cumsum_fwd_kernel.configs = configs
    pin_mamba_ssm()
    assert installed._chunk_cumsum_fwd_kernel.configs == [configs[3]]
    assert installed._chunk_cumsum_fwd_kernel.cache == {}
    pin_mamba_ssm()
    assert len(installed._chunk_cumsum_fwd_kernel.configs) == 1


def test_without_mamba_ssm(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    with pytest.raises(ImportError, match=r"pin_mamba_ssm: mamba_ssm\.ops.*cannot be imported.*install mamba_ssm"):
        pin_mamba_ssm()


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "autotuned configs of BLOCK_SIZE_H"),
        ([config(8, name="BLOCK")], "autotuned configs of BLOCK_SIZE_H"),
        ([config(2), config(8, warps=8)], r"BLOCK_SIZE_H = 8 and 4 warps, got \[\(2, 4\), \(8, 8\)\]"),
    ],
)
def test_another_version_is_refused_and_left_alone(installed, configs, message):
    installed._chunk_cumsum_fwd_kernel.configs = configs
    with pytest.raises(RuntimeError, match=message):
        pin_mamba_ssm()
    assert installed._chunk_cumsum_fwd_kernel.configs == configs and installed._chunk_cumsum_fwd_kernel.cache


def test_a_version_without_the_kernel(installed):
    del installed._chunk_cumsum_fwd_kernel
    with pytest.raises(RuntimeError, match="this version of mamba_ssm is not known"):
        pin_mamba_ssm()


def test_on_a_device_the_sums_are_compared(installed, monkeypatch):
    installed._chunk_cumsum_fwd_kernel.configs = [config(8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compared = []
    monkeypatch.setattr(pin, "_verify", compared.append)
    pin_mamba_ssm()
    assert compared == [installed]
