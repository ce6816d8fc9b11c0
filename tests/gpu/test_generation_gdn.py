"""Generation with Gated DeltaNet and attention layers on a CUDA device: CPU, drafts, graphs, texts that grow."""

import gc
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "hf"))

from tiny import fresh_model, make_prompts

import replayssm.hf as hf
from replayssm.hf.graph import Graphs
from replayssm.hf.sampling import Greedy
from replayssm.hf.session import Session, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT = 24


def padded_batch(name, lengths, seed=1):
    prompts = make_prompts(name, lengths, seed)
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def run(model, ids, mask, device, **options):
    options = {"max_new_tokens": COUNT, "eos_token_id": (), "return_stats": True, **options}
    out, stats = hf.generate(model.to(device), ids.to(device), attention_mask=mask.to(device), **options)
    return out[:, ids.shape[1] :].cpu(), stats


def texts(model, ids, mask, device, **options):
    return run(model, ids, mask, device, **options)[0]


def check_against_the_cpu(name, lengths, drafts, seed):
    model = fresh_model(name)
    ids, mask = padded_batch(name, lengths, seed)
    expected = texts(model, ids, mask, "cpu", draft=None)
    for num_draft_tokens in drafts:
        got, stats = run(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens)
        assert torch.equal(got, expected)
        if "moe" not in name:  # transformers' experts may read back which of them are needed
            assert stats.graph_rounds >= stats.rounds - 8 and stats.eager_because is None


# Every width of a window and every model is compiled for, so there are few. The seeds are such that the two likeliest
# tokens are never closer than 6e-3.
@pytest.mark.parametrize(
    ("name", "lengths", "seed"), [("next", (70, 5, 18), 9), ("3_5", (5, 9, 5, 9, 5), 2), ("3_5_moe", (4, 7), 1)]
)
def test_same_text_on_the_cpu_and_with_drafts(name, lengths, seed):
    check_against_the_cpu(name, lengths, (3,), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_itself_with_a_cache(dtype):
    """Its head is ours too: activations are fp32 whatever the weights are stored as."""
    model, ids = fresh_model("next").to(dtype), torch.tensor(make_prompts("next", (30, 30)))
    expected = hf.score(model, ids)
    hf.attach(model.cuda())
    with torch.no_grad(), hf.ReplayCache(model, 2, max_tokens=5) as cache:
        for first, end, taken_back in ((0, 13, 0), (13, 18, 3), (15, 20, 0), (20, 21, 0)):
            logits = model(ids[:, first:end].cuda(), **{cache.name: cache}).logits
            torch.testing.assert_close(logits.cpu(), expected[:, first:end], atol=1e-4, rtol=1e-4)
            if taken_back:
                cache.crop(-taken_back)


def test_experts_that_read_nothing_back_are_captured():
    model = fresh_model("next_moe")
    ids, mask = padded_batch("next_moe", (3,))
    expected = texts(model, ids, mask, "cpu", draft=None)
    model.set_experts_implementation("batched_mm")
    got, stats = run(model, ids, mask, "cuda", num_draft_tokens=3)
    assert torch.equal(got, expected)
    assert stats.graph_rounds > 0 and stats.eager_because is None and not stats.exact


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lengths", "seed"), [("next", (70, 5, 18), 9), ("3_5", (5, 9, 5, 9, 5), 2)])
def test_same_text_with_drafts_of_any_length(name, lengths, seed):
    check_against_the_cpu(name, lengths, (0, 1, 4, 11, 15), seed)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_texts_that_outgrow_the_buffers_of_keys(attention):
    """From 60 tokens to 140: the buffers double twice, each time with new graphs."""
    model = fresh_model("next", attn_implementation=attention)
    ids, mask = padded_batch("next", (5, 60, 33), seed=18)
    expected = texts(model, ids, mask, "cpu", draft=None, max_new_tokens=80)
    got, stats = run(model, ids, mask, "cuda", num_draft_tokens=3, max_new_tokens=80)
    assert torch.equal(got, expected)
    assert stats.graph_rounds > stats.rounds // 2


def test_rows_end_at_different_times():
    model = fresh_model("next")
    ids, mask = padded_batch("next", (7, 4, 12, 7, 5), seed=3)
    whole = texts(model, ids, mask, "cpu", draft=None)
    options = dict(eos_token_id=[int(whole[0, 5]), int(whole[-1, 15])], pad_token_id=60)
    expected = texts(model, ids, mask, "cpu", draft=None, **options)
    for num_draft_tokens in (0, 3):
        assert torch.equal(texts(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens, **options), expected)


def test_a_seed_draws_the_same_text_with_and_without_drafts():
    model = fresh_model("next")
    ids, mask = padded_batch("next", (9, 4))
    options = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9, seed=5)
    plain = texts(model, ids, mask, "cuda", draft=None, **options)
    drafted, stats = run(model, ids, mask, "cuda", num_draft_tokens=3, **options)
    assert torch.equal(drafted, plain) and stats.graph_rounds > 0
    assert torch.equal(texts(model, ids[1:], mask[1:], "cuda", request_ids=[1], **options), plain[1:])


def scores_of(model, refuse, monkeypatch):
    """Logits after rounds of several shapes, from graphs or, with the same shapes, without."""
    with monkeypatch.context() as patch, torch.inference_mode():
        if refuse:
            patch.setattr(Graphs, "find", lambda *_: None)
        prompts, tokens = make_prompts("next", (6, 3, 6, 40, 5), seed=4), torch.Generator().manual_seed(2)
        session = Session(model, Shape(5, 4, 9, Greedy()))
        session.step.start(0, range(5))
        logits = [logits.clone() for _, logits in session.prefill(prompts)]
        for turn in range(36):
            rows = [0, 1, 2, 3, 4] if turn < 18 else [1, 3, 4] if turn < 28 else [3]
            lengths = [(1, 3, 4, 2)[(turn + row) % 4] if turn % 3 else 1 for row in rows]
            windows = [torch.randint(1, 61, (n,), generator=tokens).tolist() for n in lengths]
            scores = session.step.score(rows, windows, [0] * len(rows))
            logits += [each[:n].clone() for each, n in zip(scores, lengths, strict=False)]
            session.cache.accept([1 + (turn + row) % n for row, n in zip(rows, lengths, strict=True)])
        return logits, session.step.replayed


def test_a_graph_gives_the_bits_of_the_eager_step(monkeypatch):
    model = hf.attach(fresh_model("next").cuda())
    logits, replayed = scores_of(model, False, monkeypatch)
    expected, none = scores_of(model, True, monkeypatch)
    assert replayed > 10 and none == 0
    for got, right in zip(logits, expected, strict=True):
        assert torch.equal(got, right)


def test_an_attached_model_keeps_its_graphs_and_follows_its_weights():
    model, fresh = hf.attach(fresh_model("next").cuda()), fresh_model("next")
    ids, mask = padded_batch("next", (7, 4, 12))
    first, stats = run(model, ids, mask, "cuda", num_draft_tokens=3)
    assert 0 < stats.graph_rounds < stats.rounds
    again, stats = run(model, ids, mask, "cuda", num_draft_tokens=3)
    assert torch.equal(again, first) and stats.graph_rounds == stats.rounds
    for each in (model, fresh):
        for parameter in each.parameters():
            parameter.data.mul_(1.25)
    expected = texts(fresh, ids, mask, "cpu", draft=None)
    assert not torch.equal(first, expected)
    assert torch.equal(texts(model, ids, mask, "cuda", num_draft_tokens=3), expected)


def test_memory_is_given_back():
    model = fresh_model("next").cuda()
    ids, mask = padded_batch("next", (7, 4, 12))

    def left():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    texts(model, ids, mask, "cuda", num_draft_tokens=3)  # what libraries keep for good
    before = left()
    for _ in range(2):
        texts(model, ids, mask, "cuda", num_draft_tokens=3)
        assert left() == before
