"""``custom_generate``: generation by replay inside of transformers' own ``model.generate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from replayssm.checks import check_flag
from replayssm.hf.attach import check_model
from replayssm.hf.drafts import DraftFunction
from replayssm.hf.generate import run
from replayssm.hf.options import check_mode, check_seed, integers
from replayssm.hf.prompts import check_positions
from replayssm.hf.sampling import Greedy, Gumbel
from replayssm.hf.stopping import Rules

# What transformers hands to every custom callable, and what cannot change a text here.
_PASSED_BY_TRANSFORMERS = {
    "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache", "cache_params", "past_key_values",
}  # fmt: skip


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft: str | DraftFunction | None = "lookup",
    draft_model: PreTrainedModel | None = None,
    num_draft_tokens: int | None = None,
    seed: int = 0,
    request_ids: Sequence[int] | Tensor | None = None,
    window: int = 16,
    exact: bool = False,
    return_stats: bool = False,
    **model_kwargs: Any,
) -> Any:
    """For ``model.generate(..., custom_generate=replayssm.hf.custom_generate, draft=..., num_draft_tokens=...)``.

    transformers prepares everything (lengths, end tokens, processors with temperature, top-k and top-p among them) and
    calls this in place of its own loop. Processors and criteria see every row padded on the left to the longest prompt,
    as they would without us.

    Args:
        model: see ``generate``.
        input_ids: ``[batch, length]``, prepared by transformers, as are the next three.
        logits_processor: applied to each token in order.
        stopping_criteria: asked behind each token; its length and end-token criteria are applied per row.
        generation_config: decides on sampling, length, end and padding tokens.
        draft: see ``generate``, as all that follow.
        draft_model: a smaller model that drafts.
        num_draft_tokens: longest draft.
        seed: of the sampling noise. torch's global generator is not used.
        request_ids: names of the rows' texts.
        window: of the pool.
        exact: see ``generate``.
        return_stats: return ``(sequences, GenerationStats)``.
        model_kwargs: what transformers adds; anything else is refused.

    Returns:
        What ``model.generate`` is to return: sequences, or an output object with them if the generation config asks for
        one.

    Raises:
        ValueError: an option that is not supported, as for ``generate``.
    """
    check_model(model)
    _check_config(generation_config, model_kwargs)
    check_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))
    check_flag("return_stats", return_stats)
    check_seed(seed)
    lengths = [criterion.max_length for criterion in stopping_criteria if isinstance(criterion, MaxLengthCriteria)]
    ends = generation_config._eos_token_tensor
    pad = generation_config._pad_token_tensor
    rules = Rules(
        max_new_tokens=min(lengths, default=generation_config.max_length) - input_ids.shape[1],
        end_tokens=frozenset(() if ends is None else integers("eos_token_id", ends)),
        processors=LogitsProcessorList(logits_processor),
        criteria=StoppingCriteriaList(
            criterion
            for criterion in stopping_criteria
            if not isinstance(criterion, (MaxLengthCriteria, EosTokenCriteria))
        ),
        padded_rows=True,
    )
    sequences, stats = run(
        model,
        input_ids,
        model_kwargs.get("attention_mask"),
        draft=draft,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        sampler=Gumbel() if generation_config.do_sample else Greedy(),
        seed=seed,
        request_ids=request_ids,
        rules=rules,
        pad_token_id=0 if pad is None else int(pad),
        streamer=_streamer_of_caller(model),
        prompt_is_shown=True,
        window=window,
        exact=exact,
    )
    result: Any = sequences
    if generation_config.return_dict_in_generate:
        result = GenerateDecoderOnlyOutput(sequences=result)
    return (result, stats) if return_stats else result


def _streamer_of_caller(model: PreTrainedModel) -> Any:
    """The streamer given to ``model.generate``.

    transformers puts the prompt into it but does not pass it on to a custom callable, so a reader of it would wait for
    ever; it is a local variable of the calling frame, or of one further out when the callable was wrapped.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None


def _check_config(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    check_mode(config)
    cache = next((model_kwargs[n] for n in ("cache", "cache_params", "past_key_values") if n in model_kwargs), None)
    if cache is not None and len(cache) and cache.has_previous_state():
        raise ValueError("cache: expected none or an empty one; a generation starts from the whole prompt's token ids")
    unknown = sorted(n for n, v in model_kwargs.items() if v is not None and n not in _PASSED_BY_TRANSFORMERS)
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: not supported by replayssm.hf.custom_generate; supported are input_ids with "
            "attention_mask, transformers' generation options without beams, and draft, draft_model, num_draft_tokens, "
            "seed, request_ids, window, exact, return_stats"
        )
