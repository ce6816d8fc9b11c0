"""Sources of drafts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, greedy_text, make_prompts, pad, shared_model

import replayssm.hf as hf
from replayssm.hf.attachment import attachment_of
from replayssm.hf.drafts import NgramIndex


def by_search(text, num_tokens, longest, shortest, trust):
    """The longest suffix that occurred before, at its newest place, continued as a loop."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[len(text) - length :]:
                out = list(text)
                for _ in range(min(num_tokens, trust * length)):
                    out.append(out[len(out) - (len(text) - start - length)])
                return out[len(text) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=6),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 4),
)
def test_index_finds_what_a_search_finds(pieces, num_tokens, shortest, more, trust):
    index, text = NgramIndex(shortest + more, shortest, trust), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert index.tokens == text
        assert index.propose(num_tokens) == by_search(text, num_tokens, shortest + more, shortest, trust)


def test_newest_place_and_longest_match_win():
    index = NgramIndex(longest=2)
    index.extend([1, 2, 7, 5, 2, 8, 1, 2])
    assert index.propose(1) == [7]  # (1, 2), although 2 alone was followed by 8 later
    index.extend([9, 1, 2])
    assert index.propose(2) == [9, 1]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_draft_model_of_the_same_weights_is_always_right(batch, num_draft_tokens):
    prompts = make_prompts("biases", (7, 2, 11)[:batch])
    ids, mask = pad(prompts)
    out, stats = hf.generate(
        shared_model(), ids, attention_mask=mask, draft_model=fresh_model(), num_draft_tokens=num_draft_tokens,
        max_new_tokens=17, return_stats=True,
    )  # fmt: skip
    assert [row[ids.shape[1] :].tolist() for row in out] == [greedy_text("biases", p, 17) for p in prompts]
    assert stats.accept_rate == 1.0


def nearly(model):
    """The same model with slightly other weights, so that it is right now and then."""
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return model


@pytest.mark.parametrize("attached", [False, True])
def test_draft_model_that_errs_is_rolled_back(attached):
    draft_model = nearly(fresh_model())
    if attached:
        hf.attach(draft_model)
    prompts = make_prompts("biases", (7, 2, 11))
    ids, mask = pad(prompts)
    out, stats = hf.generate(
        shared_model(), ids, attention_mask=mask, draft_model=draft_model, num_draft_tokens=4, max_new_tokens=25,
        window=5, return_stats=True,
    )  # fmt: skip
    assert [row[ids.shape[1] :].tolist() for row in out] == [greedy_text("biases", p, 25) for p in prompts]
    assert 0.1 < stats.accept_rate < 1.0
    assert (attachment_of(draft_model) is not None) == attached


def test_draft_model_drafts_what_it_would_say_itself():
    """After rejections its state must be that of the text, or it would no longer agree with its own single steps."""
    draft_model, model, (prompt,) = nearly(fresh_model()), shared_model(), make_prompts("biases", (7,))
    text = prompt + greedy_text("biases", prompt, 25)
    seen = []

    def record(token_ids, num_tokens):
        known = token_ids.tolist()
        ids = hf.generate(draft_model, torch.tensor([known]), draft=None, max_new_tokens=num_tokens)
        seen.append(ids[0, len(known) :])
        return seen[-1]

    for source in (dict(draft=record), dict(draft_model=draft_model)):
        out, stats = hf.generate(model, torch.tensor([prompt]), max_new_tokens=25, return_stats=True, **source)
        assert out[0].tolist() == text
        seen.append((stats.rounds, stats.drafted, stats.accepted))
    assert seen[-1] == seen[-2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(draft="ngram"), ValueError, "draft: expected 'lookup', None or a callable, got 'ngram'"),
        (dict(draft=3), TypeError, "draft: expected 'lookup', None or a callable, got int"),
        (dict(num_draft_tokens=64), ValueError, r"num_draft_tokens: expected 0 <= num_draft_tokens <= 63, got 64"),
        (dict(num_draft_tokens=-1), ValueError, "got -1"),
        (dict(max_new_tokens=0), ValueError, "max_new_tokens: expected max_new_tokens >= 1, got 0"),
        (dict(window=0), ValueError, "window: expected 1 <= window <= 64, got 0"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        hf.generate(shared_model(), torch.tensor([[3, 4]]), **options)


def test_draft_model_must_fit():
    ids = torch.tensor([[3, 4]])
    with pytest.raises(ValueError, match="expected the model's vocabulary of 61 ids, got 53"):
        hf.generate(shared_model(), ids, draft_model=shared_model("tied"))
    with pytest.raises(ValueError, match="one source of drafts"):
        hf.generate(shared_model(), ids, draft_model=shared_model("tied"), draft=lambda t, n: t[:0])
    with pytest.raises(TypeError, match="PreTrainedModel"):
        hf.generate(shared_model(), ids, draft_model="small")


@pytest.mark.parametrize(("window", "num_draft_tokens"), [(16, 20), (3, 9), (16, 63)])
def test_a_draft_model_drafts_more_than_the_window_holds(window, num_draft_tokens):
    (prompt,), drafter = make_prompts("biases", (9,)), fresh_model()
    out, stats = hf.generate(
        shared_model(), torch.tensor([prompt]), draft_model=drafter, num_draft_tokens=num_draft_tokens, window=window,
        max_new_tokens=30, return_stats=True,
    )  # fmt: skip
    assert out[0, 9:].tolist() == greedy_text("biases", prompt, 30)
    assert stats.accepted == stats.drafted > 0
    assert attachment_of(drafter) is None


def test_a_draft_model_is_detached_when_its_cache_cannot_be_made(monkeypatch):
    drafter, made = fresh_model(seed=3), []
    monkeypatch.setattr("replayssm.hf.session.ReplayCache", lambda *_, **__: made.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.generate(shared_model(), torch.tensor([[3, 4]]), draft_model=drafter)
    assert made and attachment_of(drafter) is None and attachment_of(shared_model()) is None


def test_the_longest_draft():
    (prompt,) = make_prompts("tied", (5,))
    out = hf.generate(shared_model("tied"), torch.tensor([prompt]), num_draft_tokens=63, max_new_tokens=70)
    assert out[0, 5:].tolist() == greedy_text("tied", prompt, 70)
