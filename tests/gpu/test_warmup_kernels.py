"""``replayssm.warmup`` on a GPU: afterwards nothing is compiled or loaded any more."""

import pytest
import torch

import replayssm
from replayssm import warming
from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers
from replayssm.cache import ExactMamba2Layer, GDNLayer, Mamba2Layer, ReplayPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = {
    "mamba": Mamba2Layer(nheads=6, headdim=24, dstate=20, ngroups=2, conv_width=3),
    "gdn": GDNLayer(value_heads=4, value_dim=24, key_dim=20, key_heads=2, conv_width=4),
    "exact": ExactMamba2Layer(nheads=6, headdim=24, dstate=20, ngroups=2, conv_width=3, chunk_size=32),
}


@pytest.mark.parametrize(
    ("kind", "state_dtype"), [("mamba", torch.bfloat16), ("gdn", torch.float32), ("exact", torch.float32)]
)
def test_a_pool(kind, state_dtype):
    pool = ReplayPool(
        [LAYERS[kind]],
        5,
        window=7,
        max_tokens=5,
        state_dtype=state_dtype,
        activation_dtype=torch.bfloat16,
        device="cuda",
    )
    for tensor in pool.per_slot().values():
        tensor.view(torch.uint8).fill_(0xFF)
    done = replayssm.warmup(pool, tokens=(1, 5), batch=(1, 3))
    assert done.kernels == len(done.names) >= 4 and 0 <= done.compiled <= done.kernels and done.seconds > 0
    assert all((tensor.view(torch.uint8) == 0xFF).all() for tensor in pool.per_slot().values())
    again = replayssm.warmup(pool, tokens=(1, 5), batch=(1, 3))
    assert again.kernels == 0
    for tensor in pool.per_slot().values():
        tensor.view(torch.uint8).zero_()
    # Real slots need nothing more, in a graph either.
    slots = pool.allocate(3)
    graph = torch.cuda.CUDAGraph()
    with warming._counted(pool.device) as loaded:
        with torch.cuda.graph(graph):
            warming._step(pool, 0, slots, 5, torch.float32, conv_bias=True, with_z=False)
        graph.replay()
        pool.commit(slots, torch.tensor([5, 2, 1], device="cuda"), 5)
        rates = [torch.full((6,), -1.0, device="cuda")] if kind == "mamba" else None
        pool.materialize(slots[:1], slots[2:], torch.tensor([1], device="cuda"), rates)
    assert loaded.kernels == 0, loaded.names


def test_commits_of_any_number_of_lanes_are_one_kernel():
    """Rows of a batch end one after the other, and a step of the last one must not compile."""
    device = torch.device("cuda")
    buffers = BatchInvariantDecodeBuffers.allocate(20, 16, 6, 24, 2, 20, device, torch.bfloat16, max_tokens=3)
    slots, counts = torch.arange(20, device=device), torch.ones(20, 16, dtype=torch.int64, device=device)
    buffers.commit(slots[:2], counts[:2, 0])
    with warming._counted(device) as loaded:
        for lanes in (1, 3, 16):
            buffers.commit(slots[:lanes], counts[:lanes, 0])
            buffers.commit(slots[1 : lanes + 1], counts.flatten()[1 : lanes + 1])
    assert loaded.kernels == 0, loaded.names


@pytest.mark.parametrize("exact", [False, True])
def test_a_model(exact):
    pytest.importorskip("transformers")
    from transformers import Mamba2Config, Mamba2ForCausalLM

    import replayssm.hf as hf

    # Sizes like those of real models: strides are multiples of 16 whatever the number of tokens.
    config = Mamba2Config(vocab_size=64, hidden_size=32, num_heads=16, head_dim=4, state_size=16, n_groups=1,
                          num_hidden_layers=2, chunk_size=16, eos_token_id=None)  # fmt: skip
    model = hf.attach(Mamba2ForCausalLM(config).eval().cuda())
    done = replayssm.warmup(model, tokens=(3,), batch=(2,), exact=exact)
    assert done.kernels > 0  # the other case may have loaded some of them
    ids = torch.randint(1, 64, (2, 69), device="cuda")
    for do_sample in (False, True):
        with warming._counted(model.device) as loaded:
            hf.generate(model, ids, num_draft_tokens=2, max_new_tokens=20, do_sample=do_sample, exact=exact)
        assert loaded.kernels == 0, loaded.names
