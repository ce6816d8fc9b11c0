"""Replay decoding for Hugging Face transformers models (``docs/hf.md``)."""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("replayssm.hf needs transformers 5.17 or newer: pip install 'replayssm[hf]'") from error

from replayssm.hf.attach import attach, detach
from replayssm.hf.cache import ReplayCache
from replayssm.hf.custom import custom_generate
from replayssm.hf.generate import generate
from replayssm.hf.score import score
from replayssm.hf.stats import GenerationStats

__all__ = ["GenerationStats", "ReplayCache", "attach", "custom_generate", "detach", "generate", "score"]
