"""Recurrent mixers of transformers models: what each family needs to run from a replay pool.

An adapter module has ``OPS``, the op family that it runs on; ``MIXERS``, the names of the mixers' classes; ``GATED``,
those of gated feed-forward blocks; ``ROUTED``, those of blocks that send every token to experts; ``layer_shape``,
``linears``, a mixer's linear layers, which are not called but computed from their weights, like its ``conv1d``;
``prepare`` for its weights, ``derive`` for those of them that are computed from parameters; ``run_prompt``, which runs
it over a prompt; and ``replay_forward``, which goes on from there. An adapter of exact decode has ``layer_shape``,
``prepare``, ``run_prompt`` and ``replay_forward`` of its own; the rest is that of the family.
"""

from __future__ import annotations

from replayssm.hf.mixers import mamba2, mamba2_exact, qwen3_5, qwen3_next

# transformers' config.model_type -> adapter module.
FAMILIES = {
    "mamba2": mamba2,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
}
# Those of exact decode.
EXACT_FAMILIES = {"mamba2": mamba2_exact}
