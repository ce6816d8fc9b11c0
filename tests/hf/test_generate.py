"""Texts with drafts, without drafts, and of plain transformers fed one token at a time, row by row."""

import itertools
import random

import pytest
import torch
from generating import COUNT, HITS, LENGTHS, check, new_tokens
from tiny import HYBRIDS, MAMBA2, fresh_model, greedy_text, make_prompts, oracle, pad, shared_model, step_logits

import replayssm.hf as hf
from replayssm.hf import linear
from replayssm.hf.forward import Forward

MATRICES = [list(itertools.product(names, ("lookup", *HITS), range(1, 9), range(1, 6))) for names in (MAMBA2, HYBRIDS)]
SAMPLE = random.Random(0).sample(MATRICES[0], 60) + random.Random(0).sample(MATRICES[1], 40)


@pytest.mark.parametrize("combination", SAMPLE, ids=str)
def test_text_is_that_of_single_steps(combination):
    check(*combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", [*MATRICES[0], *MATRICES[1]], ids=str)
@pytest.mark.parametrize("window", [9, 16])
def test_text_is_that_of_single_steps_full_matrix(combination, window):
    check(*combination, window=window)


@pytest.mark.parametrize("name", [*MAMBA2, *HYBRIDS])
def test_without_drafts(name):
    stats = check(name, None, 4, 5, side="right" if name in HYBRIDS else "left")
    assert stats.rounds == COUNT - 1 and stats.drafted == 0 and stats.accept_rate == 0
    assert stats.new_tokens == 5 * COUNT


@pytest.mark.parametrize(("draft", "rate"), [("right", 1.0), ("wrong", 0.0)])
@pytest.mark.parametrize("name", ["biases", "3_5"])
def test_accept_rate(name, draft, rate):
    stats = check(name, draft, 5, 3)
    assert stats.accept_rate == rate and stats.drafted > 0
    # 21 tokens: the prefill's, then rounds of one token or of one and five drafts.
    assert stats.rounds == (4 if rate else COUNT - 1)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 40, 64])
@pytest.mark.parametrize("name", ["tied", "next"])
def test_every_window(name, window):
    check(name, "mixed", 3, 3, window=window)


@pytest.mark.parametrize("name", ["next", "3_5_moe"])
def test_rows_that_outgrow_their_room_for_keys_at_different_times(name):
    """Prompts of 1 to 14 tokens and 140 new ones: the buffers of 64 keys double while drafts are open."""
    check(name, "mixed", 7, 5, count=140)


def test_both_sides_padded_and_holes_refused():
    prompts = make_prompts("biases", (4, 7))
    expected = [greedy_text("biases", prompt, 6) for prompt in prompts]
    ids, mask = torch.full((2, 9), 60), torch.zeros(2, 9)
    ids[0, 2:6], mask[0, 2:6] = torch.tensor(prompts[0]), 1
    ids[1, :7], mask[1, :7] = torch.tensor(prompts[1]), 1
    out = hf.generate(shared_model(), ids, attention_mask=mask, max_new_tokens=6)
    assert new_tokens(out, 9) == expected
    mask[1, 3] = 0
    with pytest.raises(ValueError, match=r"hole in row 1"):
        hf.generate(shared_model(), ids, attention_mask=mask, max_new_tokens=6)
    mask[1] = 0
    with pytest.raises(ValueError, match=r"empty row 1"):
        hf.generate(shared_model(), ids, attention_mask=mask, max_new_tokens=6)


def test_right_padding_and_what_the_pads_hold_do_not_matter():
    prompts = make_prompts("biases", LENGTHS[:3])
    outs = []
    for side, fill in (("left", 0), ("right", 0), ("right", 17)):
        ids, mask = pad(prompts, side, fill)
        outs.append(new_tokens(hf.generate(shared_model(), ids, attention_mask=mask, max_new_tokens=8), ids.shape[1]))
    assert outs[0] == outs[1] == outs[2] == [greedy_text("biases", p, 8) for p in prompts]


@pytest.mark.parametrize("draft", ["right", None])
@pytest.mark.parametrize("name", ["biases", "next"])
def test_end_tokens_per_row(name, draft):
    prompts = make_prompts(name, (5, 8, 3), seed=3)
    texts = [greedy_text(name, prompt, COUNT) for prompt in prompts]
    ends = (texts[0][3], texts[1][9])
    expected = [text[: min((text.index(e) + 1 for e in ends if e in text), default=COUNT)] for text in texts]
    assert len({len(e) for e in expected}) > 1 and len(expected[0]) <= 4
    if draft:
        draft = oracle([p + t for p, t in zip(prompts, texts, strict=True)], HITS[draft])
    ids, mask = pad(prompts)
    out, stats = hf.generate(
        shared_model(name), ids, attention_mask=mask, draft=draft, eos_token_id=ends, pad_token_id=59,
        max_new_tokens=COUNT, return_stats=True,
    )  # fmt: skip
    width = max(map(len, expected))
    assert new_tokens(out, ids.shape[1]) == [e + [59] * (width - len(e)) for e in expected]
    assert stats.new_tokens == sum(map(len, expected))


def test_end_token_of_the_generation_config():
    model, (prompt,) = fresh_model(), make_prompts("biases", (6,))
    text = greedy_text("biases", prompt, 8)
    model.generation_config.eos_token_id = text[4]
    stop = text.index(text[4]) + 1
    assert new_tokens(hf.generate(model, torch.tensor([prompt]), max_new_tokens=8), 6) == [text[:stop]]
    assert new_tokens(hf.generate(model, torch.tensor([prompt]), max_new_tokens=8, eos_token_id=()), 6) == [text]


def test_one_new_token_and_int32_ids():
    (prompt,) = make_prompts("narrow", (4,))
    out = hf.generate(shared_model("narrow"), torch.tensor([prompt], dtype=torch.int32), max_new_tokens=1)
    assert out.dtype == torch.int32 and out[0].tolist() == prompt + greedy_text("narrow", prompt, 1)


def test_logits_agree_with_single_steps():
    model, (prompt,) = fresh_model(), make_prompts("biases", (11,))
    expected = step_logits(model, prompt)
    hf.attach(model)
    with torch.no_grad(), hf.ReplayCache(model, 1, max_tokens=4) as cache:
        parts = [model(torch.tensor([prompt[a:b]]), **{cache.name: cache}).logits[0]
                 for a, b in ((0, 3), (3, 4), (4, 8), (8, 11))]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [[(0, 5)], [(0, 1), (1, 4), (4, 5)]], ids=str)
def test_batch_rows_have_the_bits_of_the_row_alone(splits):
    model, prompts = hf.attach(fresh_model()), make_prompts("biases", (6, 4, 9))
    windows = make_prompts("biases", (5, 5, 5), seed=9)

    def logits(rows):
        with torch.inference_mode(), hf.ReplayCache(model, 3) as cache:
            forward = Forward(model, cache)
            assert cache.rows_alike
            parts = [torch.zeros(len(rows), 1, 61)]
            for place, row in enumerate(rows):
                cache.select([row])
                parts[0][place] = forward.score(torch.tensor([prompts[row]]))[:, -1]
            cache.select(rows)
            parts += [forward.score(torch.tensor([windows[row][a:b] for row in rows])) for a, b in splits]
        return torch.cat(parts, dim=1)

    together = logits([2, 0, 1])
    for place, row in enumerate([2, 0, 1]):
        assert torch.equal(logits([row])[0], together[place])


def test_statistics_count_the_bytes():
    stats = check("biases", "right", 3, 1, window=8)
    pool_layers = 3
    state = pool_layers * 6 * 8 * 10 * 4
    row = pool_layers * 4 * (6 * 8 + 2 * 10 + 6)
    # Windows of 4, 4, 4, 4 and, behind 17 of 21 tokens, 4 rows: live rows 0, 4, 8 -> flush, 4, 8 -> flush.
    assert stats.rounds == 5 and stats.flushes == 2
    assert stats.state_bytes_read == 5 * state + (0 + 4 + 8 + 4 + 8) * row
    assert stats.state_bytes_written == 2 * state + 20 * row
    assert stats.state_bytes_read_per_token == stats.state_bytes_read / COUNT
    assert 0 < stats.prefill_seconds < stats.seconds
    assert stats.tokens_per_second < stats.decode_tokens_per_second
    assert stats.pool_bytes == stats.slot_bytes > state


def test_slots_are_freed_even_after_an_error(monkeypatch):
    pools = []
    original = hf.ReplayCache.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        pools.append(self.pool)

    monkeypatch.setattr(hf.ReplayCache, "__init__", remember)
    ids = torch.tensor(make_prompts("biases", (4, 4)))
    hf.generate(shared_model(), ids, max_new_tokens=4)
    with pytest.raises(ValueError, match="draft: expected token ids"):
        hf.generate(shared_model(), ids, max_new_tokens=4, draft=lambda t, n: torch.tensor([61]))
    assert [pool.num_free for pool in pools] == [2, 2]
    assert hf.attach.__module__ and "_replayssm_attachment" not in shared_model().__dict__


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (lambda t, n: torch.zeros(n + 1, dtype=torch.int64), r"at most num_tokens=4 of them, got shape \[5\]"),
        (lambda t, n: torch.zeros(1, 2, dtype=torch.int64), r"1-D token ids.*got shape \[1, 2\]"),
        (lambda t, n: torch.tensor([3, 61]), r"token ids in 0\.\.60, got 61 for row 0"),
        (lambda t, n: torch.tensor([-1]), r"token ids in 0\.\.60, got -1"),
        (lambda t, n: torch.tensor([0.5]), r"integer token ids, got torch\.float32"),
        (lambda t, n: torch.tensor([1j]), r"integer token ids, got torch\.complex64"),
        (lambda t, n: None, r"draft: expected 1-D token ids \(an empty tensor for none\), got None"),
        (lambda t, n: "ab", "1-D token ids .*, got 'ab'"),
        (lambda t, n: [[1], [2, 3]], "1-D token ids .*, got "),
        (lambda t, n: [2**70], "1-D token ids .*, got "),
        (lambda t, n: torch.zeros(2, dtype=torch.int64, device="meta"), "1-D token ids .*, got .*meta"),
    ],
)
def test_bad_drafts_are_named(draft, message):
    with pytest.raises(ValueError, match=message):
        hf.generate(shared_model(), torch.tensor([[4, 5]]), max_new_tokens=9, draft=draft)


@pytest.mark.parametrize(
    "options",
    [
        dict(draft="lookup", do_sample=True),
        dict(draft=lambda ids, count: ids[:count]),
        dict(draft_model=shared_model(), logits_processor=[lambda ids, scores: scores]),
    ],
    ids=("sample", "callable", "draft model and processor"),
)
def test_the_default_device_does_not_matter(options):
    model, ids = fresh_model(), torch.tensor(make_prompts("biases", (70,)))
    expected = hf.generate(model, ids, max_new_tokens=12, **options)
    linear._measurements.clear()
    with torch.device("meta"):
        out = hf.generate(model, ids, max_new_tokens=12, **options)
    assert torch.equal(out, expected)


def test_a_draft_callable_cannot_change_the_text():
    (prompt,) = make_prompts("biases", (5,))

    def destructive(token_ids, num_tokens):
        token_ids.zero_()
        return token_ids[:0]

    out = hf.generate(shared_model(), torch.tensor([prompt]), max_new_tokens=7, draft=destructive)
    assert out[0].tolist() == prompt + greedy_text("biases", prompt, 7)
