"""``replayssm.warmup`` on a GPU: afterwards nothing is compiled or loaded any more."""

import sys
from pathlib import Path

import pytest
import torch

import replayssm
from replayssm import warming
from replayssm.cache import GDNLayer, Mamba2Layer, ReplayPool

sys.path.insert(0, str(Path(__file__).parent.parent / "hf"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = {
    "mamba": Mamba2Layer(nheads=6, headdim=24, dstate=20, ngroups=2, conv_width=3),
    "gdn": GDNLayer(value_heads=4, value_dim=24, key_dim=20, key_heads=2, conv_width=4),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
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
    for _, tensor in pool._slotted():
        tensor.view(torch.uint8).fill_(0xFF)
    done = replayssm.warmup(pool, tokens=(1, 5), batch=(1, 3, 200))
    assert done.kernels == len(done.names) >= 4 and 0 <= done.compiled <= done.kernels and done.seconds > 0
    assert all((tensor.view(torch.uint8) == 0xFF).all() for _, tensor in pool._slotted())
    again = replayssm.warmup(pool, tokens=(1, 5), batch=(1, 3, 200))
    assert again.kernels == 0
    for _, tensor in pool._slotted():
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


def test_a_model():
    pytest.importorskip("transformers")
    from tiny_mamba2 import fresh_model, make_prompts

    import replayssm.hf as hf

    model = hf.attach(fresh_model("narrow").cuda())
    done = replayssm.warmup(model, tokens=(1, 6), batch=(1, 2))
    assert done.kernels >= 6
    for batch in (1, 2):
        ids = torch.tensor(make_prompts("narrow", (70,) * batch), device="cuda")
        with warming._counted(model.device) as loaded:
            for num_draft_tokens in (0, 5):
                hf.generate(model, ids, num_draft_tokens=num_draft_tokens, max_new_tokens=20)
        assert loaded.kernels == 0, loaded.names
