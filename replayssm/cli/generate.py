"""``replayssm generate``: continue a prompt with speculative decoding by replay."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from replayssm.cli.errors import UsageError
from replayssm.cli.load import Loaded, load

if TYPE_CHECKING:
    from replayssm.bench.ways import Generated


def run(options: argparse.Namespace) -> int:
    """Generate, print and return the exit code."""
    _check(options)
    loaded = load(options)
    if options.num_draft_tokens is None:
        from replayssm.hf.drafts import default_draft_tokens

        options.num_draft_tokens = default_draft_tokens(options.draft)
    if options.compare:
        from replayssm.cli.compare import compare

        return compare(loaded, options)
    result = show(loaded, options)
    if options.json:
        sys.stdout.write(json.dumps(report(loaded, options, result), indent=2) + "\n")
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.temperature == 0 and (options.top_k is not None or options.top_p is not None):
        raise UsageError("--top-k and --top-p choose what is sampled: they need --temperature above 0")
    if options.num_draft_tokens is not None and options.draft == "none":
        raise UsageError("--num-draft-tokens needs drafts: leave out --draft none")
    if options.compare and options.draft == "none":
        raise UsageError("--compare needs drafts to compare with: leave out --draft none")


def show(loaded: Loaded, options: argparse.Namespace) -> Generated:
    """Generate once; stream the text to a terminal or a pipe unless JSON was asked for."""
    from replayssm.cli.console import Console
    from replayssm.cli.stream import LiveStream, PlainStream

    if options.json:
        return speculate(loaded, options)
    console = Console(highlight=False)
    if not console.is_terminal:
        return speculate(loaded, options, streamer=PlainStream(loaded.decode))
    with LiveStream(loaded.decode, console, loaded.decode(loaded.input_ids[0].tolist())) as streamer:
        result = speculate(loaded, options, streamer=streamer)
    console.print(f"\n{summary(result)}", style="cyan")
    return result


def speculate(loaded: Loaded, options: argparse.Namespace, *, drafts: bool = True, streamer: Any = None) -> Generated:
    """Run ``replayssm.hf.generate`` as the options say, without drafts when ``drafts`` is False."""
    from replayssm.bench.ways import by_replay
    from replayssm.hf import attach

    attach(loaded.model)  # outside the timing, and once
    lookup = drafts and options.draft == "lookup"
    return by_replay(
        loaded.model,
        loaded.input_ids,
        draft="lookup" if lookup else None,
        draft_model=loaded.draft_model if drafts else None,
        num_draft_tokens=options.num_draft_tokens,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        exact=options.exact,
        streamer=streamer,
    )


def summary(result: Generated) -> str:
    """Return one line about speed and drafts."""
    assert result.stats is not None
    line = f"{result.ids.numel()} tokens in {result.seconds:.2f} s · {result.tokens_per_second:.0f} tokens/s"
    if result.stats.drafted:
        line += f" · {result.stats.accept_rate:.0%} of {result.stats.drafted} drafts accepted"
    return line


def report(loaded: Loaded, options: argparse.Namespace, result: Generated) -> dict[str, Any]:
    """Return what ``--json`` prints of one generation."""
    assert result.stats is not None
    ids = result.ids[0].tolist()
    return {
        "model": loaded.name,
        "draft": options.draft,
        "num_draft_tokens": options.num_draft_tokens,
        "exact": options.exact,
        "prompt_tokens": loaded.input_ids.shape[1],
        "text": loaded.decode(ids),
        "token_ids": ids,
        "new_tokens": len(ids),
        "seconds": result.seconds,
        "prompt_seconds": result.prompt_seconds,
        "tokens_per_second": result.tokens_per_second,
        "rounds": result.stats.rounds,
        "drafted": result.stats.drafted,
        "accepted": result.stats.accepted,
        "accept_rate": result.stats.accept_rate,
    }
