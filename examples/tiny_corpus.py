"""The corpus of the shipped models: Debian's `python3.11-doc` package, its tokenizer and its held-out passages.

    apt-get install python3.11-doc
    python examples/tiny_corpus.py --model-dir replayssm/models/tiny-mamba2 --tokens build/tiny_corpus.npz

reads the reStructuredText sources under /usr/share/doc/python3.11, leaves out twenty whole documents, trains a
byte-level BPE on the others, and writes tokenizer.json, tokenizer_config.json, heldout.json and the token streams that
the recipes, `train_tiny_*.py`, read.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SOURCES = Path("/usr/share/doc/python3.11/html/_sources")
VOCAB_SIZE = 2048
SEPARATOR, PAD = "<|document|>", "<|pad|>"  # ids 0 and 1
SMALLEST_DOCUMENT = 1000  # characters; shorter files are tables of contents
SKIPPED = ("license", "copyright", "library/test")  # licences of others; text that only lists names

# Whole documents that neither the tokenizer nor the model sees: one of every kind of text in the package.
HELD_OUT = (
    "c-api/bytes", "c-api/dict", "c-api/list", "extending/newtypes", "faq/design", "howto/sorting", "howto/urllib2",
    "library/asyncio-queue", "library/calendar", "library/cmd", "library/configparser", "library/heapq",
    "library/imaplib", "library/selectors", "library/shelve", "library/statistics", "library/tempfile",
    "library/zipfile", "reference/simple_stmts", "tutorial/errors",
)  # fmt: skip
# The demo prompt of a model, by the name of its folder: this document, from this heading on.
DEMOS = {
    "tiny-mamba2": ("c-api/bytes", "Bytes Objects"),
    "tiny-gdn-hybrid": ("extending/newtypes", "Type-specific Attribute Management"),
}

PROMPT_TOKENS = (150, 300)  # bounds of a held-out prompt
CONTINUATION_TOKENS = 256  # real text after each prompt, for teacher-forced numbers


def clean(text: str) -> str:
    """Normalise white space; the markup stays, because it is what makes the text look like documentation."""
    text = re.sub(r"[ \t]+$", "", text.replace("\r\n", "\n").expandtabs(8), flags=re.MULTILINE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def read_documents(sources: Path) -> dict[str, str]:
    """Map each document's name, for example ``library/csv``, to its cleaned text."""
    documents = {}
    for file in sorted(sources.rglob("*.rst.txt")):
        name = file.relative_to(sources).as_posix().removesuffix(".rst.txt")
        text = clean(file.read_text(encoding="utf-8"))
        if len(text) >= SMALLEST_DOCUMENT and name not in SKIPPED:
            documents[name] = text
    missing = set(HELD_OUT) - documents.keys()
    if missing:
        raise SystemExit(f"{sources}: expected the held-out documents to be there, missing {sorted(missing)}")
    return documents


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE: any text is encoded without loss, and no token of the vocabulary is out of reach."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[SEPARATOR, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,  # else rulers and table borders take hundreds of entries
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def passage(tokenizer: Tokenizer, text: str, start: int) -> dict[str, str]:
    """A prompt that starts at character ``start`` and ends with a paragraph, and the text that really follows.

    The cut is the last end of a paragraph within `PROMPT_TOKENS`, before the line break: tokens never join a letter to
    the white space after it, but they do join line breaks and indentation, so only there prompt + continuation is
    tokenised as the two parts are.
    """
    low, high = PROMPT_TOKENS
    encoded = tokenizer.encode(text[start:])
    spans = encoded.offsets[: high + CONTINUATION_TOKENS]
    window = text[start : start + spans[min(high, len(spans)) - 1][1]]
    least = spans[low][1]
    cut = window.rfind("\n\n", least)
    prompt = window[: cut if cut >= 0 else window.rfind("\n", least)].rstrip()
    rest = text[start + len(prompt) :]
    length = tokenizer.encode(rest).offsets[:CONTINUATION_TOKENS][-1][1]
    return {"prompt": prompt, "continuation": rest[:length]}


def held_out_passages(tokenizer: Tokenizer, documents: dict[str, str], demo: tuple[str, str]) -> dict[str, object]:
    """One passage of each held-out document, chosen by rule: from the first paragraph after a third of it."""
    passages = []
    for name in HELD_OUT:
        text = documents[name]
        start = re.compile(r"\n{2,}").search(text, len(text) // 3).end()
        passages.append({"document": name, **passage(tokenizer, text, start)})
    name, heading = demo
    start = documents[name].index(f"\n{heading}\n") + 1
    return {"demo": {"document": name, **passage(tokenizer, documents[name], start)}, "passages": passages}


def longest_shared_run(text: bytes, others: bytes, least: int = 40) -> int:
    """Length of the longest run of bytes of ``text`` that ``others`` holds too (0 if below ``least``)."""
    half = least // 2
    pieces = [text[at : at + half] in others for at in range(0, len(text), half)]
    longest, start = 0, 0
    while start + max(least, longest + 1) <= len(text):
        length, piece = max(least, longest + 1), -(-start // half)
        if not pieces[piece]:  # it lies within every run that starts up to there
            start = piece * half + 1
        elif text[start : start + length] in others:
            longest = length
        else:
            start += 1
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, default=SOURCES)
    parser.add_argument("--model-dir", type=Path, required=True, help=f"its name: {' or '.join(DEMOS)}")
    parser.add_argument("--tokens", type=Path, required=True, help="the .npz file of token streams to write")
    args = parser.parse_args()
    args.model_dir.mkdir(parents=True, exist_ok=True)
    args.tokens.parent.mkdir(parents=True, exist_ok=True)

    documents = read_documents(args.sources)
    training = [text for name, text in documents.items() if name not in HELD_OUT]
    tokenizer = train_tokenizer(training)
    save_tokenizer(tokenizer, args.model_dir)

    def stream(texts: list[str]) -> np.ndarray:
        return np.array([i for text in texts for i in [0, *tokenizer.encode(text).ids]], dtype=np.uint16)

    held_out = [documents[name] for name in HELD_OUT]
    streams = {"train": stream(training), "heldout": stream(held_out)}
    np.savez_compressed(args.tokens, **streams)
    heldout = held_out_passages(tokenizer, documents, DEMOS[args.model_dir.name])
    (args.model_dir / "heldout.json").write_text(json.dumps(heldout, indent=1, ensure_ascii=False) + "\n")

    for part, texts in (("train", training), ("heldout", held_out)):
        size = sum(len(text.encode()) for text in texts)
        print(f"{part}: {len(texts)} documents, {size} bytes, {streams[part].size} tokens")
    others = "\0".join(training).encode()
    for entry in [heldout["demo"], *heldout["passages"]]:
        tokens, shared = len(tokenizer.encode(entry["prompt"])), longest_shared_run(entry["prompt"].encode(), others)
        print(f"{entry['document']}: {tokens} tokens, longest run shared with the training text {shared} bytes")


if __name__ == "__main__":
    main()
