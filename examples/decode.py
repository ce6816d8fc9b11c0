"""The ops alone: one Mamba-2 layer decodes from a pool, with rejected tokens, and agrees with the plain recurrence."""

import torch

from replayssm.cache import Mamba2Layer, ReplayPool
from replayssm.mamba import checkpointing_ssu

LAYER = Mamba2Layer(nheads=6, headdim=16, dstate=24, ngroups=2, conv_width=4)
STEPS, TOKENS = 12, 4  # steps, and tokens that each step verifies


def step(pool: ReplayPool, slots: torch.Tensor, x, dt, A, B, C) -> torch.Tensor:
    """Score the tokens [batch, T, ...] of the requests in ``slots``; the checkpoint moves only by a flush."""
    layer, cursors = pool.buffers[0], pool.cursors
    return checkpointing_ssu(
        layer.state, layer.x_cache, layer.B_cache, layer.dt_cache, cursors.ring_start, cursors.num_live,
        x, dt[..., None].expand(*dt.shape, LAYER.headdim), A[:, None, None].expand(*layer.state.shape[1:]), B, C,
        state_batch_indices=slots, max_window=pool.window,
    )  # fmt: skip


def recurrence(state, x, dt, A, B, C) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of one request the ordinary way: state = exp(dt A) state + dt x B^T, y = state C."""
    share = LAYER.nheads // LAYER.ngroups
    B, C = B.repeat_interleave(share, 0), C.repeat_interleave(share, 0)
    state = (dt * A).exp()[:, None, None] * state + (dt[:, None] * x)[:, :, None] * B[:, None, :]
    return state, (state * C[:, None, :]).sum(-1)


def main() -> float:
    torch.manual_seed(0)
    pool = ReplayPool([LAYER], num_slots=3, window=16, max_tokens=TOKENS)
    slots = pool.allocate(2)
    A = -torch.rand(LAYER.nheads) - 0.1
    states = torch.zeros(2, LAYER.nheads, LAYER.headdim, LAYER.dstate)
    largest = 0.0
    for _ in range(STEPS):
        x = torch.randn(2, TOKENS, LAYER.nheads, LAYER.headdim)
        dt = torch.rand(2, TOKENS, LAYER.nheads)
        B, C = torch.randn(2, 2, TOKENS, LAYER.ngroups, LAYER.dstate)
        out = step(pool, slots, x, dt, A, B, C)
        accepted = torch.randint(0, TOKENS + 1, (2,))
        pool.commit(slots, accepted, TOKENS)  # the rejected tokens leave no trace
        for request, count in enumerate(accepted.tolist()):
            for t in range(count):
                token = (x[request, t], dt[request, t], A, B[request, t], C[request, t])
                states[request], y = recurrence(states[request], *token)
                largest = max(largest, (y - out[request, t]).abs().max().item())
    print(f"largest difference to the plain recurrence over {STEPS} steps: {largest:.1e}")
    print(f"a slot takes {pool.bytes_per_slot()} bytes, {pool.bytes_by_field()['state'] // 3} of them the state")
    return largest


if __name__ == "__main__":
    main()
