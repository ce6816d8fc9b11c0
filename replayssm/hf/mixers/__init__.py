"""Recurrent mixers of transformers models: what each family needs to run from a replay pool.

An adapter module has ``OPS``, the op family that it runs on; ``MIXERS``, the names of the mixers' classes; ``ROUTED``,
those of blocks that send every token to experts of its own; ``layer_shape``, ``linears`` and ``bypassed`` of a mixer;
``prepare`` for its weights; ``replay_forward``, which runs it; and ``run_prompt`` where prompts go another way than
through the replay ops.
"""

from __future__ import annotations

from replayssm.hf.mixers import mamba2, qwen3_5, qwen3_next

# transformers' config.model_type -> adapter module.
FAMILIES = {
    "mamba2": mamba2,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
}
