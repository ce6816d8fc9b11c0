"""Running a prompt through a layer in blocks: the replay ops on a scratch pool whose window holds a whole block.

A block that is folded before the next one is scored is Mamba-2's chunked scan with the chunk as window: each block
reads the state once, and memory does not grow with the prompt. transformers' own scan costs ten times as much on a CPU.
Families that have a ``run_prompt`` go their own way.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from replayssm.cache import Mamba2Layer, ReplayPool

# Tokens of a block, and the largest window that the ops take.
_BLOCK = 64


class Prefill:
    """Scores the prompts of some rows layer by layer, each from an empty state.

    Args:
        family: the adapter of the model's family.
        batch: rows that are prefilled together, all of one length.
        device: of the model.
    """

    def __init__(self, family: ModuleType, batch: int, device: torch.device) -> None:
        self._family, self._batch, self._device = family, batch, device
        self._pools: dict[Mamba2Layer, ReplayPool] = {}

    def run(self, mixer: Any, weights: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run one layer.

        Args:
            mixer: the layer's module.
            weights: what the family's ``prepare`` gave for it.
            hidden_states: ``[batch, tokens, hidden]`` fp32.

        Returns:
            The layer's output ``[batch, tokens, hidden]``, its final state and the inputs of its convolution at the
            last tokens, both as ``ReplayPool.write_state`` takes them and valid until the next call.
        """
        if hasattr(self._family, "run_prompt"):
            return self._family.run_prompt(mixer, weights, hidden_states)
        layer = self._family.layer_shape(mixer)
        pool = self._pools.get(layer)
        if pool is None:
            pool = ReplayPool([layer], self._batch, window=_BLOCK, max_tokens=_BLOCK, device=self._device)
            self._pools[layer] = pool
            slots = pool.allocate(self._batch)
        else:
            slots = torch.arange(self._batch, device=self._device)
            pool.reset(slots)
        buffers, outputs = pool.buffers[0], []
        for part in hidden_states.split(_BLOCK, 1):
            outputs.append(
                self._family.replay_forward(mixer, weights, part, buffers, pool.cursors, slots, pool.window, None)
            )
            tokens = part.shape[1]
            pool.commit(slots, torch.full_like(slots, tokens), tokens)
        pool.materialize(slots, slots, torch.zeros_like(slots), [weights.A])
        history = layer.conv_width - 1
        return torch.cat(outputs, 1), buffers.state, buffers.conv_rows[:, :history].transpose(1, 2)
