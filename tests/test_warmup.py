"""``replayssm.warmup``: what it checks everywhere, and that its calls of padding leave a pool as it is."""

import pytest
import torch

import replayssm
from replayssm import warming
from replayssm.cache import ExactMamba2Layer, GDNLayer, Mamba2Layer, ReplayPool
from replayssm.testing import using

MAMBA = Mamba2Layer(nheads=6, headdim=8, dstate=12, ngroups=2, conv_width=3)
GDN = GDNLayer(value_heads=4, value_dim=6, key_dim=10, key_heads=2, conv_width=4)

EXACT = ExactMamba2Layer(nheads=6, headdim=8, dstate=12, ngroups=2, conv_width=3, chunk_size=16)


def make_pool(state_dtype=torch.float32, **options):
    return ReplayPool([MAMBA, MAMBA], 3, window=6, max_tokens=4, state_dtype=state_dtype, **options)


def test_nothing_to_do_on_a_cpu():
    done = replayssm.warmup(make_pool(), tokens=(1, 4), batch=(1, 64))
    assert done == warming.Warmup(kernels=0, compiled=0, seconds=0.0, names=[])
    assert replayssm.warmup(make_pool()) == done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tokens=(5,)), r"tokens: expected 1 <= tokens <= 4 \(the pool's max_tokens\), got 5"),
        (dict(tokens=(0,)), "tokens: expected 1 <= tokens"),
        (dict(batch=(0,)), "batch: expected 1 <= batch"),
        (dict(parameter_dtype=torch.float64), "parameter_dtype: expected torch.float32 or .* got torch.float64"),
        (dict(index_dtype=torch.int16), "index_dtype: expected torch.int32 or torch.int64, got torch.int16"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replayssm.warmup(make_pool(), **options)


def test_refused_types():
    with pytest.raises(TypeError, match=r"tokens: expected an int, got 2\.5"):
        replayssm.warmup(make_pool(), tokens=(2.5,))
    with pytest.raises(TypeError, match="target: expected a transformers PreTrainedModel, got Linear"):
        replayssm.warmup(torch.nn.Linear(2, 3))
    with pytest.raises(AttributeError, match="no attribute 'warm_up'"):
        replayssm.warm_up  # noqa: B018


@pytest.mark.parametrize("module", ["cpu", "kernels"])
@pytest.mark.parametrize("layers", [[MAMBA], [GDN], [EXACT], [EXACT, MAMBA, GDN]])
@pytest.mark.parametrize("batch", [1, 5])
def test_padding_leaves_the_pool_as_it_is(module, layers, batch):
    if module == "kernels":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("with a GPU the kernels are compiled: tests/gpu")
    pool = ReplayPool(layers, 3, window=6, max_tokens=4)
    for number, tensor in enumerate(pool.per_slot().values()):
        tensor.fill_(float("nan") if tensor.is_floating_point() else number)
    before = [tensor.clone() for tensor in pool.per_slot().values()]
    with using(module):
        for tokens in (1, 4):
            slots = torch.full((batch,), -1)
            warming._step(pool, 0, slots, tokens, torch.float32, conv_bias=True, with_z=True)
        warming._materialize(pool, slots, torch.float32)
        warming._commit(pool)
    for old, new in zip(before, pool.per_slot().values(), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_a_model_is_checked_and_left_as_it_is():
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel, Mamba2Config, Mamba2ForCausalLM

    from replayssm.hf.attachment import attachment_of
    from replayssm.hf.rehearsal import rehearse

    config = Mamba2Config(
        vocab_size=61, hidden_size=24, num_heads=6, head_dim=8, state_size=10, n_groups=2, num_hidden_layers=2,
        chunk_size=16,
    )  # fmt: skip
    model = Mamba2ForCausalLM(config).eval()
    assert replayssm.warmup(model, batch=(1, 3)).kernels == 0 and attachment_of(model) is None
    for options in (dict(tokens=(65,)), dict(window=65), dict(batch=(0,)), dict(longest_prompt=0)):
        (name,) = options
        with pytest.raises(ValueError, match=f"^{name}: expected (1 <= {name}|{name} >= 1)"):
            replayssm.warmup(model, **options)
    with pytest.raises(ValueError, match=r"^target: GPT2LMHeadModel .* has no recurrent layers"):
        replayssm.warmup(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)))
    with pytest.raises(NotImplementedError, match=r"^target: expected device cpu or cuda, got meta"):
        replayssm.warmup(Mamba2ForCausalLM(config).to("meta"))
    # What would run on a GPU.
    from replayssm.hf import attach

    with torch.inference_mode():
        for exact in (False, True):
            rehearse(attach(model), 2, 5, 3, 17, exact)
