"""Sampling: the noise belongs to a place in a text, and what is drawn has the model's distribution."""

import functools

import pytest
import torch
from tiny import fresh_model, make_prompts, pad, shared_model
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import replayssm.hf as hf
from replayssm.gumbel import gumbel_noise
from replayssm.hf.sampling import Greedy, Gumbel, signed_seed


def place(seed, requests, positions):
    requests = torch.tensor(requests)
    return torch.full_like(requests, signed_seed(seed)), requests, torch.tensor(positions)


def test_noise_is_a_function_of_its_place():
    whole = gumbel_noise(*place(5, [[0], [7]], [[3, 4, 9]]), 13)
    assert whole.shape == (2, 3, 13) and whole.dtype == torch.float64 and whole.isfinite().all()
    assert torch.equal(whole[1, 2], gumbel_noise(*place(5, 7, 9), 13))
    assert torch.equal(whole[1, 2, :6], gumbel_noise(*place(5, 7, 9), 6))
    places = ((6, 7, 9), (5, 8, 9), (5, 7, 10), (5 + 2**32, 7, 9), (2**64 - 1, 7, 9))
    others = [gumbel_noise(*place(seed, request, position), 13) for seed, request, position in places]
    for other in others:
        assert not torch.isclose(whole[1, 2], other).any()


def test_noise_is_gumbel():
    noise = gumbel_noise(*place(1, 0, list(range(40))), 2500).flatten()
    euler, deviation = 0.5772157, 1.2825498
    assert abs(noise.mean() - euler) < 5 * deviation / len(noise) ** 0.5
    assert abs(noise.std() - deviation) < 0.02
    # Kolmogorov-Smirnov distance to exp(-exp(-x)), 0.1 % level.
    ordered = torch.exp(-torch.exp(-noise.sort().values))
    steps = (torch.arange(len(noise)) + 0.5) / len(noise)
    assert (ordered - steps).abs().max() < 1.95 / len(noise) ** 0.5


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, None), (0.7, 3, None), (1.6, None, 0.6), (0.9, 5, 0.8), (1, 40, 1)]
)
def test_distribution(temperature, top_k, top_p):
    vocab, draws = 9, 20000
    logits = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    chosen = Gumbel(temperature, top_k, top_p).choose(
        logits.expand(4, draws // 4, vocab),
        torch.full((4,), 11),
        torch.arange(4),
        torch.arange(draws // 4).expand(4, -1),
    )
    scores = TemperatureLogitsWarper(float(temperature))(None, logits[0])
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(float(top_p))(None, scores)
    expected = scores[0].double().softmax(-1) * draws
    counts = chosen.flatten().bincount(minlength=vocab).double()
    assert (counts[expected == 0] == 0).all()
    live = expected > 0
    statistic = ((counts - expected)[live] ** 2 / expected[live]).sum().item()
    # Upper 0.1 % points of chi-square with 1..8 degrees of freedom.
    assert statistic < (10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1)[int(live.sum()) - 2]


def test_top_p_keeps_the_likeliest_token():
    logits = torch.tensor([[[0.0, 4.0, 1.0]]])
    assert Gumbel(top_p=1e-9).choose(logits, *place(0, [0], [[5]])).item() == 1


def test_ties_take_the_smallest_id():
    logits = torch.tensor([[[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]]])
    assert Greedy().choose(logits, *place(0, [0], [[0, 1]])).tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=0.0), r"temperature: expected a finite number > 0 .*do_sample=False.*got 0"),
        (dict(temperature=-1.0), "got -1"),
        (dict(temperature=float("inf")), "got inf"),
        (dict(temperature="1"), "temperature: expected a number, got '1' of type str"),
        (dict(top_k=2.5), r"top_k: expected an int, got 2\.5 of type float"),
        (dict(top_p="1"), "top_p: expected a number, got '1' of type str"),
        (dict(seed=-1), r"seed: expected 0 <= seed <= 18446744073709551615, got -1"),
        (dict(seed=2**64), r"seed: .* got 18446744073709551616"),
        (dict(seed=None), "seed: expected an int, got None"),
        (dict(top_k=0), r"top_k: expected a number >= 1 or None, got 0"),
        (dict(top_p=0.0), r"top_p: expected 0 < top_p <= 1 or None, got 0"),
        (dict(top_p=1.5), "got 1.5"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        hf.generate(shared_model(), torch.tensor([[3]]), do_sample=True, **options)


def sample(prompts, draft, request_ids, seed=4, num_draft_tokens=4, **options):
    ids, mask = pad(prompts)
    out, stats = hf.generate(
        shared_model("tied"), ids, attention_mask=mask, draft=draft, do_sample=True, temperature=1.3, top_k=20,
        top_p=0.95, seed=seed, request_ids=request_ids, num_draft_tokens=num_draft_tokens, max_new_tokens=18,
        return_stats=True, **options,
    )  # fmt: skip
    return [row[ids.shape[1] :].tolist() for row in out], stats


def test_same_seed_same_text_with_and_without_drafts_and_in_any_batch():
    prompts = make_prompts("tied", (5, 9, 3, 9))
    expected, _ = sample(prompts, None, None)
    assert len({tuple(text) for text in expected}) == 4
    known = [p + e for p, e in zip(prompts, expected, strict=True)]

    def half_right(token_ids, num_tokens):
        text = next(text for text in known if text[: len(token_ids)] == token_ids.tolist())
        return torch.tensor([t if i != 2 else abs(t - 1) for i, t in enumerate(text[len(token_ids) :][:num_tokens])])

    for draft, count in ((half_right, 5), (half_right, 2), ("lookup", 3)):
        texts, stats = sample(prompts, draft, None, num_draft_tokens=count)
        assert texts == expected
        assert draft == "lookup" or stats.accepted > 10
    for row in (3, 1):
        assert sample([prompts[row]], half_right, [row])[0] == [expected[row]]
    assert sample([prompts[2], prompts[0]], "lookup", [2, 0])[0] == [expected[2], expected[0]]
    assert sample(prompts, None, None, seed=5)[0] != expected


@pytest.mark.parametrize("through_transformers", [False, True])
def test_another_sample_needs_another_seed(through_transformers):
    """A second call draws the same, and torch's generator is neither asked nor moved."""
    model, ids = shared_model(), torch.tensor(make_prompts("biases", (7,)))
    options = {"do_sample": True, "max_new_tokens": 20, "eos_token_id": ()}
    if through_transformers:
        options |= {"custom_generate": hf.custom_generate, "eos_token_id": None}
    run = model.generate if through_transformers else functools.partial(hf.generate, model)
    texts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        texts.append(run(ids, **options))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*texts) and not torch.equal(run(ids, seed=1, **options), texts[0])


def test_equal_prompts_draw_different_texts():
    prompts = make_prompts("tied", (6,)) * 3
    texts, _ = sample(prompts, "lookup", None)
    assert len({tuple(text) for text in texts}) == 3


def test_a_draft_model_uses_the_same_noise():
    prompts = make_prompts("tied", (5, 9, 3))
    expected, _ = sample(prompts, None, None)
    texts, stats = sample(prompts, "lookup", None, draft_model=fresh_model("tied"), num_draft_tokens=3)
    assert texts == expected
    assert stats.accept_rate == 1.0  # the draft model is the model itself


@pytest.mark.parametrize("ids", [[0], [0, 1, 2], [-1, 0], [0, 2**32]])
def test_request_ids_are_checked(ids):
    with pytest.raises(ValueError, match=r"request_ids: expected 2 numbers in 0\.\.4294967295, one per row, got"):
        hf.generate(shared_model(), torch.tensor([[3], [4]]), request_ids=ids)


def test_request_ids_are_integers():
    with pytest.raises(TypeError, match=r"request_ids: expected an int or several, got \[0, 1\.5\] of type list"):
        hf.generate(shared_model(), torch.tensor([[3], [4]]), request_ids=[0, 1.5])


def test_sampling_options_without_sampling_are_refused():
    with pytest.raises(ValueError, match="need do_sample=True"):
        hf.generate(shared_model(), torch.tensor([[3]]), temperature=0.5)
