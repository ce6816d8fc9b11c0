"""The logits of whole texts."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from replayssm.hf.attach import attached
from replayssm.hf.cache import ReplayCache
from replayssm.hf.forward import Forward
from replayssm.hf.prompts import strip_padding


@torch.inference_mode()
def score(
    model: PreTrainedModel, input_ids: Tensor, *, attention_mask: Tensor | None = None, exact: bool = False
) -> Tensor:
    """Score texts in one forward each, as ``generate`` scores its prompts.

    With ``exact=True`` the logits at a token are, bit for bit, those that ``generate(..., exact=True)`` chose the next
    token from, however it was decoded: the sampling policy's own. No gradients are recorded.

    Args:
        model: a causal LM of a supported family.
        input_ids: int64 ``[batch, length]``.
        attention_mask: ``[batch, length]``, 1 at tokens and 0 at padding, which does not influence the logits. None: no
            padding.
        exact: score on exact decode; for Mamba-2 models.

    Returns:
        fp32 ``[batch, length, vocab]``, zero at padding.

    Raises:
        TypeError: not a transformers model.
        ValueError: an unsupported model, ids out of range, or logits that cannot be exact here.
        NotImplementedError: a device without our ops.

    Example:
        >>> import torch
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> config = Mamba2Config(vocab_size=61, hidden_size=24, num_heads=6, head_dim=8, state_size=10, n_groups=2,
        ...                       num_hidden_layers=2, chunk_size=16)
        >>> model, ids = Mamba2ForCausalLM(config).eval(), torch.arange(40)[None]
        >>> whole, part = score(model, ids, exact=True), score(model, ids[:, :23], exact=True)
        >>> torch.equal(whole[:, :23], part)
        True
    """
    with ExitStack() as stack:
        stack.enter_context(attached(model))
        stack.enter_context(torch.autocast(model.device.type, enabled=False))
        if model.device.type == "cuda":  # kernels go to the current device
            stack.enter_context(torch.cuda.device(model.device))
        vocab_size = model.get_output_embeddings().out_features
        texts = strip_padding(input_ids, attention_mask, vocab_size)
        cache = stack.enter_context(ReplayCache(model, 1, max_tokens=1, window=1, exact=exact))
        forward = Forward(model, cache)
        logits = torch.zeros(*input_ids.shape, vocab_size, dtype=torch.float32, device=model.device)
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for row, text in enumerate(texts):
            cache.reset()
            logits[row, kept[row].bool()] = forward.score(torch.tensor([text], device=model.device))[0]
    return logits
