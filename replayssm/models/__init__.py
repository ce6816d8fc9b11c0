"""Small trained models that come with the package, so that everything can be tried on real input without a download.

``tiny-mamba2`` is a Mamba-2 language model of 3 million parameters, ``tiny-gdn-hybrid`` one of 4 million with Gated
DeltaNet and, in every fourth layer, attention. Both were trained on Python's documentation; the model cards
(`tiny-*/README.md`) tell the data, the licences, the recipes and the limits.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "demo_prompt", "heldout_prompts", "path"]

NAMES = ("tiny-mamba2", "tiny-gdn-hybrid")


def path(name: str = "tiny-mamba2") -> Path:
    """The folder of a shipped model, for the ``from_pretrained`` of transformers' Auto classes.

    Args:
        name: one of `NAMES`.

    Returns:
        An existing folder with config.json, model.safetensors (bfloat16 on disk; loaded as float32 unless another
        dtype is asked for), the tokenizer, generation_config.json and heldout.json.

    Raises:
        ValueError: no model of this name is shipped.

    Example:
        >>> path().name
        'tiny-mamba2'
    """
    if name not in NAMES:
        raise ValueError(f"name: expected one of the shipped models {', '.join(NAMES)}, got {name!r}")
    return Path(str(files("replayssm.models"))) / name


def demo_prompt(name: str = "tiny-mamba2") -> str:
    """A passage of a document that the model has not seen, of 150 to 300 tokens, which it continues recognisably.

    Args:
        name: one of `NAMES`.

    Returns:
        The text; it ends with a paragraph, without the line break.

    Raises:
        ValueError: no model of this name is shipped.

    Example:
        >>> demo_prompt() in heldout_prompts()
        False
    """
    return _heldout(name)["demo"]["prompt"]


def heldout_prompts(name: str = "tiny-mamba2") -> list[str]:
    """Twenty passages of 150 to 300 tokens, each of another document that the model has not seen.

    Args:
        name: one of `NAMES`.

    Returns:
        The texts, in the order of their documents' names. They were chosen by rule (the paragraphs after the first
        third of the document), not by how well the model continues them.

    Raises:
        ValueError: no model of this name is shipped.

    Example:
        >>> len(heldout_prompts())
        20
    """
    return [passage["prompt"] for passage in _heldout(name)["passages"]]


def _heldout(name: str) -> dict[str, Any]:
    return json.loads((path(name) / "heldout.json").read_text(encoding="utf-8"))
