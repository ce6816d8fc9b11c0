"""Generation with speculative decoding by replay."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from replayssm.checks import check_flag, check_integer, check_range, renamed
from replayssm.hf.attach import attached
from replayssm.hf.attachment import most_tokens
from replayssm.hf.draft_model import ModelDrafter
from replayssm.hf.drafts import CallableDrafter, Drafter, DraftFunction, LookupDrafter, NoDrafts, default_draft_tokens
from replayssm.hf.loop import Decoder
from replayssm.hf.options import (
    callables,
    check_seed,
    check_streamer,
    integers,
    numbers_of_requests,
)
from replayssm.hf.prompts import join, strip_padding
from replayssm.hf.sampling import Greedy, Gumbel
from replayssm.hf.stats import GenerationStats
from replayssm.hf.stopping import Rules
from replayssm.mamba.arguments import MAX_WINDOW


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    draft: str | DraftFunction | None = "lookup",
    draft_model: PreTrainedModel | None = None,
    num_draft_tokens: int | None = None,
    max_new_tokens: int = 128,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    request_ids: Sequence[int] | Tensor | None = None,
    eos_token_id: int | Sequence[int] | Tensor | None = None,
    pad_token_id: int | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: Any = None,
    window: int = 16,
    exact: bool = False,
    return_stats: bool = False,
) -> Any:
    """Continue token ids with a recurrent model, verifying several draft tokens per forward.

    The text is the one that the model produces without drafts, token for token (``docs/hf.md`` says what that rests
    on). A model that is not attached is attached for the time of the call.

    Args:
        model: a causal LM of a supported family.
        input_ids: int64 ``[batch, length]``.
        attention_mask: ``[batch, length]``, 1 at tokens and 0 at padding, which may lie on either side and does not
            influence the text. None: no padding.
        draft: ``"lookup"`` (what followed the newest repetition of the row's last tokens), None (no drafts), or a
            callable ``(token_ids, num_tokens) -> token_ids``: it gets a row's ids, 1-D, and may return up to
            ``num_tokens`` ids as a 1-D tensor.
        draft_model: a smaller model of a supported family with the same vocabulary that drafts; in place of ``draft``.
        num_draft_tokens: longest draft, 0..63, for Gated DeltaNet layers 0..15, with ``exact`` below the chunk
            size. None: 11 by look-up, whose drafts are as long as the match deserves, else 4.
        max_new_tokens: most new tokens per row, >= 1.
        do_sample: draw tokens instead of taking the most likely one.
        temperature: divides the logits when drawing.
        top_k: draw from the k most likely tokens only.
        top_p: draw from the most likely tokens that together hold this probability.
        seed: with a request id and a position it fixes what is drawn, 0..2^64-1: the same in every call, whatever
            torch's generators hold.
        request_ids: one number in 0..2^32-1 per row that names its text; 0, 1, ... by default. A row draws the same
            tokens in any batch under the same id.
        eos_token_id: one or several ids that end a row. None: those of ``model.generation_config``; an empty sequence:
            none.
        pad_token_id: fills rows that ended early. None: that of the model, else the first end token, else 0.
        logits_processor: transformers processors, called for one row and one token at a time on the row without
            padding, before temperature, top-k and top-p.
        stopping_criteria: transformers criteria, called likewise behind every token; a stop inside an accepted draft
            cuts the text there.
        streamer: gets the prompt and every token as in transformers; for a batch of one. If it has a method
            ``on_round(drafted, accepted)``, that is called behind every round with its counts.
        window: ring rows that are replayed before they are folded into the state, 1..64; raised to
            ``num_draft_tokens + 1`` if it is smaller.
        exact: decode with the bits of one scan over the whole text: a token's logits are those of ``score(...,
            exact=True)``, whatever was drafted, and in any batch. Mamba-2 models; refused where that cannot be held.
        return_stats: return ``(sequences, GenerationStats)``.

    Returns:
        ``[batch, length + new]`` in the dtype of ``input_ids``: the input unchanged, then the new tokens, then padding.

    Raises:
        TypeError: not a transformers model, or an option of the wrong type.
        ValueError: an unsupported model or option; the message says what is supported.
        NotImplementedError: a device without our ops.

    Example:
        >>> import torch
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> config = Mamba2Config(vocab_size=61, hidden_size=24, num_heads=6, head_dim=8, state_size=10, n_groups=2,
        ...                       num_hidden_layers=2, chunk_size=16)
        >>> model = Mamba2ForCausalLM(config).eval()
        >>> ids, stats = generate(model, torch.tensor([[5, 9, 5, 9]]), max_new_tokens=6, eos_token_id=(),
        ...                       return_stats=True)
        >>> tuple(ids.shape), stats.new_tokens
        ((1, 10), 6)
    """
    config = getattr(model, "generation_config", None)
    if eos_token_id is None:
        eos_token_id = getattr(config, "eos_token_id", None)
    ends = frozenset(() if eos_token_id is None else integers("eos_token_id", eos_token_id))
    if pad_token_id is None:
        pad_token_id = getattr(config, "pad_token_id", None)
    if pad_token_id is not None:
        check_integer("pad_token_id", pad_token_id)
    rules = Rules(
        max_new_tokens=max_new_tokens,
        end_tokens=ends,
        processors=LogitsProcessorList(callables("logits_processor", logits_processor)),
        criteria=StoppingCriteriaList(callables("stopping_criteria", stopping_criteria)),
    )
    check_flag("do_sample", do_sample)
    check_seed(seed)
    sampler = Gumbel(temperature, top_k, top_p) if do_sample else Greedy()
    if not do_sample and (temperature != 1.0 or top_k is not None or top_p is not None):
        raise ValueError(
            "temperature, top_k and top_p need do_sample=True; greedy decoding takes the most likely token"
        )
    check_flag("return_stats", return_stats)
    sequences, stats = run(
        model,
        input_ids,
        attention_mask,
        draft=draft,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        sampler=sampler,
        seed=seed,
        request_ids=request_ids,
        rules=rules,
        pad_token_id=pad_token_id if pad_token_id is not None else min(ends, default=0),
        streamer=streamer,
        prompt_is_shown=False,
        window=window,
        exact=exact,
    )
    return (sequences, stats) if return_stats else sequences


def run(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    draft: str | DraftFunction | None,
    draft_model: PreTrainedModel | None,
    num_draft_tokens: int | None,
    sampler: Greedy | Gumbel,
    seed: int,
    request_ids: Sequence[int] | Tensor | None,
    rules: Rules,
    pad_token_id: int,
    streamer: Any,
    prompt_is_shown: bool,
    window: int,
    exact: bool,
) -> tuple[Tensor, GenerationStats]:
    """What ``generate`` and ``custom_generate`` have in common; arguments of theirs, and those of ``Decoder``."""
    if num_draft_tokens is None:
        num_draft_tokens = default_draft_tokens(draft if draft_model is None else draft_model)
    check_flag("exact", exact)
    check_range("num_draft_tokens", num_draft_tokens, 0, MAX_WINDOW - 1)  # and the token before them
    check_range("max_new_tokens", rules.max_new_tokens, 1, sys.maxsize)
    check_range("window", window, 1, MAX_WINDOW)
    check_streamer(streamer)
    with ExitStack() as stack:
        stack.enter_context(attached(model))
        stack.enter_context(torch.autocast(model.device.type, enabled=False))  # everything is computed in fp32
        most = most_tokens(model, exact) - 1
        check_range("num_draft_tokens", num_draft_tokens, 0, most, "what the model's layers verify")
        _check_hooks("model", model)
        if model.device.type == "cuda":  # kernels go to the current device
            stack.enter_context(torch.cuda.device(model.device))
        vocab_size = model.get_output_embeddings().out_features
        prompts = strip_padding(input_ids, attention_mask, vocab_size)
        if streamer is not None and len(prompts) > 1:
            raise ValueError(f"streamer: expected a batch of one row, got {len(prompts)}")
        requests = numbers_of_requests(request_ids, len(prompts))
        drafter = _drafter(draft, draft_model, vocab_size, sampler, seed, requests, num_draft_tokens, window)
        stack.callback(drafter.close)
        new, stats = Decoder(
            model,
            prompts,
            seed=seed,
            request_ids=requests,
            sampler=sampler,
            rules=rules,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens if not isinstance(drafter, NoDrafts) else 0,
            window=window,
            streamer=streamer,
            shown=None if streamer is None or prompt_is_shown else input_ids.cpu(),
            pad_token_id=pad_token_id,
            exact=exact,
        ).run()
    return join(input_ids, new, pad_token_id), stats


def _check_hooks(name: str, model: PreTrainedModel) -> None:
    if model._forward_hooks or model._forward_pre_hooks:
        raise ValueError(
            f"{name}: expected no forward hooks on the whole model, which are not called, since its base model and its "
            "head run on their own; hooks on model.base_model and below are called"
        )


def _drafter(
    draft: str | DraftFunction | None,
    draft_model: PreTrainedModel | None,
    vocab_size: int,
    sampler: Greedy | Gumbel,
    seed: int,
    requests: list[int],
    num_draft_tokens: int,
    window: int,
) -> Drafter:
    if not num_draft_tokens:
        return NoDrafts()
    if draft_model is not None:
        if draft != "lookup" and draft is not None:
            raise ValueError("draft and draft_model: expected one source of drafts, got both")
        with renamed("model", "draft_model"), attached(draft_model):
            _check_hooks("draft_model", draft_model)
            theirs = draft_model.get_output_embeddings().out_features
            if theirs != vocab_size:
                raise ValueError(f"draft_model: expected the model's vocabulary of {vocab_size} ids, got {theirs}")
            return ModelDrafter(draft_model, sampler, seed, requests, num_draft_tokens, window)
    if draft is None:
        return NoDrafts()
    if draft == "lookup":
        return LookupDrafter()
    if isinstance(draft, nn.Module):
        raise TypeError(f"draft: expected 'lookup', None or a callable, got {type(draft).__name__}; see draft_model")
    if callable(draft):
        return CallableDrafter(draft, vocab_size)
    if isinstance(draft, str):
        raise ValueError(f"draft: expected 'lookup', None or a callable, got {draft!r}")
    raise TypeError(f"draft: expected 'lookup', None or a callable, got {type(draft).__name__}")
