"""One prompt, several continuations: the state after a shared prefix is forked, and taken back by a few tokens."""

import torch
from decode import LAYER, STEPS, TOKENS, step

from replayssm.cache import ReplayPool


def main() -> bool:
    torch.manual_seed(1)
    pool = ReplayPool([LAYER], num_slots=5, max_tokens=TOKENS)
    A = -torch.rand(LAYER.nheads) - 0.1

    def tokens(count: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(1, count, LAYER.nheads, LAYER.headdim)
        B, C = torch.randn(2, 1, count, LAYER.ngroups, LAYER.dstate)
        return x, torch.rand(1, count, LAYER.nheads), A, B, C

    # The shared prefix is decoded once, in slot `parent`.
    parent = pool.allocate()
    for _ in range(STEPS):
        step(pool, parent, *tokens(TOKENS))
        pool.commit(parent, [TOKENS], TOKENS)

    # A fork is a copy of everything; both branches then see the same question and answer alike.
    branch = pool.fork(parent)
    question = tokens(3)
    same = torch.equal(step(pool, parent, *question), step(pool, branch, *question))
    print(f"a fork answers like its parent, to the bit: {same}")

    # The parent keeps all three tokens. A prefix cache wants the state two tokens earlier: one is materialized into
    # another slot, and the parent goes on untouched.
    pool.commit(parent, [3], 3)
    cached = pool.allocate()
    pool.materialize(parent, cached, rewind=[2], A=[A])

    # The branch keeps one of the three and so stands at the same token.
    pool.commit(branch, [1], 3)
    follow_up = tokens(2)
    difference = (step(pool, cached, *follow_up) - step(pool, branch, *follow_up)).abs().max().item()
    print(f"two tokens taken back, then two new ones: largest difference {difference:.1e}")
    print(f"{pool.num_free} of {pool.num_slots} slots are free")
    return same and difference < 1e-4


if __name__ == "__main__":
    main()
