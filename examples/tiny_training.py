"""What the recipes of the shipped models share: the training loop, the held-out loss and the files that are written.

A recipe builds a model of transformers and gives the training form of its blocks; `train_tiny_mamba2.py` and
`train_tiny_gdn_hybrid.py` are the two. They read the token streams that `tiny_corpus.py` wrote.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

CHUNK = 64  # tokens of a chunk of the training scans

Block = Callable[[torch.nn.Module, Tensor, float, torch.dtype], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What is particular to a model family.

    Attributes:
        build: makes the model with its initial weights from vocabulary size, hidden size and number of layers.
        block: (layer, hidden, dropout, dtype) -> hidden behind this layer, residual included, for sequences whose
            length is a multiple of `CHUNK`; matrix products take operands of ``dtype``.
        final_norm: finds the norm in front of the head.
        layers: default number of layers.
        smallest: least number of layers that has a layer of each kind.
    """

    build: Callable[[int, int, int], PreTrainedModel]
    block: Block
    final_norm: Callable[[PreTrainedModel], torch.nn.Module]
    layers: int
    smallest: int


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The short convolution as a product per tap: x [batch, length, channels], weight [channels, 1, width]."""
    length, width = x.shape[1], weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = sum(padded[:, k : k + length] * weight[:, 0, k] for k in range(width))
    return F.silu(y if bias is None else y + bias)


def forward(recipe: Recipe, model: PreTrainedModel, ids: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """Logits [batch, length, vocab] of ids [batch, length]; dropout on the embedding, the blocks bring their own."""
    hidden = F.dropout(model.get_input_embeddings()(ids), dropout)
    for layer in model.base_model.layers:
        hidden = recipe.block(layer, hidden, dropout, dtype)
    return model.get_output_embeddings()(recipe.final_norm(model)(hidden).to(dtype))


def loss_of(recipe: Recipe, model: PreTrainedModel, ids: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """Mean cross entropy in nats of the tokens ids[:, 1:], ids [batch, length + 1]."""
    logits = forward(recipe, model, ids[:, :-1], dropout, dtype)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def check_forward(recipe: Recipe, device: torch.device) -> None:
    """Compare logits and gradients with transformers' own forward on a small model, in FP32."""
    torch.backends.cudnn.allow_tf32 = False  # transformers' convolution; TF32 alone would be an error of 1e-3
    torch.manual_seed(0)
    model = recipe.build(61, 64, recipe.smallest).to(device)
    ids = torch.randint(0, 61, (3, 2 * CHUNK), device=device)
    results = []
    for logits in (model(ids, use_cache=False).logits, forward(recipe, model, ids, 0.0, torch.float32)):
        grads = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
        results.append([logits, *grads])
    for theirs, ours in zip(*results, strict=True):
        error = (theirs - ours).norm() / theirs.norm()
        # The gates' gradients are small sums of large terms: 1e-3 on a GPU. not(<) so that NaN fails too.
        if not error < 4e-3:
            raise SystemExit(f"the training forward differs from transformers' by {error:.2e} (relative norm)")


def batches(stream: np.ndarray, batch: int, length: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Epoch after epoch: the stream from a random offset, cut into rows of length + 1 tokens, in random order."""
    rng, tokens = np.random.default_rng(seed), torch.from_numpy(stream.astype(np.int64)).to(device)
    while True:
        start = int(rng.integers(0, length))
        starts = torch.from_numpy(rng.permutation(np.arange(start, len(stream) - length - 1, length))).to(device)
        for rows in starts.split(batch)[:-1]:
            yield tokens[rows[:, None] + torch.arange(length + 1, device=device)]


@torch.no_grad()
def held_out_loss(recipe: Recipe, model: PreTrainedModel, stream: np.ndarray, length: int, dtype: torch.dtype) -> float:
    """Mean loss in nats per token over the held-out stream, in rows that start without context."""
    rows = torch.from_numpy(stream[: (len(stream) - 1) // length * length + 1].astype(np.int64)).to(model.device)
    rows = rows.unfold(0, length + 1, length)
    losses = [loss_of(recipe, model, part, 0.0, dtype) * len(part) for part in rows.split(16)]
    return float(torch.stack(losses).sum() / len(rows))


def optimizer_for(model: PreTrainedModel, weight_decay: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]  # norms, biases, A, D, dt_bias and the short convolution
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    rate = torch.zeros((), device=model.device)  # a captured step reads it anew each time
    on_gpu = model.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=on_gpu)


def rate_at(progress: float, peak: float, warm: float = 0.02) -> float:
    """Linear warm-up over the first ``warm`` of the run, then a cosine to zero."""
    return peak * min(progress / warm, 0.5 * (1 + math.cos(math.pi * progress)))


def captured(step: Callable[[Tensor], Tensor], ids: Tensor) -> Callable[[Tensor], Tensor]:
    """The same step as one CUDA graph: it is some thousand small launches, which take longer than the work."""
    ids = ids.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(ids)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(ids)

    def replay(new_ids: Tensor) -> Tensor:
        ids.copy_(new_ids)
        graph.replay()
        return loss

    return replay


def train(recipe: Recipe, args: argparse.Namespace) -> None:
    """Train; whenever the held-out loss is the lowest so far, write the weights."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    check_forward(recipe, device)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    torch.manual_seed(args.seed)
    streams = np.load(args.tokens)
    vocab = int(max(streams["train"].max(), streams["heldout"].max())) + 1
    model = recipe.build(vocab, args.hidden_size, args.layers).to(device).train()
    optimizer = optimizer_for(model, args.weight_decay)
    # Without autocast's cache of converted weights, which a captured step could not refresh.
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        with autocast:
            loss = loss_of(recipe, model, ids, args.dropout, dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    source = batches(streams["train"], args.batch, args.length, args.seed, device)
    fast = captured(step, next(source)) if device.type == "cuda" else step  # learning rate still zero
    epoch = len(streams["train"]) // (args.length * args.batch)
    ready, deadline = time.monotonic(), began + 60 * args.minutes
    history: list[dict[str, float]] = []
    running: list[float] = []
    done, progress = 0, 0.0
    while progress < 1:
        done += 1
        # By time as well, so that the schedule ends in time on a slow machine too.
        progress = max(done / (epoch * args.epochs), (time.monotonic() - ready) / (deadline - ready))
        for group in optimizer.param_groups:
            group["lr"].fill_(rate_at(min(progress, 1.0), args.rate))
        running.append(float(fast(next(source))))  # waits for the step, or the clock would run behind
        if done % max(epoch, args.report) == 0 or progress >= 1:
            with autocast:
                held_out = held_out_loss(recipe, model, streams["heldout"], args.length, dtype)
            row = {
                "step": done,
                "epoch": round(done / epoch, 2),
                "minutes": round((time.monotonic() - began) / 60, 2),
                "train_loss": round(sum(running) / len(running), 4),
                "heldout_loss": round(held_out, 4),
            }
            running.clear()
            print(row, flush=True)
            if all(held_out < earlier["heldout_loss"] for earlier in history):
                save(model, args.out)
            history.append(row)
            write_history(history, args.out / "loss.csv")
    plot(history, args.out / "loss.png")


def save(model: PreTrainedModel, out: Path) -> None:
    model = copy.deepcopy(model).cpu().to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    model.save_pretrained(out)
    # Two bytes in the file, FP32 in memory: decoding with and without drafts is equal only in FP32 arithmetic.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def write_history(history: list[dict[str, float]], file: Path) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, history[0].keys())
        writer.writeheader()
        writer.writerows(history)


def plot(history: list[dict[str, float]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    epochs = [row["epoch"] for row in history]
    axes.plot(epochs, [row["train_loss"] for row in history], label="training documents (with dropout)")
    axes.plot(epochs, [row["heldout_loss"] for row in history], label="held-out documents")
    axes.set(xlabel="epoch", ylabel="cross entropy, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=100)


def main(recipe: Recipe, description: str) -> None:
    """The command line of a recipe."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="token streams of tiny_corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=recipe.layers)
    parser.add_argument("--length", type=int, default=1024, help=f"tokens of a row, a multiple of {CHUNK}")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="time limit; the learning rate reaches zero by then"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--report", type=int, default=1, help="fewest steps between two looks at the held-out loss")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(recipe, args)
