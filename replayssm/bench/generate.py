"""Tokens per second of whole generations: transformers' own generate, and ours with and without look-up drafts.

Greedy, without end tokens, prompts of one length. Before anything is timed, every token that we chose must be the one
that transformers' forward over the whole text finds most likely, but for rounding; ``gap`` is the largest distance
from it, in standard deviations of the scores. In fp32 on the CPU all ways must give the same ids. ``same_drafts`` and
``same_transformers`` are the shares of sequences that do. ``a round`` is tokens per forward, of all sequences together,
``in a graph`` the share of our forwards that a CUDA graph replayed, ``transformers written`` what it came to in time.
With exact decode, which must give the same ids with drafts as without, ``cost`` is how much slower it is.
"""

from __future__ import annotations

import copy
import re
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from replayssm import models
from replayssm.bench import RANDOM_MODELS, BadOption, Case, GenerateOptions, Row, Tables, WrongAnswer
from replayssm.bench.plot import Panel, Plot, Series
from replayssm.bench.timing import Timer
from replayssm.bench.ways import Generated, Way, by_replay, by_transformers, measure
from replayssm.hf import attach
from replayssm.hf.pretrained import load_pretrained

_TABLE = "generate-"  # a table, and a CSV file, per model and dtype
_VOCABULARY = 50288
_PUBLISHED_CHUNK = 256
_LARGEST_GAP = {"float32": 0.02, "bfloat16": 0.5}  # transformers computes in bf16 where the weights are
_CHECKED = 2  # sequences whose scores are compared
_QUICK_TOKENS = 16
_BARS = (  # way, its name in the picture, whether in a colour of ours
    ("look-up", "look-up drafts", True), ("replay", "no drafts", False),
    ("exact look-up", "exact, look-up drafts", True), ("exact", "exact, no drafts", False),
)  # fmt: skip


class _Subject:
    """The model twice, as transformers has it and attached, and prompts for it; loaded when first needed."""

    def __init__(self, options: GenerateOptions) -> None:
        self._options = options
        self.name = Path(options.model).name if options.model is not None else models.NAMES[0]
        if options.random is not None:
            self.name = f"random {options.random}"

    @cached_property
    def theirs(self) -> Any:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model = self._random() if self._options.random is not None else self._load(transformers.AutoModelForCausalLM)
        model = model.to(self._options.device).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    @cached_property
    def ours(self) -> Any:
        return self._attached()

    @cached_property
    def exact(self) -> Any:
        """Another copy: a model keeps the graphs of its two newest sessions, and each way has one."""
        return self._attached()

    def _attached(self) -> Any:
        model = copy.deepcopy(self.theirs)
        if self._options.random is not None:
            for mixer in (module for module in model.modules() if hasattr(module, "chunk_size")):
                mixer.chunk_size = _PUBLISHED_CHUNK
        return attach(model)

    def prompts(self, batch: int) -> Tensor:
        """``[batch, prompt_tokens]``: pieces of the held-out texts from different places on, or random ids."""
        options, length = self._options, self._options.prompt_tokens
        if options.random is not None:
            generator = torch.Generator().manual_seed(1)
            ids = torch.randint(_VOCABULARY, (batch, length), generator=generator)
            return ids.to(options.device)
        tokenizer = self._load(transformers.AutoTokenizer)
        text = tokenizer("".join(models.heldout_prompts()), return_tensors="pt").input_ids[0]
        if len(text) < length:
            raise BadOption(
                f"--prompt-tokens: at most {len(text)} tokens of text are there for this model, got {length}"
            )
        starts = torch.linspace(0, len(text) - length, batch).long().tolist()
        return torch.stack([text[start : start + length] for start in starts]).to(options.device)

    def _load(self, loader: Any) -> Any:
        what = "model" if loader is transformers.AutoModelForCausalLM else "tokenizer"
        extra = {"dtype": getattr(torch, self._options.dtype)} if what == "model" else {}
        return load_pretrained(loader, self._options.model or models.NAMES[0], what, **extra)

    def _random(self) -> Any:
        hidden, layers = RANDOM_MODELS[str(self._options.random)]
        config = transformers.Mamba2Config(
            hidden_size=hidden, num_hidden_layers=layers, state_size=128, head_dim=64, expand=2, n_groups=1,
            num_heads=2 * hidden // 64, vocab_size=_VOCABULARY, tie_word_embeddings=True, initializer_range=0.02,
            chunk_size=32,  # transformers' scan of a prompt takes memory by its square
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(self._options.device):
            model = transformers.Mamba2ForCausalLM(config)
        return model.to(getattr(torch, self._options.dtype))


def cases(options: GenerateOptions) -> list[Case]:
    """See ``replayssm.bench``."""
    if options.random is not None and options.model is not None:
        raise BadOption("--random: expected it alone, got a MODEL too")
    subject = _Subject(options)
    table = re.sub("[^a-z0-9.]+", "-", f"{_TABLE}{subject.name}-{options.dtype}".lower())
    batches = options.batches or ((1,) if options.device == "cpu" or options.quick else (1, 16, 64))
    return [
        Case(table, f"{subject.name}, {options.dtype}, batch {batch}", partial(_run, subject, options, batch))
        for batch in batches
    ]


def _run(subject: _Subject, options: GenerateOptions, batch: int, timer: Timer) -> Row:
    """Check the ids, then time the ways in turn."""
    prompts = subject.prompts(batch)
    count = min(options.max_new_tokens, _QUICK_TOKENS) if options.quick else options.max_new_tokens
    arguments: dict[str, Any] = {
        "input_ids": prompts,
        "num_draft_tokens": options.num_draft_tokens,
        "max_new_tokens": count,
    }
    replay = partial(by_replay, subject.ours, **arguments)
    theirs = partial(by_transformers, subject.theirs, prompts, max_new_tokens=count, max_time=options.patience)
    ways = [Way("transformers", theirs), Way("replay", partial(replay, draft=None)),
            Way("look-up", partial(replay, draft="lookup"))]  # fmt: skip
    if options.exact:
        exact = partial(by_replay, subject.exact, exact=True, **arguments)
        ways += [Way("exact", partial(exact, draft=None)), Way("exact look-up", partial(exact, draft="lookup"))]
    for way in ways:
        way.results = [way.generate()]
    gap = _check(subject, options, prompts, ways)
    row: Row = {
        "model": subject.name, "dtype": options.dtype, "batch": batch, "prompt": prompts.shape[1], "written": count,
        "gap": gap, **_agreement([way.results[0] for way in ways]),
    }  # fmt: skip
    for way in ways[1:]:
        way.generate()  # a GPU's graph is captured when a shape comes for the second time
    measure(ways, 1 if options.quick else options.repeats, warm=True)
    speed = [way.tokens_per_second for way in ways]
    plain, stats = (way.results[-1].stats for way in ways[1:3])
    assert plain is not None and stats is not None
    return row | {
        "transformers written": ways[0].results[-1].ids.shape[1],
        **{f"{way.name} tokens/s": each for way, each in zip(ways, speed, strict=True)},
        **{f"{way.name} cost %": 100 * (1 - each / without)
           for way, each, without in zip(ways[3:], speed[3:], speed[1:3], strict=False)},
        "x transformers": speed[2] / speed[0], "x replay": speed[2] / speed[1],
        "x decode": _decode_speed(ways[2]) / _decode_speed(ways[0]) if ways[0].results[-1].ids.shape[1] > 1 else None,
        "accepted": stats.accept_rate, "a round": (count - 1) * batch / max(stats.rounds, 1),
        "in a graph": (plain.graph_rounds + stats.graph_rounds) / max(plain.rounds + stats.rounds, 1),
    }  # fmt: skip


def _decode_speed(way: Way) -> float:
    return (way.results[-1].ids.numel() - way.results[-1].ids.shape[0]) / way.decode_seconds


def _agreement(results: list[Generated]) -> Row:
    """Shares of sequences that equal those without drafts; transformers' may be shorter."""
    theirs, plain, drafted, *exact = results
    named = {"same_drafts": drafted, "same_transformers": theirs, **({"same_exact": exact[0]} if exact else {})}
    return {
        name: float((other.ids == plain.ids[:, : other.ids.shape[1]]).all(1).double().mean())
        for name, other in named.items()
    }


def _check(subject: _Subject, options: GenerateOptions, prompts: Tensor, ways: list[Way]) -> float:
    """Compare what we chose with the scores of transformers' forward over the whole text.

    Returns:
        The largest distance between the highest score and that of a chosen token, in standard deviations.

    Raises:
        WrongAnswer: it is too large, or ids differ where they must not.
    """
    theirs, plain, drafted, *exact = (way.results[0] for way in ways)
    if options.device == "cpu" and options.dtype == "float32":
        written = theirs.ids.shape[1]
        for name, ids in (("look-up", drafted.ids), ("transformers", theirs.ids)):
            if not torch.equal(ids, plain.ids[:, : ids.shape[1]]):
                raise WrongAnswer(f"{subject.name}: {name} writes other tokens within the first {written}")
    if exact and not torch.equal(exact[0].ids, exact[1].ids):
        raise WrongAnswer(f"{subject.name}: exact decode writes other tokens with drafts than without")
    gap = 0.0
    for result in (plain, drafted, *exact[:1]):
        text = torch.cat([prompts, result.ids], 1)[:_CHECKED]
        scores = subject.theirs(text, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float()
        chosen = scores.gather(2, result.ids[:_CHECKED, :, None])[..., 0]
        gap = max(gap, float(((scores.amax(2) - chosen) / scores.std(2)).max()))
    if not gap <= _LARGEST_GAP[options.dtype]:
        raise WrongAnswer(
            f"{subject.name}: a chosen token lies {gap:.2g} standard deviations below the most likely one"
        )
    return gap


def plots(tables: Tables) -> list[Plot]:
    """See ``replayssm.bench``."""
    rows = [row for name, rows in tables.items() if name.startswith(_TABLE) for row in rows]
    panels = []
    for model, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in rows):
        chosen = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
        if len(chosen) < 2:
            continue
        batches = [f"batch {row['batch']}" for row in chosen]
        series = [
            Series(label, batches, [row[f"{way} tokens/s"] / row["transformers tokens/s"] for row in chosen], ours)
            for way, label, ours in _BARS
            if f"{way} tokens/s" in chosen[0]
        ]
        panels.append(Panel(f"{model}, {dtype}", series))
    if not panels:
        return []
    title = "Whole calls of generate, greedy"
    return [Plot("generate", title, "", "tokens/s over transformers", panels, limit="transformers", bars=True)]
