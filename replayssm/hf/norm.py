"""Normalisations of transformers, in one launch each on a GPU and in few operations on a CPU.

Between its matrix products a decoder is many small operations, each of which costs the same whatever its size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from replayssm.rms_norm import rms_norm


class _Kind(NamedTuple):
    eps: str
    offset: float = 0.0
    gate_first: bool = True


# Classes of transformers: the attribute that holds eps, what is added to the weight, whether a gate comes first.
_KINDS = {
    "Mamba2RMSNorm": _Kind("variance_epsilon"),
    "MambaRMSNormGated": _Kind("variance_epsilon"),
    "Qwen3NextRMSNorm": _Kind("eps", offset=1.0),
    "Qwen3NextRMSNormGated": _Kind("variance_epsilon", gate_first=False),
    "Qwen3_5RMSNorm": _Kind("eps", offset=1.0),
    "Qwen3_5RMSNormGated": _Kind("variance_epsilon", gate_first=False),
    "Qwen3_5MoeRMSNorm": _Kind("eps", offset=1.0),
    "Qwen3_5MoeRMSNormGated": _Kind("variance_epsilon", gate_first=False),
}


class Norm(nn.Module):
    """Stands for a normalisation of transformers.

    Args:
        module: the module that it stands for, ``is_known``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        kind = _KINDS[type(module).__name__]
        # Not as a child: what looks at modules shall find it once.
        self._module: tuple[Any] = (module,)
        self._eps = float(getattr(module, kind.eps))
        self._offset, self._gate_first = kind.offset, kind.gate_first
        # Blocks convert their activations to the type of the norm's weight: to fp32, whatever the weight is stored as.
        self.weight = torch.empty(0, dtype=torch.float32)
        weight: Any = module.weight
        self._scale = None if pays(weight.device) else self._offset + weight.detach().float()

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise ``x`` fp32 ``[..., channels]``, with a gate of its shape if the module takes one."""
        if self._scale is not None:
            return self._on_cpu(x, gate, self._scale)
        out = rms_norm(
            x.reshape(-1, x.shape[-1]),
            self._module[0].weight.detach(),
            None if gate is None else gate.reshape(-1, gate.shape[-1]),
            eps=self._eps,
            offset=self._offset,
            gate_first=self._gate_first,
        )
        return out.view(x.shape)

    def _on_cpu(self, x: Tensor, gate: Tensor | None, scale: Tensor) -> Tensor:
        """In the order that transformers' own modules have."""
        if gate is not None and self._gate_first:
            x = x * _silu(gate)
        out = (x * (x * x).mean(-1, keepdim=True).add_(self._eps).rsqrt_()).mul_(scale)
        return out if gate is None or self._gate_first else out.mul_(_silu(gate))


def _silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``; torch's own gives other bits near the end of a tensor, whatever row lies there."""
    return x / x.neg().exp_().add_(1)


def pays(device: torch.device) -> bool:
    """Whether launches and bytes read are what a round costs on a device."""
    return device.type != "cpu"


def is_known(module: Any) -> bool:
    """Whether a module is one of transformers' normalisations, as it came."""
    kind: type = type(module)
    as_it_came = not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
    if kind.__name__ not in _KINDS or not kind.__module__.startswith("transformers.models.") or not as_it_came:
        return False
    # Newer versions of transformers may normalise group by group.
    channels = module.weight.shape[0]
    return bool(getattr(module, "activation", "silu") == "silu" and getattr(module, "group_size", channels) == channels)


def in_one_launch(module: nn.Module) -> nn.Module:
    """A ``Norm`` in place of a module that ``is_known``, any other module itself."""
    return Norm(module) if is_known(module) else module
