"""Loading a model or tokenizer by folder or hub id, with errors of one line and without a minute of silent retries."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session

from replayssm import models

_MOST_REASON = 300  # characters of another library's message
_PATIENCE = 5.0  # seconds for the hub's first answer


class LoadError(Exception):
    """Something cannot be loaded; the message names it and the reason, in one line."""


def load_pretrained(loader: Any, name: str, what: str, **options: Any) -> Any:
    """Call ``loader.from_pretrained`` for a command.

    That a hub is asked is told on stderr. One that does not answer at once is not tried again: what earlier runs have
    stored is used then.

    Args:
        loader: an Auto class of transformers.
        name: a shipped model, a folder, or a hub id.
        what: what is loaded, for messages.
        options: passed on.

    Returns:
        What the loader returns.

    Raises:
        LoadError: the name cannot be either, or loading fails.
    """
    folder = models.path(name) if name in models.NAMES else Path(name)
    # What begins like a path or has more parts than a hub id can only be a folder.
    if not folder.is_dir() and (folder.exists() or name[:1] in ("", ".", "/", "~") or len(folder.parts) > 2):
        raise LoadError(f"cannot load the {what} from '{name}': it is neither a folder nor a hub id")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise LoadError(f"cannot load the {what} from '{name}': the folder has no config.json")
    unreachable = None
    if not folder.is_dir() and not constants.HF_HUB_OFFLINE:
        sys.stderr.write(f"replayssm: asking {constants.ENDPOINT} for the {what} '{name}'\n")
        unreachable = _unreachable()
    if unreachable is not None:
        options |= {"local_files_only": True}
    try:
        return loader.from_pretrained(str(folder) if folder.is_dir() else name, **options)
    except Exception as error:  # a broken file raises whatever its parser does
        reason = _line(error)
        if unreachable is not None:
            reason = f"{constants.ENDPOINT} cannot be reached ({unreachable}), and nothing is stored here"
        near = [] if folder.is_dir() else get_close_matches(name.rstrip("/"), models.NAMES, 1)
        hint = f"; did you mean the shipped model {near[0]}?" if near else ""
        raise LoadError(f"cannot load the {what} from '{name}': {reason}{hint}") from None


def _unreachable() -> str | None:
    """Why the hub does not answer, None if it does, whatever it says."""
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
    except Exception as error:  # the errors of whichever client the hub's library uses, proxies among them
        return _line(error)
    return None


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_REASON else f"{text[:_MOST_REASON]}..."
