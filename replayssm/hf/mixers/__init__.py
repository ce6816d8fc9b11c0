"""Recurrent mixers of transformers models: what each family needs to run from a replay pool."""

from __future__ import annotations

from replayssm.hf.mixers import mamba2

# transformers' config.model_type -> adapter module.
FAMILIES = {"mamba2": mamba2}
