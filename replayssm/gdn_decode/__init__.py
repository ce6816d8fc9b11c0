"""Gated DeltaNet decoding: verify, commit, materialize on windows of raw inputs, and a lazy ring (``docs/maths.md``).

Two ways to decode speculatively. For engines: ``gated_delta_rule_mtp`` verifies all drafts from a frozen checkpoint and
keeps their inputs in windows, ``gated_delta_rule_replayssm_commit`` then applies the accepted prefix in all layers.
For everybody else ``gated_delta_rule_checkpointing``: one call a step, and a checkpoint written once in several steps.
"""

from __future__ import annotations

from replayssm.gdn_decode.lazy import gated_delta_rule_checkpointing
from replayssm.gdn_decode.recorded import gated_delta_rule_replayssm_commit, gated_delta_rule_replayssm_materialize
from replayssm.gdn_decode.verify import gated_delta_rule_mtp

__all__ = [
    "gated_delta_rule_checkpointing",
    "gated_delta_rule_mtp",
    "gated_delta_rule_replayssm_commit",
    "gated_delta_rule_replayssm_materialize",
]
