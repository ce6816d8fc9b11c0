"""What ends a row or changes its scores, and the way through model.generate."""

import pytest
import torch
from tiny import cache_name, fresh_model, greedy_text, make_prompts, oracle, pad, shared_model
from torch import nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

import replayssm.hf as hf

COUNT = 16


def right(name, prompts):
    return oracle([p + greedy_text(name, p, COUNT) for p in prompts], lambda place: True)


def run(prompts, **options):
    ids, mask = pad(prompts)
    options = {"pad_token_id": 0, "max_new_tokens": COUNT, **options}
    out = hf.generate(shared_model(), ids, attention_mask=mask, **options)
    return [row[ids.shape[1] :].tolist() for row in out]


def transformers_text(prompt, **options):
    """New tokens of plain transformers for one row alone."""
    out = shared_model().generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


PROCESSORS = [RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2)]


@pytest.mark.parametrize("draft", ["lookup", None, "right"])
def test_processors_run_token_by_token(draft):
    prompts = make_prompts("biases", (6, 3, 9))
    expected = [transformers_text(p, logits_processor=PROCESSORS) for p in prompts]
    assert expected != [greedy_text("biases", p, COUNT) for p in prompts]
    if draft == "right":
        draft = oracle([p + e for p, e in zip(prompts, expected, strict=True)], lambda place: place % 4 != 0)
    assert run(prompts, draft=draft, logits_processor=PROCESSORS) == expected


class Recorder(LogitsProcessor, StoppingCriteria):
    """Notes what it is shown; stops behind a given token."""

    def __init__(self, stop=None):
        self.seen, self.stop = [], stop

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == 1 and scores.shape == (1, 61)
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([self.seen[-1][-1] == self.stop]) if self.stop is not None else scores


def test_processors_and_criteria_see_every_prefix_once():
    (prompt,) = make_prompts("biases", (6,))
    text = prompt + greedy_text("biases", prompt, COUNT)
    processor, criterion = Recorder(), Recorder(stop=-1)
    run([prompt], draft=right("biases", [prompt]), logits_processor=[processor], stopping_criteria=[criterion])
    assert processor.seen == [text[:n] for n in range(6, 6 + COUNT)]
    assert criterion.seen == [text[:n] for n in range(7, 7 + COUNT)]


@pytest.mark.parametrize("place", [0, 2, 3, 9])
def test_a_stop_inside_a_draft_cuts_the_text_there(place):
    prompts = make_prompts("biases", (6, 11), seed=4)
    texts = [greedy_text("biases", p, COUNT) for p in prompts]
    stop = texts[0][place]
    expected = [t[: t.index(stop) + 1] if stop in t else t for t in texts]
    width = max(map(len, expected))
    padded = [e + [0] * (width - len(e)) for e in expected]
    for draft in (right("biases", prompts), None):
        assert run(prompts, draft=draft, num_draft_tokens=7, stopping_criteria=[Recorder(stop)]) == padded


def test_time_criterion():
    (new,) = run(make_prompts("biases", (6,)), stopping_criteria=[MaxTimeCriteria(0.0)])
    assert len(new) == 1


class Collector(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("through", ["generate", "custom_generate"])
def test_streamer_gets_the_prompt_and_every_token(through):
    (prompt,), streamer = make_prompts("biases", (6,)), Collector()
    draft, ids = right("biases", [prompt]), torch.tensor([prompt])
    if through == "generate":
        hf.generate(shared_model(), ids, draft=draft, max_new_tokens=COUNT, streamer=streamer)
    else:
        shared_model().generate(
            ids, max_new_tokens=COUNT, do_sample=False, streamer=streamer, custom_generate=hf.custom_generate,
            draft=draft,
        )  # fmt: skip
    assert streamer.pieces == [[prompt]] + [[t] for t in greedy_text("biases", prompt, COUNT)]
    assert streamer.ended == 1


def test_streamer_takes_one_row():
    with pytest.raises(ValueError, match="streamer: expected a batch of one row, got 2"):
        run(make_prompts("biases", (6, 6)), streamer=Collector())


def through_generate(prompts, side="left", **options):
    ids, mask = pad(prompts, side)
    return ids.shape[1], shared_model().generate(
        ids, attention_mask=mask, custom_generate=hf.custom_generate, **{"do_sample": False, **options}
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("draft", ["lookup", None])
def test_custom_generate(draft, side):
    prompts = make_prompts("biases", (6, 3, 9))
    width, out = through_generate(prompts, side, max_new_tokens=COUNT, draft=draft, num_draft_tokens=3)
    assert [row[width:].tolist() for row in out] == [greedy_text("biases", p, COUNT) for p in prompts]


def test_custom_generate_with_options_of_transformers():
    (prompt,) = make_prompts("biases", (6,))
    text = greedy_text("biases", prompt, COUNT)
    stop = text.index(text[5]) + 1
    width, out = through_generate([prompt], max_length=6 + COUNT, eos_token_id=text[5], draft=right("biases", [prompt]))
    assert out[0, width:].tolist() == text[:stop]
    options = dict(repetition_penalty=1.7, no_repeat_ngram_size=2, max_new_tokens=COUNT)
    _, out = through_generate([prompt], **options)
    assert out[0, width:].tolist() == transformers_text(prompt, logits_processor=PROCESSORS)
    _, (out, stats) = through_generate([prompt], return_dict_in_generate=True, return_stats=True, max_new_tokens=COUNT)
    assert out.sequences[0, width:].tolist() == text and stats.new_tokens == COUNT
    _, out = through_generate([prompt], max_new_tokens=COUNT, draft_model=fresh_model())
    assert out[0, width:].tolist() == text


def test_min_new_tokens_counts_from_the_padded_prompt():
    prompts = make_prompts("biases", (9, 3))
    texts = [greedy_text("biases", p, COUNT) for p in prompts]
    ends = [texts[0][2], texts[1][2]]
    width, out = through_generate(prompts, max_new_tokens=COUNT, min_new_tokens=7, eos_token_id=ends, draft="lookup")
    for row in out:
        assert not set(row[width : width + 7].tolist()) & set(ends)


def test_custom_generate_samples_as_generate_does():
    prompts = make_prompts("biases", (6, 3))
    ids, mask = pad(prompts)
    expected = hf.generate(
        shared_model(), ids, attention_mask=mask, do_sample=True, temperature=1.2, top_k=9, top_p=0.9, seed=3,
        max_new_tokens=COUNT, draft=None,
    )  # fmt: skip
    _, out = through_generate(
        prompts, do_sample=True, temperature=1.2, top_k=9, top_p=0.9, seed=3, max_new_tokens=COUNT
    )
    assert torch.equal(out, expected)
    _, out = through_generate([prompts[0]], do_sample=True, num_return_sequences=3, seed=3, max_new_tokens=COUNT)
    assert len({tuple(row.tolist()) for row in out}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_beams=2), "num_beams: expected 1, got 2; beam search is not supported, greedy and sampling are"),
        (dict(output_scores=True, return_dict_in_generate=True), "output_scores: not supported with custom_generate"),
        (dict(draft="ngram"), "draft: expected 'lookup', None or a callable"),
        (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions: not supported"),
        (dict(inputs_embeds=torch.zeros(1, 2, 24)), "inputs_embeds"),
        (dict(penalty_alpha=0.6, top_k=4), "contrastive search: not supported by custom_generate; greedy and sampling"),
        (dict(dola_layers="low"), "dola generation: not supported"),
        (dict(force_words_ids=[[3]]), "constrained beam search: not supported"),
    ],
)
def test_custom_generate_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        through_generate(make_prompts("biases", (2,)), max_new_tokens=4, **options)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="num_draft_token"):  # transformers does this one
        through_generate(make_prompts("biases", (2,)), max_new_tokens=4, num_draft_token=3)
    model = fresh_model()
    with pytest.raises(ValueError, match=r"labels: not supported by replayssm.hf.custom_generate; supported are"):
        model.generate(
            torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]]), max_new_tokens=4,
            custom_generate=hf.custom_generate,
        )  # fmt: skip


def test_a_used_cache_is_refused():
    model = shared_model()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[3, 4]]), **{cache_name(model): cache})
    with pytest.raises(ValueError, match="cache: expected none or an empty one"):
        through_generate(make_prompts("biases", (5,)), max_new_tokens=4, **{cache_name(model): cache})


def test_models_without_recurrent_layers_are_refused_by_custom_generate():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    with pytest.raises(ValueError, match="has no recurrent layers that can be replayed; supported are"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, custom_generate=hf.custom_generate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(logits_processor=lambda ids, scores: scores), "logits_processor: expected a list of callables.*function"),
        (dict(stopping_criteria=MaxLengthCriteria(9)), "stopping_criteria: expected a list .*, got MaxLengthCriteria"),
        (dict(streamer=[]), "streamer: expected an object with put and end, got list"),
        (dict(eos_token_id="x"), "eos_token_id: expected an int or several, got 'x' of type str"),
        (dict(pad_token_id="x"), "pad_token_id: expected an int, got 'x' of type str"),
        (dict(do_sample="yes"), "do_sample: expected a bool, got 'yes' of type str"),
        (dict(draft=nn.Linear(2, 3)), "draft: expected 'lookup', None or a callable, got Linear; see draft_model"),
    ],
)
def test_options_of_the_wrong_type(options, message):
    with pytest.raises(TypeError, match=message):
        hf.generate(shared_model(), torch.tensor([[3, 4]]), **options)


def test_one_end_token_in_a_tensor():
    (prompt,) = make_prompts("biases", (6,))
    end = greedy_text("biases", prompt, COUNT)[2]
    for ids in (torch.tensor(end), torch.tensor([end, 60]), [end]):
        assert run([prompt], eos_token_id=ids)[0] == run([prompt], eos_token_id=end)[0]


def test_text_grows_past_what_was_made_room_for_and_the_limit_costs_nothing():
    (prompt,) = make_prompts("biases", (6,))
    # A buffer for as many tokens as are allowed would take 8 TB.
    out = run([prompt], stopping_criteria=[MaxLengthCriteria(6 + 150)], max_new_tokens=10**12)
    assert out[0] == run([prompt], max_new_tokens=150)[0]


def test_streamer_is_found_when_the_callable_is_wrapped():
    (prompt,), streamer = make_prompts("biases", (6,)), Collector()

    def wrapped(model, input_ids, logits_processor, stopping_criteria, generation_config, **options):
        return hf.custom_generate(
            model, input_ids, logits_processor, stopping_criteria, generation_config, draft=None, **options
        )

    shared_model().generate(
        torch.tensor([prompt]), max_new_tokens=5, do_sample=False, streamer=streamer, custom_generate=wrapped
    )
    assert streamer.pieces == [[prompt]] + [[t] for t in greedy_text("biases", prompt, 5)]
    assert streamer.ended == 1
