"""What surrounds a generation: autocast and default types, which must not reach it; a streamer, which waits for it."""

from contextlib import contextmanager

import pytest
import torch
from tiny import fresh_model, make_prompts
from transformers import GPT2Config, GPT2LMHeadModel

import replayssm.hf as hf


@contextmanager
def wide_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


MODELS = {
    "biases": lambda: (fresh_model("biases"), make_prompts("biases", (21,))),
    "next": lambda: (fresh_model("next", attn_implementation="eager"), make_prompts("next", (21,))),
}


@pytest.mark.parametrize("around", [wide_default, autocast])
@pytest.mark.parametrize("name", list(MODELS))
def test_everything_stays_in_fp32(name, around, monkeypatch):
    monkeypatch.setattr("replayssm.hf.linear._measurements", {})
    model, prompts = MODELS[name]()
    ids = torch.tensor(prompts)

    def results():
        options = [dict(), dict(do_sample=True, top_k=9, top_p=0.9), dict(draft_model=model)]
        options += [dict(exact=True)] if name == "biases" else []
        yield from (hf.generate(model, ids, max_new_tokens=9, **each) for each in options)
        yield hf.score(model, ids)
        hf.attach(model)
        with torch.no_grad(), hf.ReplayCache(model, 1, max_tokens=4) as cache:
            for part in (ids[:, :-3], ids[:, -3:]):
                yield model(part, **{cache.name: cache}).logits
        hf.detach(model)

    expected = list(results())
    with around():
        for got, right in zip(results(), expected, strict=True):
            assert got.dtype == right.dtype and torch.equal(got, right)


class Heard:
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value)

    def end(self):
        self.heard.append("end")


WRONG = [
    dict(return_stats="no"),
    dict(exact=1),
    dict(window=65),
    dict(num_draft_tokens=64),
    dict(num_draft_tokens=16, model="gdn"),
    dict(max_new_tokens=0),
    dict(seed=-1),
    dict(temperature=0.5),
    dict(request_ids=[1, 2]),
    dict(draft="best"),
    dict(draft_model=3),
    dict(attention_mask=torch.zeros(1, 4)),
    dict(input_ids=torch.tensor([[1, 99, 2, 3]])),
    dict(exact=True, model="gdn"),
    dict(model="gpt"),
    dict(eos_token_id="end"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda each: "-".join(each))
def test_a_streamer_hears_nothing_of_what_is_refused(wrong):
    makers = {
        "gdn": lambda: fresh_model("next"),
        "gpt": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=2)),
    }
    options = {"input_ids": torch.tensor([[1, 5, 2, 3]]), "streamer": Heard(), "max_new_tokens": 2, **wrong}
    options["model"] = makers.get(options.get("model"), fresh_model)()
    with pytest.raises((TypeError, ValueError)):
        hf.generate(**options)
    assert options["streamer"].heard == []


def test_a_streamer_hears_prompt_and_tokens():
    ids, streamer = torch.tensor([[1, 5, 2, 3]]), Heard()
    out = hf.generate(fresh_model(), ids, max_new_tokens=3, streamer=streamer, eos_token_id=())
    prompt, *tokens, end = streamer.heard
    assert torch.equal(prompt, ids) and torch.cat(tokens).tolist() == out[0, 4:].tolist() and end == "end"


@pytest.mark.parametrize("value", ["no", 1, None])
def test_return_stats_is_a_bool(value):
    model, ids = fresh_model(), torch.tensor([[1, 5, 2, 3]])
    with pytest.raises(TypeError, match="return_stats: expected a bool"):
        hf.generate(model, ids, max_new_tokens=2, return_stats=value)
    with pytest.raises(TypeError, match="return_stats: expected a bool"):
        model.generate(
            ids, max_new_tokens=2, pad_token_id=0, custom_generate=hf.custom_generate, return_stats=value or 0
        )
