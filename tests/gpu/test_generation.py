"""Texts that transformers models generate on a CUDA device: those of the CPU, with any drafts, however long."""

import pytest
import torch

pytest.importorskip("transformers")

from generating import padded_batch, run, texts
from tiny import HYBRIDS, fresh_model, make_prompts

import replayssm.hf as hf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("biases", "next")


# Every model and every width of a window is compiled for: few of both, used by all tests. The seeds of the hybrids are
# such that the two likeliest tokens are never closer than 6e-3.
@pytest.mark.parametrize(
    ("name", "lengths", "seed", "drafts"),
    [
        ("biases", (70, 5, 18), 1, (0, 3, 11)),
        ("biases", (5, 9, 5, 9, 5), 1, (0, 3, 11)),
        ("narrow", (3,), 1, (0, 3, 11)),
        ("next", (70, 5, 18), 9, (3,)),
        ("3_5", (5, 9, 5, 9, 5), 2, (3,)),
        ("3_5_moe", (4, 7), 1, (3,)),
        pytest.param("next", (70, 5, 18), 9, (0, 1, 4, 11, 15), marks=pytest.mark.slow),
        pytest.param("3_5", (5, 9, 5, 9, 5), 2, (0, 1, 4, 11, 15), marks=pytest.mark.slow),
    ],
)
def test_same_text_on_the_cpu_and_with_any_drafts(name, lengths, seed, drafts):
    model = fresh_model(name)
    ids, mask = padded_batch(name, lengths, seed)
    expected = texts(model, ids, mask, "cpu", draft=None)
    for num_draft_tokens in drafts:
        got, stats = run(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens)
        assert torch.equal(got, expected)
        assert stats.rows_alike or name in HYBRIDS
        if "moe" not in name:  # transformers' experts may read back which of them are needed
            # A shape runs eagerly once, then from its graph; without drafts and growing keys there is one.
            eager = 1 if name not in HYBRIDS and not num_draft_tokens else 8
            assert stats.graph_rounds >= stats.rounds - eager and stats.eager_because is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_itself_with_a_cache(name, dtype):
    """Its head is ours too: activations are fp32 whatever the weights are stored as."""
    model, ids = fresh_model(name).to(dtype), torch.tensor(make_prompts(name, (30, 30)))
    expected = hf.score(model, ids)
    hf.attach(model.cuda())
    with torch.no_grad(), hf.ReplayCache(model, 2, max_tokens=5) as cache:
        for first, end, taken_back in ((0, 13, 0), (13, 18, 3), (15, 20, 0), (20, 21, 0)):
            logits = model(ids[:, first:end].cuda(), **{cache.name: cache}).logits
            torch.testing.assert_close(logits.cpu(), expected[:, first:end], atol=1e-4, rtol=1e-4)
            if taken_back:
                cache.crop(-taken_back)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_texts_that_outgrow_the_buffers_of_keys(attention):
    """From 60 tokens to 140: the buffers double twice, each time with new graphs."""
    model = fresh_model("next", attn_implementation=attention)
    ids, mask = padded_batch("next", (5, 60, 33), seed=18)
    expected = texts(model, ids, mask, "cpu", draft=None, max_new_tokens=80)
    got, stats = run(model, ids, mask, "cuda", max_new_tokens=80)
    assert torch.equal(got, expected)
    assert stats.graph_rounds > stats.rounds // 2


@pytest.mark.parametrize(
    ("name", "rows", "longest"), [("biases", 1, 11), ("biases", 3, 11), ("biases", 5, 11), ("next", 5, 3)]
)
def test_rows_end_at_different_times(name, rows, longest):
    model = fresh_model(name)
    ids, mask = padded_batch(name, (7, 4, 12, 7, 5)[:rows], seed=3)
    whole = texts(model, ids, mask, "cpu", draft=None)
    options = dict(eos_token_id=[int(whole[0, 5]), int(whole[-1, 15])], pad_token_id=60)
    expected = texts(model, ids, mask, "cpu", draft=None, **options)
    for num_draft_tokens in (0, longest):
        assert torch.equal(texts(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens, **options), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_seed_draws_the_same_text_with_and_without_drafts(name):
    model = fresh_model(name)
    ids, mask = padded_batch(name, (9, 4))
    options = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    plain = texts(model, ids, mask, "cuda", draft=None, seed=5, **options)
    drafted, stats = run(model, ids, mask, "cuda", seed=5, **options)
    assert torch.equal(drafted, plain) and stats.graph_rounds > 0
    alone = texts(model, ids[1:], mask[1:], "cuda", seed=5, request_ids=[1], **options)
    assert torch.equal(alone, plain[1:])
    # The seed is no part of a graph.
    hf.attach(model)
    for seed in (5, 6, 5):
        again, stats = run(model, ids, mask, "cuda", seed=seed, **options)
        assert torch.equal(again, plain) == (seed == 5)
    assert stats.graph_rounds == stats.rounds


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
    got, stats = run(model, ids, mask, "cuda", **options)
    assert torch.equal(got, expected) and stats.graph_rounds > 0


def test_scores_that_are_no_numbers_name_their_row():
    model = fresh_model("biases").cuda()
    ids, mask = padded_batch("biases", (6, 9))
    text = texts(model, ids, mask, "cuda")
    alone = set(text[1].tolist()) - set(text[0].tolist()) - set(ids.flatten().tolist())
    with torch.no_grad():
        model.backbone.embeddings.weight[min(alone)] = float("nan")
    with pytest.raises(ValueError, match=r"model: expected scores .* got NaN .* in row 1 for token \d+"):
        texts(model, ids, mask, "cuda")


def test_weights_stay_as_they_are_stored():
    model = fresh_model("biases").bfloat16()
    ids, mask = padded_batch("biases", (7, 4, 12))
    expected = texts(fresh_model("biases").bfloat16().float(), ids, mask, "cpu")
    hf.attach(model.cuda())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for num_draft_tokens in (0, 3):
        got, stats = run(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens)
        assert torch.equal(got, expected) and stats.rows_alike
