"""Steps whose forwards come from a graph. Here a call under ``recording`` stands for a replay, which tells the host
as little; the graphs themselves are tested on a GPU (tests/gpu/test_generation.py)."""

import copy

import pytest
import torch
from tiny import fresh_model, greedy_text, make_prompts, oracle, pad
from torch import nn
from transformers import RepetitionPenaltyLogitsProcessor

import replayssm.hf as hf
from replayssm.hf.attachment import attachment_of
from replayssm.hf.graph import Graphs, why_not
from replayssm.hf.sampling import Greedy
from replayssm.hf.session import Session, Shape

COUNT = 21


class Replayed:
    def __init__(self, function, recording):
        self.function, self.recording = function, recording

    def replay(self):
        with self.recording():
            return self.function()


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Keys in the order of the steps behind the prompts."""
    keys, others = [], []

    def find(self, key, function, recording):
        found = others if key == "weights" or key[0] == "_last_scores" else keys
        found.append(key)
        return Replayed(function, recording) if found.count(key) > 1 else None

    monkeypatch.setattr("replayssm.hf.session.why_not", lambda *_: None)
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(Graphs, "find", find)
    return keys


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    from replayssm.hf import attachment, linear, norm

    for module in (norm, attachment):
        monkeypatch.setattr(module, "pays", lambda _: True)
    monkeypatch.setattr("replayssm.hf.cache.may_pack", lambda _: False)
    monkeypatch.setattr(linear, "_plain", linear._alone)
    monkeypatch.setattr(linear, "_measurements", {})  # what is measured of it holds for no other product


def generate(model, prompts, **options):
    ids, mask = pad(prompts)
    options = {"max_new_tokens": COUNT, "return_stats": True, "pad_token_id": 0, **options}
    out, stats = hf.generate(model, ids, attention_mask=mask, **options)
    return [row[ids.shape[1] :].tolist() for row in out], stats


@pytest.mark.parametrize("draft", ["lookup", None, "mixed"])
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_text_with_padded_shapes_and_commits_inside_the_step(draft, batch, graphs):
    prompts = make_prompts("biases", (9, 2, 14, 5, 1)[:batch])
    expected = [greedy_text("biases", prompt, COUNT) for prompt in prompts]
    if draft == "mixed":
        draft = oracle([p + e for p, e in zip(prompts, expected, strict=True)], lambda place: place % 5 != 0)
    texts, stats = generate(fresh_model(), prompts, draft=draft, num_draft_tokens=5)
    assert texts == expected
    assert stats.graph_rounds == stats.rounds - len(set(graphs)) > 0 and stats.eager_because is None
    assert {width for _, _, width in graphs} <= ({1} if draft is None else {1, 2, 4, 6})
    assert {total for _, total, _ in graphs} <= {1: {1}, 3: {1, 2, 3}, 5: {1, 2, 4, 5}}[batch]


def test_rows_that_ended_leave_padding_behind(graphs):
    prompts = make_prompts("biases", (5, 8, 3, 6, 9), seed=3)
    texts = [greedy_text("biases", prompt, COUNT) for prompt in prompts]
    ends = (texts[0][3], texts[1][9])
    expected = [text[: min((text.index(e) + 1 for e in ends if e in text), default=COUNT)] for text in texts]
    got, stats = generate(fresh_model(), prompts, draft=None, eos_token_id=ends)
    assert len({len(text) for text in expected}) > 2
    assert got == [text + [0] * (max(map(len, expected)) - len(text)) for text in expected]
    assert {total for _, total, _ in graphs} >= {5, 4} and stats.graph_rounds > 0


def test_processors_run_on_scores_of_a_graph():
    prompts = make_prompts("biases", (6, 3, 9))
    options = dict(logits_processor=[RepetitionPenaltyLogitsProcessor(1.7)], num_draft_tokens=4)
    texts, stats = generate(fresh_model(), prompts, **options)
    assert stats.graph_rounds > 0
    for prompt, text in zip(prompts, texts, strict=True):
        assert generate(fresh_model(), [prompt], draft=None, **options)[0] == [text]


def test_a_draft_model_steps_alike(graphs):
    prompts = make_prompts("biases", (6, 3, 9))
    texts, stats = generate(fresh_model(), prompts, draft_model=fresh_model(), num_draft_tokens=3)
    assert texts == [greedy_text("biases", prompt, COUNT) for prompt in prompts]
    assert stats.accepted == stats.drafted > 0 and len(graphs) > 2 * stats.rounds


def test_an_attached_model_keeps_its_session(graphs):
    model, prompts = hf.attach(fresh_model()), make_prompts("biases", (6, 3, 9))
    first, _ = generate(model, prompts)
    (session,) = attachment_of(model).sessions
    graphs_before = len(set(graphs))
    again, stats = generate(model, prompts)
    assert again == first and attachment_of(model).sessions == [session]
    assert stats.graph_rounds == stats.rounds and len(set(graphs)) == graphs_before
    # The two newest are kept.
    generate(model, prompts, draft=None)
    generate(model, prompts)
    older, newer = attachment_of(model).sessions
    assert newer is session and older.cache.pool is not session.cache.pool
    generate(model, prompts[:2])
    newer, newest = attachment_of(model).sessions
    assert newer is session and newest is not older
    twin = copy.deepcopy(model)
    assert attachment_of(twin).sessions == [] and generate(twin, prompts)[0] == first
    with pytest.raises(ValueError, match="3 numbers"):
        generate(model, prompts, request_ids=[0])
    hf.detach(model)
    assert attachment_of(model) is None


def test_a_generation_that_failed_leaves_no_session():
    model, prompts = hf.attach(fresh_model()), make_prompts("biases", (6, 3, 9))

    def draft(token_ids, num_tokens):
        return torch.tensor([99])

    generate(model, prompts, num_draft_tokens=4)  # as many as of a callable
    with pytest.raises(ValueError, match="expected token ids"):
        generate(model, prompts, draft=draft)
    assert attachment_of(model).sessions == []


def test_memory_of_kept_sessions_is_given_up_for_a_new_one(monkeypatch):
    model, prompts = hf.attach(fresh_model()), make_prompts("biases", (6, 3))
    generate(model, prompts)
    (kept,) = attachment_of(model).sessions
    own, failures = Session.__init__, [1]

    def fails_once(self, *args):
        if failures.pop() if failures else 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        own(self, *args)

    monkeypatch.setattr(Session, "__init__", fails_once)
    assert generate(model, prompts, draft=None)[0] == [greedy_text("biases", prompt, COUNT) for prompt in prompts]
    assert len(attachment_of(model).sessions) == 1 and kept not in attachment_of(model).sessions
    hf.detach(model)
    failures.append(1)
    with pytest.raises(torch.OutOfMemoryError):  # nothing to give up
        generate(model, prompts)


def by_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.25)


def by_copy(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)


def by_parameter(model):
    mixer = model.backbone.layers[1].mixer
    mixer.in_proj.weight = nn.Parameter(mixer.in_proj.weight * 1.5)
    mixer.A_log.data = mixer.A_log.data + 0.5


def by_limit(model):
    for layer in model.backbone.layers:
        layer.mixer.time_step_limit = (0.1, 0.2)


@pytest.mark.parametrize("change", [by_data, by_copy, by_parameter, by_limit])
def test_weights_changed_between_generations_are_used(change, as_on_a_gpu):
    model, fresh, prompts = hf.attach(fresh_model()), fresh_model(), make_prompts("biases", (6, 3, 9))
    before, _ = generate(model, prompts)
    change(model)
    change(fresh)
    expected, _ = generate(fresh, prompts)
    assert expected != before
    for _ in range(2):
        assert generate(model, prompts)[0] == expected


def hooked_head(model):
    model.lm_head.register_forward_hook(lambda *_: None)


def own_forward(model):
    projection = model.backbone.layers[1].mixer.in_proj
    projection.forward = lambda x: x


def other_head(model):
    model.lm_head = nn.Linear(24, 61)


@pytest.mark.parametrize("change", [hooked_head, own_forward, other_head])
def test_what_would_be_bypassed_is_found_between_generations(change, as_on_a_gpu):
    model, prompts = hf.attach(fresh_model()), make_prompts("biases", (6, 3, 9))
    for _ in range(2):
        generate(model, prompts)
    change(model)
    with pytest.raises(ValueError, match=r"model: (layer|its head)"):
        generate(model, prompts)


@torch.inference_mode()
def test_padding_leaves_the_other_slots_alone():
    model, prompts = hf.attach(fresh_model()), make_prompts("biases", (6, 3, 9, 2, 4))
    session = Session(model, Shape(5, 4, 8, Greedy()))
    session.step.start(0, range(5))
    for _ in session.prefill(prompts):
        pass
    session.step.choose([0, 1, 2, 3, 4], [[5], [6, 7], [8], [9], [5]], [0] * 5)
    session.cache.accept([1, 2, 0, 2, 1])
    idle = [int(session.cache.slots[row]) for row in (0, 3)]
    before = [tensor[idle].clone() for tensor in session.cache.pool.per_slot().values()]
    for _ in range(3):
        session.step.choose([1, 2, 4], [[5, 6, 7], [8], [9, 4]], [0] * 3)
        session.cache.accept([2, 1, 4])
    assert session.cache.slots[3:].tolist() == [-1]
    assert all(torch.equal(a, b[idle]) for a, b in zip(before, session.cache.pool.per_slot().values(), strict=True))
    # What the idle rows are owed is still noted.
    session.cache.select([0, 3])
    assert session.cache.take_owed() == [(2, 1), (2, 2)]


def test_what_cannot_be_captured():
    model = fresh_model()
    assert "cpu" in why_not(model, torch.device("cpu"))
    assert why_not(model, torch.device("cuda")) is None
    hook = model.backbone.layers[0].register_forward_pre_hook(lambda *_: None)
    assert "hooks" in why_not(model, torch.device("cuda"))
    hook.remove()


def test_checked_mode_captures_nothing(monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    assert "REPLAYSSM_CHECK" in why_not(fresh_model(), torch.device("cuda"))


@pytest.mark.parametrize("options", [dict(), dict(do_sample=True), dict(stopping_criteria=[lambda *_: False])], ids=str)
def test_scores_that_are_no_numbers_name_their_row(options):
    model, prompts = fresh_model(), make_prompts("biases", (6, 3))
    text = greedy_text("biases", prompts[1], 4)
    with torch.no_grad():
        model.backbone.embeddings.weight[prompts[1][-1]] = float("nan")
    prompts[0] = [token for token in prompts[0] if token != prompts[1][-1]]
    with pytest.raises(ValueError, match=r"model: expected scores .* got NaN .* in row 1 for token 3 of its text"):
        generate(model, prompts, **options)
    assert text


def test_no_token_left_by_the_processors():
    with pytest.raises(ValueError, match="minus infinity alone in row 0 for token 2"):
        generate(fresh_model(), [[3, 4]], logits_processor=[lambda ids, scores: scores - torch.inf])


def test_hooks_that_would_not_be_called_are_refused():
    model, calls = fresh_model(), []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    for options in (dict(model=model), dict(model=fresh_model(), draft_model=model)):
        with pytest.raises(ValueError, match=r"model: expected no forward hooks on the whole model"):
            hf.generate(input_ids=torch.tensor([[3, 4]]), **options)
    assert attachment_of(model) is None
    hook.remove()
    model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    _, stats = generate(model, [[3, 4]], draft=None)
    assert len(calls) == stats.rounds + 1


def test_norms_in_one_launch_are_those_of_the_model(monkeypatch):
    from replayssm.hf import norm

    model = fresh_model()
    monkeypatch.setattr(norm, "pays", lambda _: True)
    assert norm.is_known(model.backbone.norm_f)
    plain, gated = model.backbone.layers[0].norm, model.backbone.layers[0].mixer.norm
    x, y, gate = torch.randn(2, 3, 24), torch.randn(2, 3, 48), torch.randn(2, 3, 48)
    assert torch.equal(norm.in_one_launch(plain)(x), plain(x))
    assert torch.equal(norm.in_one_launch(gated)(y, gate), gated(y, gate))
    model.backbone.norm_f.register_forward_hook(lambda *_: None)
    assert not norm.is_known(model.backbone.norm_f) and norm.in_one_launch(model.lm_head) is model.lm_head
    prompts = make_prompts("biases", (6, 3, 9))
    texts, _ = generate(fresh_model(), prompts)
    assert texts == [greedy_text("biases", prompt, COUNT) for prompt in prompts]


@pytest.mark.parametrize("name", ["biases", "tied", "next", "3_5"])
def test_weights_stay_as_they_are_stored(name, as_on_a_gpu):
    prompts = make_prompts(name, (6, 3, 9))
    model, wide = fresh_model(name).bfloat16(), fresh_model(name).bfloat16().float()
    hf.attach(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    texts, stats = generate(model, prompts)
    assert texts == generate(wide, prompts)[0] and stats.rows_alike
    # Its own forward is still that of bf16.
    ids = torch.tensor([prompts[0]])
    assert torch.equal(model(ids).logits, fresh_model(name).bfloat16()(ids).logits)
    for one, other in zip(model.named_parameters(), wide.parameters(), strict=True):
        if one[0].endswith(("A_log", "conv1d.weight", "norm.weight")):
            one[1].data.mul_(1.5)
            other.data.copy_(one[1])
    assert generate(model, prompts)[0] == generate(wide, prompts)[0]


def test_a_model_with_a_module_of_its_own_is_converted(as_on_a_gpu):
    model = fresh_model().bfloat16()
    model.backbone.layers[0].norm.register_forward_hook(lambda *_: None)
    hf.attach(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    hf.detach(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("pieces", [0, 64], ids=["whole", "pieces"])
@pytest.mark.parametrize("length", [16, 17, 63, 64, 65, 131, 192])
def test_prompts_of_several_blocks(length, pieces, monkeypatch):
    monkeypatch.setattr("replayssm.hf.session._PIECES", pieces)
    (prompt,) = make_prompts("tied", (length,))
    assert generate(fresh_model("tied"), [prompt], max_new_tokens=12)[0] == [greedy_text("tied", prompt, 12)]


@pytest.mark.parametrize("name", ["biases", "next"])
def test_prompts_in_pieces(name, graphs, monkeypatch):
    """Whole beside piecewise ones, rows that end before others, texts that outgrow the first buffers of keys."""
    monkeypatch.setattr("replayssm.hf.session._PIECES", 5)
    prompts = make_prompts(name, (40, 3, 70, 81, 16), 3)
    model = hf.attach(fresh_model(name))
    # Twice, the second time in rows and buffers that hold what the first one left.
    for _ in range(2):
        texts, stats = generate(model, prompts, num_draft_tokens=3)
        assert texts == [greedy_text(name, prompt, COUNT) for prompt in prompts]
        assert stats.new_tokens == COUNT * 5 and stats.accepted <= stats.drafted
    assert stats.graph_rounds == stats.rounds


@pytest.mark.parametrize("exact", [False, True])
def test_pieces_have_the_bits_of_the_row_alone(exact):
    model, prompts = hf.attach(fresh_model()), make_prompts("biases", (40, 3, 70, 17, 16))

    @torch.inference_mode()
    def logits(some):
        session = Session(model, Shape(len(some), 4, 16, Greedy(), exact))
        session.step.start(0, range(len(some)))
        found = {
            row: scores.clone() for rows, each in session.prefill(some) for row, scores in zip(rows, each, strict=True)
        }
        assert session.step.replayed == session.cache.traffic.verified == 0
        return [found[row] for row in range(len(some))]

    for alone, together in zip(prompts, logits(prompts), strict=True):
        assert torch.equal(logits([alone])[0], together)
        if exact:
            assert torch.equal(hf.score(model, torch.tensor([alone]), exact=True)[0, -1:], together)


def test_bytes_are_those_of_one_generation():
    model, prompts = hf.attach(fresh_model()), make_prompts("biases", (40, 3))
    first, again = (generate(model, prompts)[1] for _ in range(2))
    assert first.state_bytes_read == again.state_bytes_read > 0 and first.flushes == again.flushes
