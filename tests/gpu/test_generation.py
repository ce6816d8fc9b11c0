"""Generation with a transformers model on a CUDA device: against the CPU, with and without drafts, graphs, sessions."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "hf"))

from tiny import fresh_model, make_prompts
from torch import nn

import replayssm.hf as hf
from replayssm.hf.graph import Graphs
from replayssm.hf.sampling import Greedy
from replayssm.hf.session import Session, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT = 24
SMALL = 8192  # bytes of memory that libraries may keep


def padded_batch(name, lengths, seed=1):
    prompts = make_prompts(name, lengths, seed)
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def run(model, ids, mask, device, **options):
    ids, mask = ids.to(device), mask.to(device)
    options = {"max_new_tokens": COUNT, "eos_token_id": (), "num_draft_tokens": 3, "return_stats": True, **options}
    out, stats = hf.generate(model.to(device), ids, attention_mask=mask, **options)
    return out[:, ids.shape[1] :].cpu(), stats


def texts(model, ids, mask, device, **options):
    return run(model, ids, mask, device, **options)[0]


# Every model and every length of window is compiled for: few of both, used by all tests.
@pytest.mark.parametrize(("name", "lengths"), [("biases", (70, 5, 18)), ("biases", (5, 9, 5, 9, 5)), ("narrow", (3,))])
def test_same_text_on_the_cpu_and_with_any_drafts(name, lengths):
    model = fresh_model(name)
    ids, mask = padded_batch(name, lengths)
    expected = texts(model, ids, mask, "cpu", draft=None)
    for num_draft_tokens in (0, 3, 11):
        got, stats = run(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens)
        assert torch.equal(got, expected) and stats.exact and stats.eager_because is None
        # A shape runs eagerly once, then from its graph; without drafts there is one.
        assert stats.graph_rounds >= (stats.rounds - 1 if not num_draft_tokens else 0)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_end_at_different_times(rows):
    model = fresh_model("biases")
    ids, mask = padded_batch("biases", (7, 4, 12, 7, 5)[:rows], seed=3)
    whole = texts(model, ids, mask, "cpu", draft=None)
    options = dict(eos_token_id=[int(whole[0, 5]), int(whole[-1, 15])], pad_token_id=60)
    expected = texts(model, ids, mask, "cpu", draft=None, **options)
    for num_draft_tokens in (0, 11):
        assert torch.equal(texts(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens, **options), expected)


def test_a_seed_draws_the_same_text_with_and_without_drafts():
    model = fresh_model("biases")
    ids, mask = padded_batch("biases", (9, 4))
    options = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    plain = texts(model, ids, mask, "cuda", draft=None, seed=5, **options)
    drafted, stats = run(model, ids, mask, "cuda", num_draft_tokens=3, seed=5, **options)
    assert torch.equal(drafted, plain) and stats.graph_rounds > 0
    alone = texts(model, ids[1:], mask[1:], "cuda", seed=5, request_ids=[1], **options)
    assert torch.equal(alone, plain[1:])
    # The seed is no part of a graph.
    hf.attach(model)
    for seed in (5, 6, 5):
        again, stats = run(model, ids, mask, "cuda", num_draft_tokens=3, seed=seed, **options)
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


def scores_of(model, refuse, monkeypatch):
    """Logits and the pool after rounds of several shapes, from graphs or, with the same shapes, without."""
    with monkeypatch.context() as patch, torch.inference_mode():
        if refuse:
            patch.setattr(Graphs, "find", lambda *_: None)
        prompts = make_prompts("biases", (6, 3, 6, 70, 5), seed=4)
        tokens = torch.Generator().manual_seed(2)
        session = Session(model, Shape(5, 4, 16, Greedy()))
        session.step.start(0, range(5))
        logits = [logits.clone() for _, logits in session.prefill(prompts)]
        for turn in range(24):
            rows = [0, 1, 2, 3, 4] if turn < 15 else [1, 3, 4] if turn < 20 else [3]
            lengths = [(1, 3, 4, 2)[(turn + row) % 4] if turn % 3 else 1 for row in rows]
            windows = [torch.randint(1, 61, (n,), generator=tokens).tolist() for n in lengths]
            scores = session.step.score(rows, windows, [0] * len(rows))
            logits += [each[:n].clone() for each, n in zip(scores, lengths, strict=False)]
            session.cache.accept([1 + (turn + row) % n for row, n in zip(rows, lengths, strict=True)])
        pool = session.cache.pool
        kept = [pool.cursors.num_live, pool.cursors.ring_start, *(buffers.state for buffers in pool.buffers)]
        return logits, [tensor.clone() for tensor in kept], session.step.replayed


def test_a_graph_gives_the_bits_of_the_eager_step(monkeypatch):
    model = hf.attach(fresh_model("biases").cuda())
    logits, pool, replayed = scores_of(model, False, monkeypatch)
    expected, expected_pool, none = scores_of(model, True, monkeypatch)
    assert replayed > 10 and none == 0
    for got, right in zip(logits + pool, expected + expected_pool, strict=True):
        assert torch.equal(got, right)


def test_an_attached_model_keeps_its_graphs():
    model = hf.attach(fresh_model("biases").cuda())
    ids, mask = padded_batch("biases", (7, 4, 12))
    first, stats = run(model, ids, mask, "cuda")
    assert 0 < stats.graph_rounds < stats.rounds
    again, stats = run(model, ids, mask, "cuda")
    assert torch.equal(again, first) and stats.graph_rounds == stats.rounds
    other, stats = run(model, ids[:2], mask[:2], "cuda")
    assert torch.equal(other, first[:2]) and stats.graph_rounds < stats.rounds
    hf.detach(model)
    assert torch.equal(texts(model, ids, mask, "cuda"), first)


def change_values(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.25)


def change_version(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)


def change_places(model):
    mixer = model.backbone.layers[1].mixer
    mixer.in_proj.weight = nn.Parameter(mixer.in_proj.weight * 1.5)
    mixer.A_log.data = mixer.A_log.data + 0.5


@pytest.mark.parametrize("change", [change_values, change_version, change_places])
def test_weights_changed_between_generations_are_used(change):
    model, fresh = hf.attach(fresh_model("biases").cuda()), fresh_model("biases")
    ids, mask = padded_batch("biases", (7, 4, 12))
    before = texts(model, ids, mask, "cuda")
    change(model)
    change(fresh)
    expected = texts(fresh, ids, mask, "cpu", draft=None)
    assert not torch.equal(before, expected)
    for _ in range(2):
        assert torch.equal(texts(model, ids, mask, "cuda"), expected)


def test_memory_is_given_back():
    model = fresh_model("biases").cuda()
    ids, mask = padded_batch("biases", (7, 4, 12))

    def left():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    texts(model, ids, mask, "cuda")  # what libraries keep for good
    before = left()
    for _ in range(2):
        texts(model, ids, mask, "cuda")
        assert left() <= before + SMALL
    hf.attach(model)
    texts(model, ids, mask, "cuda")
    assert left() > before + 4 * SMALL
    hf.detach(model)
    assert left() <= before + SMALL


def test_hooks_are_called_and_no_graph_would_do_so():
    model, calls = fresh_model("biases"), []
    model.backbone.layers[0].register_forward_hook(lambda *_: calls.append(1))
    ids, mask = padded_batch("biases", (6, 9))
    expected = texts(model, ids, mask, "cpu")
    calls.clear()
    got, stats = run(model, ids, mask, "cuda")
    assert torch.equal(got, expected)
    assert stats.graph_rounds == 0 and "hooks" in stats.eager_because and len(calls) == stats.rounds + 2


class Reading(nn.Module):
    """A norm that reads a value back, which no capture allows."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.weight = norm, norm.weight

    def forward(self, hidden):
        assert hidden.abs().max().item() >= 0
        return self.norm(hidden)


def test_a_module_that_cannot_be_captured_runs_eagerly():
    model = fresh_model("biases")
    ids, mask = padded_batch("biases", (6, 9))
    expected = texts(model, ids, mask, "cpu")
    model.backbone.layers[1].norm = Reading(model.backbone.layers[1].norm)
    with pytest.warns(UserWarning, match="without CUDA graphs, capture failed"):
        got, stats = run(model, ids, mask, "cuda")
    assert torch.equal(got, expected)
    assert stats.graph_rounds == 0 and stats.eager_because.startswith("capture failed")
    model.backbone.layers[1].norm = model.backbone.layers[1].norm.norm
    got, stats = run(model, ids, mask, "cuda")
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


def test_threads_share_an_attached_model():
    model = hf.attach(fresh_model("biases").cuda())
    batches = [padded_batch("biases", lengths, seed) for seed, lengths in enumerate([(7, 4), (5,), (9, 6, 3)])]
    expected = [texts(model, ids, mask, "cuda") for ids, mask in batches]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            got = threads.map(lambda batch: texts(model, *batch, "cuda"), batches)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_weights_stay_as_they_are_stored():
    model = fresh_model("biases").bfloat16()
    ids, mask = padded_batch("biases", (7, 4, 12))
    expected = texts(fresh_model("biases").bfloat16().float(), ids, mask, "cpu")
    hf.attach(model.cuda())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for num_draft_tokens in (0, 3):
        got, stats = run(model, ids, mask, "cuda", num_draft_tokens=num_draft_tokens)
        assert torch.equal(got, expected) and stats.exact
