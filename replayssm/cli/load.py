"""What a command runs on: the prompt, the model, its tokenizer and the draft model."""

from __future__ import annotations

import argparse
import logging
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm import models
from replayssm.cli.errors import CommandError, UsageError

SMALL = 50_000_000  # parameters; the matrices of a smaller model are done before a second thread has joined


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate.

    Attributes:
        name: what the user called it.
        model: the transformers model, in the dtype and on the device asked for.
        tokenizer: its tokenizer.
        draft_model: a smaller model that drafts, or None.
        input_ids: the prompt, int64 ``[1, tokens]``.
    """

    name: str
    model: Any
    tokenizer: Any
    draft_model: Any
    input_ids: Tensor

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids``, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def load(options: argparse.Namespace) -> Loaded:
    """Read the prompt, then load what ``options`` names; the cheap checks come first.

    Raises:
        UsageError: no prompt, or a device of no known kind.
        CommandError: transformers or the device is missing.
        LoadError: a model cannot be loaded.
    """
    device = _device(options.device)
    prompt = read_prompt(options)
    try:
        import transformers
    except ImportError:
        raise CommandError("generate needs transformers: pip install 'replayssm[hf]'") from None
    # Its progress bars and advice would land in the middle of the text.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # five retries without a network, two lines each

    from replayssm.hf.pretrained import load_pretrained

    name = options.model or models.NAMES[0]
    dtype = getattr(torch, options.dtype)
    tokenizer = load_pretrained(transformers.AutoTokenizer, name, "tokenizer")
    model = load_pretrained(transformers.AutoModelForCausalLM, name, "model", dtype=dtype)
    if model.num_parameters() < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    draft = None
    if options.draft not in ("none", "lookup"):
        draft = load_pretrained(transformers.AutoModelForCausalLM, options.draft, "draft model", dtype=dtype)
        draft = draft.to(device).eval()
    input_ids = tokenizer(prompt, return_tensors="pt").input_ids
    if input_ids.shape[1] == 0:
        raise UsageError("the prompt has no tokens; does the model come with a tokenizer?")
    return Loaded(name, model.to(device).eval(), tokenizer, draft, input_ids.to(device))


def read_prompt(options: argparse.Namespace) -> str:
    """Return the text to continue: given, from a file, from standard input, or a shipped model's demo prompt."""
    if options.prompt is not None:
        prompt = options.prompt
    elif options.prompt_file not in (None, "-"):
        try:
            prompt = Path(options.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            raise CommandError(f"cannot read the prompt file {options.prompt_file}: {cause}") from None
    elif options.prompt_file == "-" or _is_piped(sys.stdin):
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise CommandError(f"cannot read the prompt from standard input: {error}") from None
    elif options.model is None or options.model in models.NAMES:
        prompt = models.demo_prompt(options.model or models.NAMES[0])
    else:
        raise UsageError("no prompt: give --prompt TEXT, --prompt-file FILE or pipe it in")
    if not prompt:
        raise UsageError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes that Python passes through as lone surrogates, as some locales have it
        raise CommandError("the prompt is not UTF-8 text") from None
    return str(prompt)


def _is_piped(stream: Any) -> bool:
    """Whether somebody sends text: a pipe, a file or a socket, but neither a terminal nor /dev/null."""
    try:
        return not stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):
        return False


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device: '{name}' is no torch device; use 'cpu' or 'cuda'") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CommandError(f"--device: torch sees {torch.cuda.device_count() or 'no'} CUDA device(s) here")
    return device
