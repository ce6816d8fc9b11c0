"""attach, detach, and what is refused."""

import copy
import inspect
import threading

import pytest
import torch
from tiny import HYBRIDS, fresh_model, greedy_text, make_prompts, shared_model, step_logits
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    Mamba2Model,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import replayssm.hf as hf
from replayssm.hf.attachment import attachment_of

IDS = torch.tensor([[3, 9, 4, 9, 3, 9], [1, 2, 3, 4, 5, 6]])


def everything(model):
    """All attributes of all modules that attach could touch, tensors by bytes, dtype and strides."""
    tensors = {
        name: (tensor.dtype, tensor.stride(), tensor.detach().clone(), id(tensor))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    return tensors, {name: (id(module), sorted(module.__dict__)) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", ["biases", "tied", *HYBRIDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_detach_leaves_no_trace(name, dtype):
    model = fresh_model(name).to(dtype)
    mixer = next(module for module in model.modules() if hasattr(module, "A_log"))
    mixer.A_log.data = mixer.A_log.data.float()
    tensors, attributes = everything(model)
    with torch.no_grad():
        logits = model(IDS).logits
    assert hf.attach(model) is model and hf.attach(model) is model
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    hf.generate(model, IDS, max_new_tokens=5)
    assert attachment_of(model) is not None  # it was attached before the call
    hf.detach(model)
    after, attributes_after = everything(model)
    assert attributes_after == attributes
    for key, (dtype_before, strides, tensor, identity) in tensors.items():
        assert after[key][:2] == (dtype_before, strides) and after[key][3] == identity, key
        assert torch.equal(after[key][2], tensor), key
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)
    with pytest.raises(ValueError, match=r"expected a model that replayssm.hf.attach has prepared"):
        hf.detach(model)


def test_detach_restores_a_forward_that_was_there_before():
    model = fresh_model()
    mixer, calls = model.backbone.layers[1].mixer, []
    own = type(mixer).forward.__get__(mixer)

    def wrapped(*args, **kwargs):
        calls.append(len(args))
        return own(*args, **kwargs)

    mixer.forward = wrapped
    hf.attach(model)
    with torch.no_grad():
        model(IDS)
    assert calls
    hf.detach(model)
    assert mixer.forward is wrapped and "forward" not in model.backbone.layers[0].mixer.__dict__


def test_a_forward_of_the_whole_model_is_kept_and_not_bypassed():
    model, calls = fresh_model(), []
    own = type(model).forward.__get__(model)

    def wrapped(*args, **kwargs):
        calls.append(len(args))
        return own(*args, **kwargs)

    model.forward = wrapped
    hf.attach(model)
    with torch.no_grad(), hf.ReplayCache(model, 2) as cache:
        model(IDS)
        with pytest.raises(ValueError, match="model: it has a forward of its own, which a ReplayCache would not call"):
            model(IDS, **{cache.name: cache})
    hf.generate(model, IDS, max_new_tokens=2)  # which calls base model and head
    assert calls == [1]
    hf.detach(model)
    assert model.forward is wrapped


def test_an_attached_model_has_its_own_signature():
    model = fresh_model()
    signature = inspect.signature(model.forward)
    assert inspect.signature(hf.attach(model).forward) == signature


def test_generate_detaches_what_it_attached_even_after_an_error():
    model = fresh_model()
    _, attributes = everything(model)
    hf.generate(model, IDS, max_new_tokens=3)
    assert everything(model)[1] == attributes
    with pytest.raises(RuntimeError, match="boom"):
        hf.generate(model, IDS, max_new_tokens=9, draft=lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    assert everything(model)[1] == attributes


def test_threads_share_a_model_that_nobody_attached():
    model, (prompt,) = fresh_model(), make_prompts("biases", (9,))
    expected, (_, attributes), ids = greedy_text("biases", prompt, 6), everything(model), torch.tensor([prompt])
    both_inside, texts = threading.Barrier(2, timeout=30), []

    def work(hold):
        started = []

        def draft(token_ids, num_tokens):
            if not started:
                started.append(both_inside.wait())
            if hold:
                first.join(30)  # the other call ends, and with it the time for which that one needed the model
            return token_ids[:0]

        texts.append(hf.generate(model, ids, draft=draft, max_new_tokens=6)[0, 9:].tolist())

    first, second = (threading.Thread(target=work, args=(hold,)) for hold in (False, True))
    first.start(), second.start(), first.join(30), second.join(30)
    assert texts == [expected, expected]
    assert everything(model)[1] == attributes


def test_detach_waits_for_the_end_of_a_generation():
    model = hf.attach(fresh_model())
    with pytest.raises(ValueError, match="expected no generation running on it, got one; detach when it is done"):
        hf.generate(model, IDS, draft=lambda ids, count: hf.detach(model))
    hf.detach(model)
    # A generation's own attachment is not the caller's to undo, but the caller may keep it.
    with pytest.raises(ValueError, match="got one that is not attached"):
        hf.generate(model, IDS, draft=lambda ids, count: hf.detach(model))
    hf.generate(model, IDS, max_new_tokens=4, draft=lambda ids, count: hf.attach(model) and ids[:0])
    hf.detach(model)
    assert attachment_of(model) is None


def test_attach_that_fails_half_way_leaves_no_trace(monkeypatch):
    model = fresh_model().to(torch.bfloat16)
    tensors, attributes = everything(model)
    converted, own = [], torch.Tensor.float

    def float_until_memory_ends(tensor):
        converted.append(tensor)
        if len(converted) > 5:
            raise MemoryError
        return own(tensor)

    monkeypatch.setattr(torch.Tensor, "float", float_until_memory_ends)
    with pytest.raises(MemoryError):
        hf.attach(model)
    monkeypatch.undo()
    after, attributes_after = everything(model)
    assert attributes_after == attributes and len(converted) == 6
    assert all(after[k][0] == t[0] == torch.bfloat16 and torch.equal(after[k][2], t[2]) for k, t in tensors.items())


class Adapter(nn.Linear):
    """A projection with something of its own added, as adapters are."""

    def forward(self, x):
        return super().forward(x) + 1


def swap(model, name, layer):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def ways_to_attach(model, other="biases"):
    """Calls that take ``model``, by the name of the argument."""
    return (
        ("model", lambda: hf.attach(model)),
        ("model", lambda: hf.generate(model, IDS)),
        ("draft_model", lambda: hf.generate(shared_model(other), IDS, draft_model=model)),
    )


@pytest.mark.parametrize("name", ["lm_head", "backbone.layers.1.mixer.in_proj", "backbone.layers.0.mixer.out_proj"])
def test_layers_that_replay_would_bypass_are_refused(name):
    model = fresh_model("tied", tie_word_embeddings=False)
    layer = model.get_submodule(name)
    swap(model, name, Adapter(layer.in_features, layer.out_features))
    calls = ways_to_attach(model, "tied")
    for argument, call in calls:
        with pytest.raises(ValueError, match=rf"^{argument}: layer '{name}' is a .*Adapter with a forward of its own;"):
            call()
    swap(model, name, layer)
    hook = layer.register_forward_hook(lambda module, args, out: out * 0)
    for argument, call in calls:
        with pytest.raises(ValueError, match=rf"^{argument}: layer '{name}' has forward hooks"):
            call()
    hook.remove()
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=rf"weight '{name}\.weight' is torch\.int8; supported weight types are"):
        hf.attach(model)
    assert attachment_of(model) is None and attachment_of(shared_model("tied")) is None


def test_changes_after_attach_that_cannot_be_followed_are_refused():
    model = hf.attach(fresh_model())
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"in_proj' became torch\.bfloat16 since attach; call detach, convert"):
        hf.generate(model, IDS)
    hf.detach(model)
    hf.attach(model)
    model.lm_head = nn.Linear(24, 61)
    with pytest.raises(ValueError, match="head was replaced since attach; call detach, and attach again"):
        hf.generate(model, IDS)


def test_parametrised_layers_work():
    model, (prompt,) = fresh_model(), make_prompts("biases", (9,))
    nn.utils.parametrizations.weight_norm(model.backbone.layers[0].mixer.in_proj)
    out = hf.generate(model, torch.tensor([prompt]), max_new_tokens=9)
    assert out[0, 9:].tolist() == greedy_text("biases", prompt, 9)


@pytest.mark.parametrize("name", ["biases", *HYBRIDS])
def test_attached_model_without_our_cache_is_the_model(name):
    model, (prompt,) = hf.attach(fresh_model(name)), make_prompts(name, (9,))
    torch.testing.assert_close(
        step_logits(model, prompt), step_logits(shared_model(name), prompt), atol=1e-5, rtol=1e-5
    )
    out = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
    assert out[0, 9:].tolist() == greedy_text(name, prompt, 9)
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["biases", "next"])
def test_a_copy_of_an_attached_model_stands_by_itself(name):
    model, (prompt,) = hf.attach(fresh_model(name)), make_prompts(name, (9,))
    hf.generate(model, torch.tensor([prompt]), max_new_tokens=3)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    out = hf.generate(clone, torch.tensor([prompt]), max_new_tokens=9)
    assert out[0, 9:].tolist() == greedy_text(name, prompt, 9)
    hf.detach(clone)
    assert attachment_of(model) is not None


def test_weights_changed_after_attach_are_used():
    model, (prompt,) = hf.attach(fresh_model(seed=5)), make_prompts("biases", (9,))
    model.load_state_dict(shared_model().state_dict())
    out = hf.generate(model, torch.tensor([prompt]), max_new_tokens=9)
    assert out[0, 9:].tolist() == greedy_text("biases", prompt, 9)


def test_a_saved_bf16_model_generates_as_its_fp32_copy(tmp_path):
    fresh_model().to(torch.bfloat16).save_pretrained(tmp_path)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    widened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert stored.dtype == torch.bfloat16
    ids = IDS[:1]
    expected = widened.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(hf.generate(stored, ids, max_new_tokens=12), expected)
    assert stored.dtype == torch.bfloat16


def tiny_gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=2, n_positions=32))


def tiny_t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=37, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def tiny_mamba1():
    return MambaForCausalLM(MambaConfig(vocab_size=37, hidden_size=16, num_hidden_layers=1, state_size=4))


def tiny_jamba():
    config = JambaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4,
        mamba_dt_rank=2, use_mamba_kernels=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_gpt2, r"GPT2LMHeadModel \(model_type 'gpt2'\) has no recurrent layers that can be replayed"),
        (tiny_t5, r"T5ForConditionalGeneration \(model_type 't5'\) is an encoder-decoder"),
        (tiny_mamba1, r"recurrent layers of MambaForCausalLM \(model_type 'mamba'\) are of an unsupported family"),
        (tiny_jamba, r"model_type 'jamba'\) are of an unsupported family"),
    ],
)
def test_models_that_cannot_replay(make, reason):
    supported = r".*; supported are decoder-only models of the families mamba2"
    for argument, call in ways_to_attach(make()):
        with pytest.raises(ValueError, match=f"^{argument}: .*{reason}{supported}"):
            call()


def test_models_elsewhere_are_refused():
    """Those that were never loaded, and those of which a part was offloaded."""
    model = fresh_model()
    model.backbone.layers[1].to("meta")
    places = "expected all weights on one device, got some on cpu and meta"
    for argument, call in ways_to_attach(model):
        with pytest.raises(ValueError, match=f"^{argument}: {places}"):
            call()
    for argument, call in ways_to_attach(model.to("meta")):
        with pytest.raises(NotImplementedError, match=f"^{argument}: expected device cpu or cuda, got meta"):
            call()


def test_other_refusals():
    with pytest.raises(TypeError, match="expected a transformers PreTrainedModel, got Linear; supported are"):
        hf.attach(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="no language-model head; load it with AutoModelForCausalLM"):
        hf.attach(Mamba2Model(shared_model().config))
    double = fresh_model().double()
    with pytest.raises(ValueError, match=r"weight '.*' is torch\.float64; supported weight types are torch\.float32"):
        hf.attach(double)
    assert attachment_of(double) is None and double.dtype == torch.float64
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_beams'"):
        hf.generate(shared_model(), IDS, num_beams=2)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([3, 4]), r"input_ids: expected shape \[batch, length\], got \[2\]"),
        (torch.tensor([[3.0]]), r"input_ids: expected dtype torch\.int64 or torch\.int32, got torch\.float32"),
        (torch.zeros(0, 3, dtype=torch.int64), "at least one row, got none"),
        (torch.zeros(2, 0, dtype=torch.int64), "at least one token in every row, got an empty row 0"),
        (torch.tensor([[3, 4], [5, 61]]), r"input_ids: expected token ids in 0\.\.60, got 61 in row 1"),
        ([[3, 4]], "input_ids: expected a torch.Tensor, got list"),
    ],
)
def test_wrong_prompts(ids, message):
    with pytest.raises((ValueError, TypeError), match=message):
        hf.generate(shared_model(), ids)


def test_mask_of_another_shape():
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[batch=2, length=6\], got \[2, 5\]"):
        hf.generate(shared_model(), IDS, attention_mask=torch.ones(2, 5))


@pytest.mark.parametrize("fill", [2.0, -1.0, float("nan"), float("-inf")])
def test_a_mask_holds_ones_and_zeros(fill):
    mask = torch.tensor([[fill, 1, 1, 1, 1, 1], [1.0] * 6])
    with pytest.raises(ValueError, match="attention_mask: expected 1 at tokens and 0 at padding, got another value"):
        hf.generate(shared_model(), IDS, attention_mask=mask)


def test_ids_without_data():
    with pytest.raises(ValueError, match="input_ids: expected token ids, got a tensor on device 'meta'"):
        hf.generate(shared_model(), IDS.to("meta"))
