"""Every public function of ``replayssm.hf``, given one wrong argument after the other; see ``test_wrong_calls.py``."""

import pytest
import torch
from spoiling import Call, complaints
from tiny import fresh_model, make_prompts, shared_model
from transformers import LogitsProcessorList, StoppingCriteriaList

import replayssm.hf as hf

PROMPTS = torch.tensor(make_prompts("biases", (5, 5)))


def on_cache(method, **arguments):
    model = hf.attach(fresh_model())
    cache = hf.ReplayCache(model, 2, max_tokens=4)
    with torch.no_grad():
        for first, end in ((0, 2), (2, 5)):
            model(PROMPTS[:, first:end], **{cache.name: cache})
    pool = cache.pool
    memory = [tensor for each in (*pool.buffers, pool.cursors) for tensor in vars(each).values() if tensor is not None]
    return Call(getattr(cache, method), arguments, memory)


def generate():
    arguments = {
        "model": shared_model(), "input_ids": PROMPTS, "attention_mask": torch.ones_like(PROMPTS), "draft": "lookup",
        "num_draft_tokens": 2, "max_new_tokens": 2, "do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9,
        "seed": 3, "request_ids": torch.tensor([4, 5]), "eos_token_id": [60], "pad_token_id": 1,
        "logits_processor": LogitsProcessorList(), "stopping_criteria": StoppingCriteriaList(), "window": 8,
        "exact": True, "return_stats": True,
    }  # fmt: skip
    return Call(hf.generate, arguments, [])


CALLS = {
    "generate": generate,
    "score": lambda: Call(
        hf.score,
        {"model": shared_model(), "input_ids": PROMPTS, "attention_mask": torch.ones_like(PROMPTS), "exact": True},
        [],
    ),
    "attach": lambda: Call(hf.attach, {"model": fresh_model()}, []),
    "detach": lambda: Call(hf.detach, {"model": hf.attach(fresh_model())}, []),
    "ReplayCache": lambda: Call(
        hf.ReplayCache,
        {"model": hf.attach(fresh_model()), "batch_size": 2, "max_tokens": 4, "window": 8, "exact": True},
        [],
    ),
    "select": lambda: on_cache("select", rows=[1, 0], total=2),
    "accept": lambda: on_cache("accept", num_accepted=[3, 1]),
    "crop": lambda: on_cache("crop", tokens_to_remove=-2),
}
ARGUMENTS = [(name, argument) for name, make in CALLS.items() for argument in make().every()]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_to_be_spoiled_is_right(name):
    call = CALLS[name]()
    call.function(**call.every())


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_errors_name_an_argument(name, argument):
    found = complaints(CALLS[name], argument)
    assert not [each for each in found if each[1]]
    assert any(each is None for _, each in found), "every value was taken"
