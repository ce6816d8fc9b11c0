"""Texts of models with Gated DeltaNet and attention layers: with drafts, without, and of plain transformers."""

import pytest
import torch
from generating import COUNT, HITS, check, new_tokens
from tiny import HYBRIDS, fresh_model, greedy_text, make_prompts, oracle, pad, shared_model, step_logits
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

import replayssm.hf as hf
from replayssm.hf import linear
from replayssm.hf.attachment import attachment_of


def test_the_longest_draft_is_that_of_the_op():
    check("next", "right", 15, 2)
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(
        ValueError,
        match=r"num_draft_tokens: expected 0 <= num_draft_tokens <= 15 \(what the model's layers verify\), got 16",
    ):
        hf.generate(shared_model("next"), ids, num_draft_tokens=16, max_new_tokens=40)


@pytest.mark.parametrize("name", ["next_moe", "3_5"])
def test_sampling_does_not_depend_on_drafts_or_the_batch(name):
    prompts = make_prompts(name, (9, 4, 6))
    ids, mask = pad(prompts)
    options = dict(do_sample=True, temperature=0.9, top_k=12, top_p=0.95, seed=7, max_new_tokens=COUNT)
    plain = hf.generate(shared_model(name), ids, attention_mask=mask, draft=None, **options)
    for num_draft_tokens in (2, 6):
        drafted, stats = hf.generate(
            shared_model(name),
            ids,
            attention_mask=mask,
            num_draft_tokens=num_draft_tokens,
            return_stats=True,
            **options,
        )
        assert torch.equal(drafted, plain) and stats.drafted > 0
    alone = hf.generate(shared_model(name), torch.tensor([prompts[1]]), request_ids=[1], **options)
    assert new_tokens(alone, 4) == new_tokens(plain[1:2], 9)
    other = hf.generate(shared_model(name), ids, attention_mask=mask, **{**options, "seed": 8})
    assert not torch.equal(other, plain)


def test_processors_and_criteria_run_token_by_token():
    (prompt,) = make_prompts("3_5", (9,))
    ids = torch.tensor([prompt])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])
    expected = shared_model("3_5").generate(
        ids, do_sample=False, max_new_tokens=15, repetition_penalty=1.4, eos_token_id=None
    )
    assert new_tokens(expected, 9)[0] != greedy_text("3_5", prompt, 15)
    draft = oracle([expected[0].tolist()], HITS["mixed"])
    for stop in (24, 17):
        out = hf.generate(
            shared_model("3_5"), ids, draft=draft, num_draft_tokens=6, max_new_tokens=15, logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(stop)]),
        )  # fmt: skip
        assert torch.equal(out, expected[:, :stop])


@pytest.mark.parametrize("name", HYBRIDS)
def test_through_transformers_generate(name):
    prompts = make_prompts(name, (7, 3))
    ids, mask = pad(prompts)
    out = shared_model(name).generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, custom_generate=hf.custom_generate,
        draft="lookup", num_draft_tokens=4,
    )  # fmt: skip
    assert new_tokens(out, 7) == [greedy_text(name, prompt, 12) for prompt in prompts]
    alone = shared_model(name).generate(torch.tensor(prompts[:1]), max_new_tokens=12, do_sample=False)
    assert torch.equal(alone, out[:1])
    with pytest.raises(ValueError, match="position_ids: expected none, or each row's tokens counted from 0"):
        shared_model(name).generate(
            ids, attention_mask=mask, position_ids=torch.arange(7).expand(2, -1), max_new_tokens=12, do_sample=False,
            custom_generate=hf.custom_generate,
        )  # fmt: skip


def test_a_draft_model_of_another_family():
    draft_model = fresh_model("3_5", seed=4, vocab_size=61)
    (prompt,) = make_prompts("next", (9,))
    out, stats = hf.generate(
        shared_model("next"), torch.tensor([prompt]), draft_model=draft_model, num_draft_tokens=3, max_new_tokens=COUNT,
        return_stats=True,
    )  # fmt: skip
    assert new_tokens(out, 9) == [greedy_text("next", prompt, COUNT)] and stats.drafted > 0
    out, stats = hf.generate(
        shared_model("next"), torch.tensor([prompt]), draft_model=fresh_model("next"), num_draft_tokens=3,
        max_new_tokens=COUNT, return_stats=True,
    )  # fmt: skip
    assert new_tokens(out, 9) == [greedy_text("next", prompt, COUNT)] and stats.accept_rate == 1


def test_the_longest_draft_is_that_of_the_draft_model_too():
    """Layers of the drafting model may verify fewer tokens than those of the model."""
    model, drafter, ids = shared_model("biases"), fresh_model("next"), torch.tensor([[3, 4, 5]])
    assert hf.generate(model, ids, draft_model=drafter, num_draft_tokens=15, max_new_tokens=4).shape == (1, 7)
    with pytest.raises(ValueError, match=r"<= num_draft_tokens <= 15 \(what the draft model's layers verify\), got 16"):
        hf.generate(model, ids, draft_model=drafter, num_draft_tokens=16, max_new_tokens=4)
    assert attachment_of(model) is None and attachment_of(drafter) is None


@pytest.mark.parametrize("name", HYBRIDS)
def test_models_that_are_not_packed_give_the_same_text(name, monkeypatch):
    monkeypatch.setattr(linear, "_MOST_PACKED", 0)
    check(name, "mixed", 4, 3)


@pytest.mark.parametrize("name", ["next", "3_5"])
def test_eager_attention(name):
    model = fresh_model(name, attn_implementation="eager")
    prompts = make_prompts(name, (9, 4))
    ids, mask = pad(prompts)
    expected = [greedy_text(name, prompt, 15) for prompt in prompts]
    draft = oracle([p + e for p, e in zip(prompts, expected, strict=True)], HITS["mixed"])
    out = hf.generate(model, ids, attention_mask=mask, draft=draft, num_draft_tokens=5, max_new_tokens=15)
    assert new_tokens(out, 9) == expected


@pytest.mark.parametrize("name", HYBRIDS)
def test_without_attention_layers(name):
    # transformers cannot cache such a model, so it gets the whole text for every token.
    model = fresh_model(name, layer_types=["linear_attention"] * HYBRIDS[name][1]["num_hidden_layers"])
    prompts = make_prompts(name, (7, 3))
    expected = []
    for prompt in prompts:
        text = torch.tensor([prompt])
        for _ in range(COUNT):
            with torch.no_grad():
                newest = model(text, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            text = torch.cat([text, newest], dim=1)
        expected.append(text[0].tolist())
    ids, mask = pad(prompts)
    for draft in (None, oracle(expected, HITS["mixed"])):
        out = hf.generate(model, ids, attention_mask=mask, draft=draft, num_draft_tokens=5, max_new_tokens=COUNT)
        assert new_tokens(out, 7) == [text[-COUNT:] for text in expected]


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_of_a_prompt_are_those_of_single_steps(name):
    """100 tokens: several blocks of the delta rule, and room for keys that grows in the prompt."""
    (prompt,) = make_prompts(name, (100,), seed=2)
    model = hf.attach(fresh_model(name))
    with hf.ReplayCache(model, 1) as cache, torch.no_grad():
        got = model(torch.tensor([prompt]), **{cache.name: cache}).logits[0]
    expected = step_logits(shared_model(name), prompt)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["next", "3_5_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_in_training_generates_without_dropout_and_with_its_cache(name, checkpointing):
    """Checkpointed layers of a model in training take the cache away from what is below them."""
    model = fresh_model(name, attention_dropout=0.5)
    prompt = torch.tensor(make_prompts(name, (9,)))
    expected = hf.generate(model, prompt, draft=None, max_new_tokens=COUNT)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert torch.equal(hf.generate(model, prompt, max_new_tokens=COUNT), expected)
    assert all(module.training for module in model.modules())
    assert model.is_gradient_checkpointing is checkpointing


def test_statistics_count_keys_and_values():
    model, prompts = shared_model("next"), make_prompts("next", (50, 9))
    ids, mask = pad(prompts)
    _, stats = hf.generate(model, ids, attention_mask=mask, draft=None, max_new_tokens=21, return_stats=True)
    # Two attention layers, one head of 12, fp32; a spare row, and room for 128 keys when 64 are outgrown.
    key = 2 * 2 * 12 * 4
    assert stats.key_value_bytes == 3 * 128 * key
    # Both rows take 20 steps; the longer one has 51 to 70 tokens with the new one, which needs 64 keys 14 times.
    assert stats.key_value_bytes_read == 2 * (14 * 64 + 6 * 128) * key
    assert stats.key_value_bytes_written == 2 * 20 * key
    _, stats = hf.generate(shared_model("biases"), torch.tensor([[3, 4]]), max_new_tokens=3, return_stats=True)
    assert (stats.key_value_bytes, stats.key_value_bytes_read, stats.key_value_bytes_written) == (0, 0, 0)
