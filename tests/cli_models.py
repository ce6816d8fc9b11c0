"""What tests of the command line share: how it is run, and models that it can load from a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from replayssm.cli import main

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "replayssm"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "xterm", "COLUMNS": "80"}
PROMPT = "to be, or not to be, or to be"


def save_model(folder: Path, seed: int) -> str:
    """A random Mamba-2 model of odd sizes with a tokenizer of single bytes."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.Mamba2Config(
        num_heads=6, head_dim=12, hidden_size=36, state_size=40, n_groups=2, num_hidden_layers=2, vocab_size=256,
        conv_kernel=3, expand=2, chunk_size=16, tie_word_embeddings=True,
        eos_token_id=None, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.Mamba2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def fails(capsys, arguments, exit_code, *fragments):
    """The command prints nothing and ends with one error in its last line, which has these fragments; its stderr."""
    assert main(arguments) == exit_code
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("replayssm: error: ") and err.count("replayssm: error: ") == 1, err
    for fragment in fragments:
        assert fragment in last
    return err
