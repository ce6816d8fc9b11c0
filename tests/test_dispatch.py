"""An op runs its family's code for the device of its tensors, with that device as the current one."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from replayssm import dispatch


@contextmanager
def made_current(device):
    made_current.devices.append(device)
    yield
    made_current.devices.append(None)


@pytest.mark.parametrize(("index", "made"), [(0, []), (1, [torch.device("cuda", 1), None])])
def test_kernels_go_to_the_device_of_the_tensors(monkeypatch, index, made):
    made_current.devices, calls = [], []
    tensor = SimpleNamespace(device=torch.device("cuda", index))
    family = SimpleNamespace(op=lambda *args: calls.append((args, list(made_current.devices))))
    monkeypatch.setattr(dispatch, "implementation", lambda name, device: {("ops", tensor.device): family}[name, device])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", made_current)
    dispatch.by_device("ops", "op")(tensor, 3)
    assert calls == [((tensor, 3), made[:1])] and made_current.devices == made


def test_values_are_looked_at_in_the_checked_mode_only(monkeypatch):
    calls = []
    monkeypatch.setattr(
        dispatch, "implementation", lambda *_: SimpleNamespace(op=lambda *args: calls.append(("op", args[1])))
    )
    run = dispatch.by_device("ops", "op", lambda *args: calls.append(("check", args[1])))
    monkeypatch.delenv("REPLAYSSM_CHECK", raising=False)
    run(torch.zeros(1), 1)
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    run(torch.zeros(1), 2)
    assert calls == [("op", 1), ("check", 2), ("op", 2)]


@pytest.mark.parametrize(
    ("device", "capability", "interpret", "expected"),
    [("cpu", (9, 0), False, False), ("cuda:1", (8, 9), False, False), ("cuda:1", (9, 0), True, False),
     ("cuda:1", (9, 0), False, True), ("cuda:1", (10, 3), False, True)],
)  # fmt: skip
def test_kernels_overlap_from_sm90_on(monkeypatch, device, capability, interpret, expected):
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs.runtime, "interpret", interpret)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {torch.device("cuda", 1): capability}.__getitem__)
    assert dispatch.overlaps.__wrapped__(torch.device(device)) is expected
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert dispatch.overlaps.__wrapped__(torch.device(device)) is False
