"""Exact decode: logits of every way to decode a text are those of one forward over it, bit for bit."""

import inspect

import pytest
import torch
from tiny import MAMBA2, fresh_model, make_prompts, oracle, pad, shared_model
from transformers import LogitsProcessorList

import replayssm.hf as hf
from replayssm.cache import ExactMamba2Layer
from replayssm.hf.linear import RowProduct
from replayssm.hf.norm import Norm

LENGTHS = (19, 3, 16, 34, 1)
COUNT = 27


class Recorded:
    """A logits processor that notes which logits each token of a text was chosen from."""

    def __init__(self):
        self.logits = {}

    def __call__(self, ids, scores):
        # A row's text names it; a later forward over the same text must find the same logits.
        text = tuple(ids[0].tolist())
        if text in self.logits:
            assert torch.equal(self.logits[text], scores[0])
        self.logits[text] = scores[0].clone()
        return scores


def texts_of(out, ids, mask):
    """Every row's whole text without the padding of its prompt."""
    width = ids.shape[1]
    return [row[:width][mask[i].bool()].tolist() + row[width:].tolist() for i, row in enumerate(out)]


@pytest.mark.parametrize("name", MAMBA2)
@pytest.mark.parametrize(
    ("draft", "tokens"), [(None, 0), ("lookup", 6), ("right", 5), ("wrong", 3), ("alternating", 8), ("right", 15)]
)
def test_logits_are_those_of_one_forward(name, draft, tokens):
    model, prompts = shared_model(name), make_prompts(name, LENGTHS)
    ids, mask = pad(prompts, "left")
    plain = hf.generate(model, ids, attention_mask=mask, draft=None, max_new_tokens=COUNT, exact=True)
    if draft in ("right", "wrong", "alternating"):
        hits = {"right": lambda p: True, "wrong": lambda p: False, "alternating": lambda p: p % 2 == 0}[draft]
        draft = oracle(texts_of(plain, ids, mask), hits)
    recorded = Recorded()
    out, stats = hf.generate(
        model, ids, attention_mask=mask, draft=draft, num_draft_tokens=tokens, max_new_tokens=COUNT, exact=True,
        logits_processor=LogitsProcessorList([recorded]), return_stats=True,
    )  # fmt: skip
    assert torch.equal(out, plain)
    assert stats.rows_alike
    for text in texts_of(out, ids, mask):
        whole = hf.score(model, torch.tensor([text]), exact=True)[0]
        for place in range(len(text) - COUNT, len(text)):
            assert torch.equal(recorded.logits[tuple(text[:place])], whole[place - 1]), place
    assert len(recorded.logits) >= len(prompts) * COUNT


def test_score_does_not_depend_on_padding_or_neighbours():
    model, prompts = shared_model("biases"), make_prompts("biases", LENGTHS)
    ids, mask = pad(prompts, "left")
    together = hf.score(model, ids, attention_mask=mask, exact=True)
    assert not together[mask == 0].any()
    for row, prompt in enumerate(prompts):
        alone = hf.score(model, torch.tensor([prompt]), exact=True)[0]
        assert torch.equal(together[row][mask[row].bool()], alone)


def test_exact_and_ordinary_logits_agree_within_rounding():
    model, ids = shared_model("tied"), torch.tensor(make_prompts("tied", [41]))
    ordinary, exact = hf.score(model, ids), hf.score(model, ids, exact=True)
    assert not torch.equal(ordinary, exact)
    torch.testing.assert_close(ordinary, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(exact, model(ids).logits, rtol=1e-3, atol=1e-3)


def test_sampled_texts_are_the_same_with_and_without_drafts():
    model, ids = shared_model("biases"), torch.tensor(make_prompts("biases", [9, 9]))
    options = {"max_new_tokens": 33, "do_sample": True, "temperature": 1.3, "seed": 5, "exact": True}
    plain = hf.generate(model, ids, draft=None, **options)
    drafted, stats = hf.generate(
        model, ids, draft=oracle(plain.tolist(), lambda p: p % 3 != 0), num_draft_tokens=7, return_stats=True, **options
    )
    assert torch.equal(plain, drafted)
    assert stats.accepted


def test_stats_count_chunks():
    model, ids = fresh_model("tied"), torch.tensor(make_prompts("tied", [18]))
    layers = model.config.num_hidden_layers
    _, stats = hf.generate(model, ids, draft=None, max_new_tokens=33, exact=True, return_stats=True)
    layer = ExactMamba2Layer(nheads=5, headdim=8, dstate=12, ngroups=1, conv_width=4, chunk_size=16)
    state, row = 5 * 8 * 12 * 4, 4 * (5 * 8 + 5 + 12)
    # 32 steps behind 18 tokens, 2 of them in an unfinished chunk; the steps at 32 and 48 tokens fold one.
    live = [2 + i if i <= 14 else (i - 14) if i <= 30 else i - 30 for i in range(32)]
    assert (stats.flushes, stats.rounds) == (2, 32)
    assert stats.state_bytes_read == layers * (32 * state + sum(live) * row)
    assert stats.state_bytes_written == layers * (2 * state + 32 * row)
    assert layer.max_tokens == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_model_itself_with_an_exact_cache(dtype):
    """``model(...)`` has the head of ``generate``: drafts are taken back across a chunk boundary, in two rows."""
    model, prompts = hf.attach(fresh_model("biases").to(dtype)), torch.tensor(make_prompts("biases", [30, 30]))
    whole = hf.score(model, prompts, exact=True)
    with torch.no_grad(), hf.ReplayCache(model, 2, max_tokens=6, exact=True) as cache:

        def logits(first, end, *positional):
            return model(prompts[:, first:end], *positional, **({} if positional else {cache.name: cache})).logits

        assert torch.equal(logits(0, 14), whole[:, :14])
        model(prompts[:, 1:7], **{cache.name: cache})
        cache.crop(-6)
        assert torch.equal(logits(14, 19), whole[:, 14:19])
        cache.crop(-2)
        assert torch.equal(logits(17, 18), whole[:, 17:18])
        place = list(inspect.signature(model.forward).parameters).index(cache.name)
        assert torch.equal(logits(18, 22, *[None] * (place - 1), cache), whole[:, 18:22])
        last = model(prompts[:, 22:25], logits_to_keep=1, return_dict=False, **{cache.name: cache})[0]
        assert last.dtype == torch.float32 and torch.equal(last, whole[:, 24:25])
        cache.select([1])
        for token in range(25, 30):
            got = model(prompts[1:, token : token + 1], labels=prompts[1:, :1], **{cache.name: cache})
            assert torch.equal(got.logits, whole[1:, token : token + 1])
    hf.detach(model)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "mish"])
def test_channels_that_no_vector_divides(activation):
    sizes = {"hidden_size": 9, "num_heads": 3, "head_dim": 3, "expand": 1, "n_groups": 1, "state_size": 5}
    model = fresh_model("biases", **sizes, hidden_act=activation)
    recorded, ids = Recorded(), torch.tensor(make_prompts("biases", [5]))
    options = {"max_new_tokens": 30, "exact": True, "logits_processor": LogitsProcessorList([recorded])}
    plain = hf.generate(model, ids, draft=None, **options)
    right = oracle(plain.tolist(), lambda p: p % 4 != 0)
    assert torch.equal(hf.generate(model, ids, draft=right, num_draft_tokens=6, **options), plain)
    whole = hf.score(model, plain, exact=True)[0]
    for place in range(5, 35):
        assert torch.equal(recorded.logits[tuple(plain[0, :place].tolist())], whole[place - 1]), place


def test_a_gated_norm_gives_rows_the_bits_they_have_alone():
    norm = Norm(shared_model("biases").backbone.layers[0].mixer.norm)
    norm._scale = norm._scale[:9]
    x, gate = torch.randn(2, 40, 9, generator=torch.Generator().manual_seed(0)).unbind()
    together = norm(x, gate)
    for row in range(40):
        assert torch.equal(norm(x[row], gate[row].clone()), together[row])


def test_wrong_options_are_named():
    model, ids = shared_model("biases"), torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match=r"num_draft_tokens: expected 0 <= num_draft_tokens <= 15 .*got 16"):
        hf.generate(model, ids, num_draft_tokens=16, max_new_tokens=40, exact=True)
    for call in (hf.generate, hf.score):
        with pytest.raises(TypeError, match="exact: expected a bool, got 'no' of type str"):
            call(model, ids, exact="no")


def test_what_cannot_be_exact_is_refused(monkeypatch):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=31, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, linear_key_head_dim=5, linear_value_head_dim=7, linear_num_key_heads=2,
        linear_num_value_heads=4, num_experts=0, full_attention_interval=2, tie_word_embeddings=True,
    )  # fmt: skip
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match=r"exact: not supported .* 'qwen3_next'; supported: mamba2"):
        hf.generate(Qwen3NextForCausalLM(config).eval(), ids, max_new_tokens=2, exact=True)
    model = shared_model("biases")
    init = RowProduct.__init__

    def inexact(self, *args):
        init(self, *args)
        self.rows_alike = False

    monkeypatch.setattr(RowProduct, "__init__", inexact)
    attached = hf.attach(fresh_model("biases"))
    for call in (
        lambda: hf.generate(model, ids, max_new_tokens=2, exact=True),
        lambda: hf.score(model, ids, exact=True),
        lambda: hf.ReplayCache(attached, 1, exact=True),
    ):
        with pytest.raises(ValueError, match=r"exact: expected matrix products .*set_num_threads"):
            call()
