"""ReplayCache of models with Gated DeltaNet and attention layers: roll back, ragged rows, keys, attach, refusals."""

import pytest
import torch
from tiny import HYBRIDS, cache_name, fresh_model, make_prompts, shared_model, step_logits
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

import replayssm.hf as hf
from replayssm.hf.attachment import attachment_of

TEXT, OTHER = (make_prompts("next", (90,), seed=seed)[0] for seed in (5, 6))


@pytest.fixture(scope="module")
def model():
    return hf.attach(fresh_model("next"))


@pytest.fixture(scope="module")
def expected():
    return step_logits(fresh_model("next"), TEXT)


@pytest.fixture(scope="module")
def expected_other():
    return step_logits(fresh_model("next"), OTHER)


def feed(model, cache, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), **{cache.name: cache}).logits[0]


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_rows_of_very_different_lengths(model, expected, expected_other):
    """The longest row decides how many keys are looked at; the shortest sees its own few."""
    with hf.ReplayCache(model, 2, max_tokens=3) as cache, torch.no_grad():
        cache.select([1])
        feed(model, cache, OTHER[:80])
        cache.select([0])
        close(feed(model, cache, TEXT[:2]), expected[:2])
        cache.select([0, 1])
        logits = model(torch.tensor([TEXT[2:5], OTHER[80:83]]), **{cache.name: cache}).logits
        close(logits[0], expected[2:5])
        close(logits[1], expected_other[80:83])


def test_buffers_of_keys_move_between_forwards_only(model):
    """A captured forward was chosen for the layout that stands before it."""
    layouts = set()
    with hf.ReplayCache(model, 1, max_tokens=4) as cache:
        feed(model, cache, TEXT[:50])
        for at in range(50, 86, 3):
            before = cache.layout
            feed(model, cache, TEXT[at : at + 4])
            assert cache.layout == before
            cache.accept([3])
            layouts.add(cache.layout)
    assert layouts == {(64, True), (128, True)}


def test_padding_rows_touch_nothing(model, expected, expected_other):
    """What a captured batch does: the rows behind the selected ones are padding."""
    with hf.ReplayCache(model, 3, max_tokens=3) as cache, torch.no_grad():
        for row, tokens in enumerate((TEXT[:5], OTHER[:9], TEXT[:7])):
            cache.select([row])
            feed(model, cache, tokens)
        cache.select([2, 1], total=3)
        windows = torch.tensor([TEXT[7:10], OTHER[9:12], OTHER[:3]])
        logits = model(windows, **{cache.name: cache}).logits
        close(logits[0], expected[7:10])
        close(logits[1], expected_other[9:12])
        cache.accept([3, 1])
        cache.select([0, 1, 2])
        logits = model(torch.tensor([TEXT[5:8], OTHER[10:13], TEXT[10:13]]), **{cache.name: cache}).logits
        close(logits[0], expected[5:8])
        close(logits[1], expected_other[10:13])
        close(logits[2], expected[10:13])


def test_a_row_computes_what_it_computes_alone(model):
    """Keys gathered or in place, more or less room in sight, other rows before and behind."""
    with hf.ReplayCache(model, 1, max_tokens=4) as cache:
        feed(model, cache, TEXT[:20])
        alone = feed(model, cache, TEXT[20:24])
    with hf.ReplayCache(model, 3, max_tokens=4) as cache, torch.no_grad():
        for row, tokens in enumerate((OTHER[:9], TEXT[:20], OTHER[:70])):
            cache.select([row])
            feed(model, cache, tokens)
        windows, results = torch.tensor([OTHER[9:13], TEXT[20:24], OTHER[70:74]]), []
        for rows in ([0, 1, 2], [1, 2], [2, 1], [0, 1, 2]):
            cache.select(rows)
            results.append(model(windows[rows], **{cache.name: cache}).logits[rows.index(1)])
            cache.accept([0] * len(rows))
        for result in results:
            torch.testing.assert_close(result, alone, atol=2e-5, rtol=2e-5)
        assert torch.equal(results[0], results[3])


def test_a_cache_serves_its_own_attached_model_only(model, expected):
    twin = hf.attach(fresh_model("next", seed=9))
    with hf.ReplayCache(model, 1) as cache:
        feed(model, cache, TEXT[:9])
        with pytest.raises(ValueError, match="made for another model"):
            feed(twin, cache, TEXT[9:11])
        for name in ("attention_mask", "position_ids"):
            with pytest.raises(ValueError, match=f"{name}: a ReplayCache takes rows of equal length .* counts them"):
                model(torch.tensor([TEXT[9:11]]), **{cache.name: cache, name: torch.tensor([[1, 1]])})
        close(feed(model, cache, TEXT[9:12]), expected[9:12])
        hf.detach(twin)
        with hf.ReplayCache(model, 1) as other, pytest.raises(RuntimeError, match="the model is not attached"):
            feed(twin, other, TEXT[:3])


class Adapter(nn.Linear):
    """A projection with something of its own added, as adapters are."""

    def forward(self, x):
        return super().forward(x) + 1


def swapped(name, path, layer):
    model = fresh_model(name)
    parent, _, child = path.rpartition(".")
    old = model.get_submodule(path)
    new = layer(old.in_features, old.out_features, bias=old.bias is not None)
    new.load_state_dict(old.state_dict())
    setattr(model.get_submodule(parent), child, new)
    return model


@pytest.mark.parametrize("path", ["layers.1.self_attn.q_proj", "layers.0.mlp.down_proj"])
def test_adapters_and_hooks_outside_of_recurrent_layers_are_called(path):
    """Their products may round a row by its neighbours, and the statistics say so."""
    model, ids = swapped("next", "model." + path, Adapter), torch.tensor([TEXT[:9]])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    out, stats = hf.generate(model, ids, max_new_tokens=12, return_stats=True)
    assert torch.equal(out, expected) and not stats.rows_alike
    assert not torch.equal(out, hf.generate(shared_model("next"), ids, max_new_tokens=12))
    model, calls = fresh_model("next"), []
    hook = model.get_submodule("model." + path).register_forward_hook(lambda *_: calls.append(1))
    out, stats = hf.generate(model, ids, max_new_tokens=12, return_stats=True)
    assert torch.equal(out, hf.generate(shared_model("next"), ids, max_new_tokens=12)) and not stats.rows_alike
    assert len(calls) == stats.rounds + 1
    hook.remove()


def test_layers_that_replay_would_bypass_are_refused():
    for name, path in (
        ("next", "model.layers.0.linear_attn.in_proj_ba"),
        ("3_5", "model.layers.1.linear_attn.out_proj"),
    ):
        with pytest.raises(ValueError, match=rf"layer '{path}' is a .*Adapter with a forward of its own"):
            hf.attach(swapped(name, path, Adapter))
    model = fresh_model("next")
    model.model.layers[0].linear_attn.conv1d.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layer 'model\.layers\.0\.linear_attn\.conv1d' has forward hooks"):
        hf.attach(model)


def test_forwards_that_replay_would_bypass_are_refused():
    for path in ("model", "model.layers.1", "model.layers.1.self_attn"):
        model = fresh_model("next")
        module = model.get_submodule(path)
        module.forward = type(module).forward.__get__(module)
        with pytest.raises(ValueError, match=f"{type(module).__name__} has a forward of its own, which replay would"):
            hf.generate(model, torch.tensor([TEXT[:3]]))
        assert attachment_of(model) is None


def test_kinds_of_attention_that_are_not_supported():
    model = fresh_model("next")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' is not supported; supported are sdpa and eager"):
        hf.attach(model)
    model.config._attn_implementation = "sdpa"
    model.config.layer_types = ["linear_attention", "sliding_attention"] * 2
    with pytest.raises(ValueError, match="layers of type sliding_attention are not supported; supported are full_att"):
        hf.attach(model)


def test_a_model_that_sees_images_is_told_apart_from_its_text_model():
    text = {**HYBRIDS["3_5"][1], "vocab_size": 64}
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16)
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    with pytest.raises(ValueError, match="its text model, whose family 'qwen3_5_text' is supported; load that alone"):
        hf.attach(Qwen3_5ForConditionalGeneration(config))
    model = AutoModelForCausalLM.from_config(config)
    out = hf.generate(model, torch.tensor([[3, 4, 5]]), max_new_tokens=4, eos_token_id=())
    assert out.shape == (1, 7)


def test_names_of_arguments_and_what_cannot_be_had(model):
    with hf.ReplayCache(model, 1) as cache:
        assert cache.name == cache_name(fresh_model("next")) and cache.rows_alike and cache.is_croppable
        assert not cache.has_previous_state() and cache.get_seq_length() == 0
        with pytest.raises(RuntimeError, match="not attached"):
            cache.update(torch.zeros(1, 1, 1, 12), torch.zeros(1, 1, 1, 12), 1)
