"""Train the shipped model: a Mamba-2 of 3 million parameters in transformers' format.

    python examples/train_tiny_mamba2.py --tokens build/tiny_mamba2.npz --out build/tiny-mamba2 --epochs 40

reads the token streams that `tiny_mamba2_corpus.py` wrote and writes config.json, generation_config.json,
model.safetensors (bfloat16), loss.csv and loss.png. It runs on a GPU when there is one. The weights with the lowest
held-out loss are kept.

The model is transformers' own; only its forward is written anew, because the torch fallback there multiplies and sums
over [chunk, chunk, heads, state] tensors. Here the scan is a handful of matrix products (bfloat16 operands on a GPU)
with the decays in FP32, and the script compares the two before it trains.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, Mamba2Config, Mamba2ForCausalLM

CHUNK = 64  # tokens of a chunk of the training scan


def model_config(vocab_size: int, hidden_size: int, layers: int) -> Mamba2Config:
    return Mamba2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        expand=2,
        head_dim=32,
        num_heads=2 * hidden_size // 32,
        state_size=64,
        n_groups=1,
        conv_kernel=4,
        chunk_size=32,  # transformers' CPU prefill costs memory in proportion to it
        tie_word_embeddings=True,
        initializer_range=0.05,
        rescale_prenorm_residual=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def chunk_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y_i = Σ_{j ≤ i} exp(A Σ_{j < k ≤ i} dt_k) dt_j (C_i · B_j) x_j, by chunks (Dao and Gu 2024, section 6).

    Args:
        x: [batch, length, heads, headdim].
        dt: [batch, length, heads], FP32, after bias and softplus.
        A: [heads], FP32, negative.
        B: [batch, length, dstate]; one group.
        C: [batch, length, dstate].

    Returns:
        [batch, length, heads, headdim]. ``length`` is a multiple of `CHUNK`.
    """
    batch, length, heads, headdim = x.shape
    chunks = length // CHUNK
    x = x.view(batch, chunks, CHUNK, heads, headdim).transpose(2, 3)  # [b, c, h, q, p]
    dt = dt.view(batch, chunks, CHUNK, heads).transpose(2, 3)  # [b, c, h, q]
    B, C = (t.view(batch, chunks, CHUNK, -1) for t in (B, C))  # [b, c, q, n]

    decay = torch.cumsum(dt * A[:, None], dim=-1)  # log of the decay from the chunk's start, FP32
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -math.inf).exp()
    scores = (C @ B.transpose(-1, -2))[:, :, None] * between * dt[..., None, :]  # [b, c, h, i, j]
    inside = scores.to(x.dtype) @ x

    to_end = (decay[..., -1:] - decay).exp() * dt
    added = (x * to_end[..., None].to(x.dtype)).transpose(-1, -2) @ B[:, :, None]  # [b, c, h, p, n]
    states, state = [], torch.zeros_like(added[:, 0], dtype=torch.float32)
    for chunk in range(chunks):
        states.append(state)
        state = state * decay[:, chunk, :, -1, None, None].exp() + added[:, chunk].float()
    before = torch.stack(states, dim=1).to(x.dtype)
    carried = (C[:, :, None] @ before.transpose(-1, -2)) * decay.exp()[..., None]
    return (inside + carried).transpose(2, 3).reshape(batch, length, heads, headdim)


def mixer_forward(mixer: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The mixer of transformers' `Mamba2Mixer` (one group), with `chunk_scan` and the convolution as four products."""
    batch, length, _ = hidden.shape
    inner, state = mixer.intermediate_size, mixer.ssm_state_size
    gate, conv_in, dt = mixer.in_proj(hidden).split([inner, inner + 2 * state, mixer.num_heads], dim=-1)
    width = mixer.conv_kernel_size
    padded = F.pad(conv_in, (0, 0, width - 1, 0))
    taps = [padded[:, k : k + length] * mixer.conv1d.weight[:, 0, k] for k in range(width)]
    conv = F.silu(sum(taps) + mixer.conv1d.bias).to(hidden.dtype)
    x, B, C = conv.split([inner, state, state], dim=-1)
    x = x.reshape(batch, length, mixer.num_heads, mixer.head_dim)
    dt = F.softplus(dt.float() + mixer.dt_bias)
    y = chunk_scan(x, dt, -mixer.A_log.float().exp(), B, C) + mixer.D[:, None] * x
    y = y.reshape(batch, length, inner).float() * F.silu(gate.float())
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon) * mixer.norm.weight
    return mixer.out_proj(y.to(hidden.dtype))


def forward(model: Mamba2ForCausalLM, ids: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """Logits [batch, length, vocab] of ids [batch, length]; dropout on the embedding and on every mixer's output."""
    backbone = model.backbone
    hidden = F.dropout(backbone.embeddings(ids), dropout)
    for layer in backbone.layers:
        hidden = hidden + F.dropout(mixer_forward(layer.mixer, layer.norm(hidden).to(dtype)), dropout)
    return model.lm_head(backbone.norm_f(hidden).to(dtype))


def loss_of(model: Mamba2ForCausalLM, ids: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """Mean cross entropy in nats of the tokens ids[:, 1:], ids [batch, length + 1]."""
    logits = forward(model, ids[:, :-1], dropout, dtype)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def check_forward(device: torch.device) -> None:
    """Compare logits and gradients with transformers' own forward on a small model, in FP32."""
    torch.backends.cudnn.allow_tf32 = False  # transformers' convolution; TF32 alone would be an error of 1e-3
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(model_config(vocab_size=61, hidden_size=64, layers=2)).to(device)
    ids = torch.randint(0, 61, (3, 2 * CHUNK), device=device)
    results = []
    for logits in (model(ids, use_cache=False).logits, forward(model, ids, 0.0, torch.float32)):
        grads = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
        results.append([logits, *grads])
    for theirs, ours in zip(*results, strict=True):
        error = (theirs - ours).norm() / theirs.norm()
        if not error < 1e-4:  # not(<) so that NaN fails too
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
def held_out_loss(model: Mamba2ForCausalLM, stream: np.ndarray, length: int, dtype: torch.dtype) -> float:
    """Mean loss in nats per token over the held-out stream, in rows that start without context."""
    device = model.device
    rows = torch.from_numpy(stream[: (len(stream) - 1) // length * length + 1].astype(np.int64)).to(device)
    rows = rows.unfold(0, length + 1, length)
    losses = [loss_of(model, part, 0.0, dtype) * len(part) for part in rows.split(16)]
    return float(torch.stack(losses).sum() / len(rows))


def optimizer_for(model: Mamba2ForCausalLM, weight_decay: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]  # norms, biases, A, D, dt_bias and the short convolution
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=model.device.type == "cuda")


def rate_at(progress: float, peak: float, warm: float = 0.02) -> float:
    """Linear warm-up over the first ``warm`` of the run, then a cosine to zero."""
    return peak * min(progress / warm, 0.5 * (1 + math.cos(math.pi * progress)))


def train(args: argparse.Namespace) -> tuple[Mamba2ForCausalLM, list[dict[str, float]]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    check_forward(device)
    torch.manual_seed(args.seed)
    streams = np.load(args.tokens)
    vocab = int(max(streams["train"].max(), streams["heldout"].max())) + 1
    model = Mamba2ForCausalLM(model_config(vocab, args.hidden_size, args.layers)).to(device).train()
    optimizer = optimizer_for(model, args.weight_decay)
    step_loss = torch.compile(loss_of) if device.type == "cuda" else loss_of
    source = batches(streams["train"], args.batch, args.length, args.seed, device)
    epoch = len(streams["train"]) // (args.length * args.batch)
    total, best, history = epoch * args.epochs, (math.inf, {}), []
    began, running = time.monotonic(), []
    step, progress = 0, 0.0
    while progress < 1:
        minutes = (time.monotonic() - began) / 60
        step += 1
        progress = max(step / total, minutes / args.minutes)  # the schedule ends on time on a slow machine too
        for group in optimizer.param_groups:
            group["lr"] = rate_at(min(progress, 1.0), args.rate)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = step_loss(model, next(source), args.dropout, dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running.append(loss.detach())
        if step % max(epoch, args.report) == 0 or progress >= 1:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                held_out = held_out_loss(model, streams["heldout"], args.length, dtype)
            row = {
                "step": step,
                "epoch": round(step / epoch, 2),
                "minutes": round(minutes, 2),
                "train_loss": round(float(torch.stack(running).mean()), 4),
                "heldout_loss": round(held_out, 4),
            }
            history.append(row)
            running.clear()
            print(row, flush=True)
            if held_out < best[0]:
                best = (held_out, {name: value.detach().clone() for name, value in model.state_dict().items()})
    model.load_state_dict(best[1])
    return model, history


def save(model: Mamba2ForCausalLM, history: list[dict[str, float]], out: Path) -> None:
    model = model.cpu().to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    model.save_pretrained(out)
    # Two bytes in the file, FP32 in memory: decoding with and without drafts is equal only in FP32 arithmetic.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    with (out / "loss.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, history[0].keys())
        writer.writeheader()
        writer.writerows(history)
    plot(history, out / "loss.png")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="token streams of tiny_mamba2_corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
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
    model, history = train(args)
    save(model, history, args.out)


if __name__ == "__main__":
    main()
