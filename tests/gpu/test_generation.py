"""Generation with a transformers model on a CUDA device: with and without drafts, and against the CPU."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "hf"))

from tiny_mamba2 import SIZES, fresh_model, make_prompts

import replayssm.hf as hf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT = 24


def padded_batch(name, lengths):
    prompts = make_prompts(name, lengths)
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def texts(model, ids, mask, device, **options):
    ids, mask = ids.to(device), mask.to(device)
    out = hf.generate(model.to(device), ids, attention_mask=mask, max_new_tokens=COUNT, eos_token_id=(), **options)
    return out[:, ids.shape[1] :].cpu()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("lengths", [(3,), (70, 5, 18)])
def test_same_text_on_the_cpu_and_with_any_drafts(name, lengths):
    model = fresh_model(name)
    ids, mask = padded_batch(name, lengths)
    expected = texts(model, ids, mask, "cpu", draft=None)
    assert torch.equal(texts(model, ids, mask, "cuda", draft=None), expected)
    for num_draft_tokens in (1, 4, 11):
        assert torch.equal(texts(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens), expected)


def test_a_seed_draws_the_same_text_with_and_without_drafts():
    model = fresh_model("tied")
    ids, mask = padded_batch("tied", (9, 4))
    options = dict(do_sample=True, temperature=0.8, top_k=20, seed=5)
    plain = texts(model, ids, mask, "cuda", draft=None, **options)
    assert torch.equal(texts(model, ids, mask, "cuda", num_draft_tokens=5, **options), plain)


def test_processors_and_criteria_get_tensors_of_the_device():
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList
    from transformers.generation import MaxLengthCriteria

    model = fresh_model("biases")
    ids, mask = padded_batch("biases", (6,))
    options = dict(
        logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(6 + 10)]),
    )
    expected = texts(model, ids, mask, "cpu", draft=None, **options)
    assert expected.shape[1] == 10
    assert torch.equal(texts(model, ids, mask, "cuda", **options), expected)
