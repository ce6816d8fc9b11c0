"""A small case of the Mamba-2 kernels, for ``compute-sanitizer --tool memcheck`` or ``racecheck``.

``python tests/gpu/sanitize.py bfloat16 int8``: both tiles of the step, flush and no flush, padding, masked shapes,
stochastic rounding, materialize with and without a prefix.
"""

import sys

import torch

from replayssm.mamba import checkpointing_ssu, replayssm_materialize
from replayssm.testing import random_ssu_call


def on_device(value):
    """The tensor on the device, in memory of its own size; broadcast axes stay broadcast."""
    if not isinstance(value, torch.Tensor):
        return value
    core = value
    for axis, stride in enumerate(value.stride()):
        core = core.narrow(axis, 0, 1) if stride == 0 and value.shape[axis] else core
    return core.contiguous().cuda().expand(value.shape)


def main():
    seed = torch.tensor([3], device="cuda")
    for dtype in (getattr(torch, name) for name in sys.argv[1:]):
        for seq_len, nheads, headdim, dstate in ((3, 4, 20, 48), (1, 512, 16, 32)):
            call = random_ssu_call(
                live=(6, 0, -1, 3), seq_len=seq_len, window=6, nheads=nheads, headdim=headdim, dstate=dstate,
                state_dtype=dtype, dtype=torch.bfloat16,
            )  # fmt: skip
            arguments = {name: on_device(value) for name, value in call.arguments().items()}
            checkpointing_ssu(**arguments, rand_seed=seed)
            materialize(arguments, dtype, seed)
            torch.cuda.synchronize()
    sys.stdout.write("done\n")


def materialize(arguments, dtype, seed):
    state, scale = arguments["state"], arguments["state_scale"]
    x, B, dt, A = (arguments[name] for name in ("x_cache", "B_cache", "dt_cache", "A"))
    a = A[:, 0, 0].contiguous()
    tables = [n for t in (state, x, B, dt) for n in (t.data_ptr(), t.stride(0))] + [a.data_ptr()]
    tables += [0, 0] if scale is None else [scale.data_ptr(), scale.stride(0)]
    slots = arguments["state_batch_indices"].tolist()
    free = [slot for slot in range(state.shape[0]) if slot not in slots]
    int32 = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
    targets = [free[0], slots[1], free[1], free[2]]
    replayssm_materialize(
        *(torch.tensor([n], device="cuda") for n in tables), int32([slots]), int32([targets]),
        int32([max(0, int(arguments["ring_start"][slot])) for slot in slots]), int32([2, 0, 1, 3]),
        int32([0, 3, 1, -1]),
        state_dtype=dtype, input_dtype=torch.bfloat16, matrixA_dtype=torch.float32, dim=state.shape[2],
        dstate=state.shape[3], num_heads=state.shape[1], heads_per_group=state.shape[1] // B.shape[1], max_window=6,
        ring_buffer_len=x.shape[2], rand_seed=seed, philox_rounds=10,
    )  # fmt: skip


if __name__ == "__main__":
    main()
