"""Exact decode of a transformers model on a GPU: every way to decode a text has the logits of one forward over it."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny import fresh_model, make_prompts, pad
from transformers import LogitsProcessorList

import replayssm.hf as hf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT = 41
# One token before the end of a chunk of 16, within a chunk, and at the end of one.
LENGTHS = (31, 5, 48)


class Recorded:
    def __init__(self):
        self.logits = {}

    def __call__(self, ids, scores):
        self.logits[tuple(ids[0].tolist())] = scores[0].clone()
        return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_one_forward(dtype):
    model = hf.attach(fresh_model("biases").to("cuda", dtype))
    ids, mask = (each.cuda() for each in pad(make_prompts("biases", LENGTHS), "left"))
    options = {"attention_mask": mask, "max_new_tokens": COUNT, "exact": True, "return_stats": True}
    plain, _ = hf.generate(model, ids, draft=None, **options)
    texts = [plain[row, 48 - length :].tolist() for row, length in enumerate(LENGTHS)]

    def half_right(text, num_tokens):
        whole = next(t for t in texts if t[: len(text)] == text.tolist())
        draft = whole[len(text) : len(text) + num_tokens]
        return torch.tensor([token if i != 3 else (token + 1) % 61 for i, token in enumerate(draft)])

    for draft in (None, "lookup", half_right):
        recorded = Recorded()
        out, stats = hf.generate(
            model, ids, draft=draft, num_draft_tokens=6, logits_processor=LogitsProcessorList([recorded]), **options
        )
        assert torch.equal(out, plain)
        assert stats.graph_rounds
        assert stats.rows_alike
        for text in texts:
            whole = hf.score(model, torch.tensor([text], device="cuda"), exact=True)[0]
            for place in range(len(text) - COUNT, len(text)):
                assert torch.equal(recorded.logits[tuple(text[:place])], whole[place - 1]), (draft, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_model_itself(dtype):
    model = hf.attach(fresh_model("biases").to("cuda", dtype))
    ids = torch.tensor(make_prompts("biases", (40, 40)), device="cuda")
    whole = hf.score(model, ids, exact=True)
    with torch.no_grad(), hf.ReplayCache(model, 2, max_tokens=6, exact=True) as cache:
        for first, end, taken_back in ((0, 13, 0), (13, 19, 4), (15, 21, 0), (21, 22, 0), (22, 28, 6), (22, 26, 0)):
            logits = model(ids[:, first:end], **{cache.name: cache}).logits
            assert torch.equal(logits, whole[:, first:end]), (first, end)
            if taken_back:
                cache.crop(-taken_back)


def test_a_session_is_used_again():
    model = hf.attach(fresh_model("biases").to("cuda"))
    ids = torch.arange(1, 20, device="cuda")[None]
    texts = [hf.generate(model, ids, max_new_tokens=COUNT, exact=exact) for exact in (True, False, True)]
    first = hf.generate(model, ids, max_new_tokens=COUNT, exact=True)
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[0], first)
