"""What generation keeps on a CUDA device between rounds and texts: graphs, sessions, memory; and when it may not."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

from generating import padded_batch, run, texts
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
FAMILIES = ("biases", "next")
SMALL = 8192  # bytes of memory that libraries may keep


def scores_of(model, prompts, window):
    """Logits and the pool after rounds of several shapes."""
    tokens = torch.Generator().manual_seed(2)
    session = Session(model, Shape(5, 4, window, Greedy()))
    session.step.start(0, range(5))
    logits = [logits.clone() for _, logits in session.prefill(prompts)]
    for turn in range(36):
        rows = [0, 1, 2, 3, 4] if turn < 18 else [1, 3, 4] if turn < 28 else [3]
        lengths = [(1, 3, 4, 2)[(turn + row) % 4] if turn % 3 else 1 for row in rows]
        windows = [torch.randint(1, 61, (n,), generator=tokens).tolist() for n in lengths]
        scores = session.step.score(rows, windows, [0] * len(rows))
        logits += [each[:n].clone() for each, n in zip(scores, lengths, strict=False)]
        session.cache.accept([1 + (turn + row) % n for row, n in zip(rows, lengths, strict=True)])
    pool = session.cache.pool
    kept = [pool.cursors.num_live, pool.cursors.ring_start, *(buffers.state for buffers in pool.buffers)]
    return logits + [tensor.clone() for tensor in kept], session.step.replayed


@pytest.mark.parametrize(("name", "longest", "window"), [("biases", 70, 16), ("next", 40, 9)])
def test_a_graph_gives_the_bits_of_the_eager_step(name, longest, window, monkeypatch):
    model, prompts = hf.attach(fresh_model(name).cuda()), make_prompts(name, (6, 3, 6, longest, 5), seed=4)
    with torch.inference_mode():
        scores, replayed = scores_of(model, prompts, window)
        monkeypatch.setattr(Graphs, "find", lambda *_: None)
        expected, none = scores_of(model, prompts, window)
    assert replayed > 10 and none == 0
    for got, right in zip(scores, expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_attached_model_keeps_its_graphs(name):
    model = hf.attach(fresh_model(name).cuda())
    ids, mask = padded_batch(name, (7, 4, 12))
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


@pytest.mark.parametrize(
    ("name", "change"),
    [("biases", change_values), ("biases", change_version), ("biases", change_places), ("next", change_values)],
)
def test_weights_changed_between_generations_are_used(name, change):
    model, fresh = hf.attach(fresh_model(name).cuda()), fresh_model(name)
    ids, mask = padded_batch(name, (7, 4, 12))
    before = texts(model, ids, mask, "cuda")
    change(model)
    change(fresh)
    expected = texts(fresh, ids, mask, "cpu", draft=None)
    assert not torch.equal(before, expected)
    for _ in range(2):
        assert torch.equal(texts(model, ids, mask, "cuda"), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_given_back(name):
    model = fresh_model(name).cuda()
    ids, mask = padded_batch(name, (7, 4, 12))

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


def test_experts_that_read_nothing_back_are_captured():
    model = fresh_model("next_moe")
    ids, mask = padded_batch("next_moe", (3,))
    expected = texts(model, ids, mask, "cpu", draft=None)
    model.set_experts_implementation("batched_mm")
    got, stats = run(model, ids, mask, "cuda")
    assert torch.equal(got, expected)
    assert stats.graph_rounds > 0 and stats.eager_because is None and not stats.rows_alike


def test_threads_share_an_attached_model():
    """They capture at the same time, and none of them breaks another's capture."""
    model = hf.attach(fresh_model("biases").cuda())
    batches = [padded_batch("biases", lengths, seed) for seed, lengths in enumerate([(7, 4), (5,), (9, 6, 3)])]
    expected = [texts(model, ids, mask, "cuda") for ids, mask in batches]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            done = threads.map(lambda batch: run(model, *batch, "cuda"), batches)
            for (got, stats), right in zip(done, expected, strict=True):
                assert torch.equal(got, right) and stats.eager_because is None
