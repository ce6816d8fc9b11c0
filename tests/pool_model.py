"""A decoder with two recurrent layers of odd sizes: its steps through a pool, and its truth over a list of tokens."""

from dataclasses import fields

import torch
from torch.nn.functional import logsigmoid, silu, softplus

from replayssm.batch_invariant_decode import BatchInvariantDecodeBuffers
from replayssm.cache import GDNLayer, Mamba2Layer, ReplayPool
from replayssm.conv import causal_conv1d_replay
from replayssm.gdn_decode import gated_delta_rule_checkpointing
from replayssm.mamba import checkpointing_ssu

VOCABULARY = 40
NAN = float("nan")
MAMBA2 = ((4, 3, 5, 2, 3), (6, 2, 3, 3, 4))
# A kind of each; of the second layer value heads, value dim, key dim, key heads and the convolution's width.
MIXED = (MAMBA2[0], GDNLayer(6, 3, 5, 2, 4))
# The second has another convolution.
GDN = (GDNLayer(6, 3, 5, 2, 4), GDNLayer(4, 7, 2, 4, 3))


class Decoder:
    """Each layer sees its own random embedding of the tokens; layers are not stacked, which hides nothing."""

    def __init__(self, sizes=MAMBA2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.layers = [each if isinstance(each, GDNLayer) else Mamba2Layer(*each) for each in sizes]
        self.weights = []
        for layer in self.layers:
            heads, channels = next(iter(layer.state_sizes.values())), layer.conv_channels
            self.weights.append(
                {
                    "inputs": torch.randn(VOCABULARY, channels, generator=generator),
                    "dt": torch.randn(VOCABULARY, heads, generator=generator),
                    "taps": torch.randn(channels, layer.conv_width, generator=generator) / 2,
                    "bias": torch.randn(channels, generator=generator) / 2,
                    "A": -0.1 - torch.rand(heads, generator=generator),
                    "D": torch.randn(heads, generator=generator),
                    "dt_bias": torch.randn(heads, generator=generator),
                    "b": torch.randn(VOCABULARY, heads, generator=generator),
                }
            )

    @property
    def decays(self):
        """A of every layer, as ``materialize`` takes it."""
        return [
            None if isinstance(layer, GDNLayer) else weights["A"]
            for layer, weights in zip(self.layers, self.weights, strict=True)
        ]

    def split(self, index, channels):
        """Convolved channels [..., channels] -> x [..., H, P], B and C [..., G, N]; of GDN q, k [..., H, K], v."""
        layer = self.layers[index]
        if isinstance(layer, GDNLayer):
            keys, values = (layer.key_heads, layer.key_dim), (layer.value_heads, layer.value_dim)
            widths = [keys[0] * keys[1]] * 2 + [values[0] * values[1]]
            parts = zip(channels.split(widths, dim=-1), (keys, keys, values), strict=True)
            return tuple(part.unflatten(-1, shape) for part, shape in parts)
        groups = layer.ngroups * layer.dstate
        x, B, C = channels.split([layer.nheads * layer.headdim, groups, groups], dim=-1)
        return (
            x.unflatten(-1, (layer.nheads, layer.headdim)),
            B.unflatten(-1, (layer.ngroups, layer.dstate)),
            C.unflatten(-1, (layer.ngroups, layer.dstate)),
        )

    def verify(self, pool, slots, tokens, *, index, lengths=None):
        """Run one layer over int64 tokens [batch, T], or [1, total] with ``lengths``; pads are slots < 0."""
        if isinstance(self.layers[index], GDNLayer) and lengths is not None:
            # This op takes no packed batches: one request after the other.
            parts = zip(slots.split(1), tokens.split(lengths, 1), strict=True)
            outs = [self.verify(pool, slot, own, index=index) for slot, own in parts if own.shape[1]]
            return torch.cat(outs, 1) if outs else torch.empty(1, 0, *pool.buffers[index].state.shape[1:3])
        weights, buffers = self.weights[index], pool.buffers[index]
        varlen = {}
        if lengths is not None:
            bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
            varlen = {"cu_seqlens": bounds, "max_seqlen": pool.max_tokens}
        inputs, dt, b = weights["inputs"][tokens], weights["dt"][tokens], weights["b"][tokens]
        if lengths is None:
            inputs[slots < 0], dt[slots < 0], b[slots < 0] = NAN, NAN, NAN
        channels = causal_conv1d_replay(
            buffers.conv_rows, pool.cursors.conv_start, inputs.to(buffers.conv_rows.dtype), weights["taps"],
            weights["bias"], activation="silu", state_batch_indices=slots, **varlen,
        )  # fmt: skip
        parts = self.split(index, channels)
        if isinstance(self.layers[index], GDNLayer):
            return self._gdn(pool, slots, buffers, weights, parts, dt, b)
        return self._mamba2(pool, slots, buffers, weights, parts, dt, varlen)

    def _mamba2(self, pool, slots, buffers, weights, parts, dt, varlen):
        x, B, C = parts
        shape = buffers.state.shape[1:]
        return checkpointing_ssu(
            buffers.state, buffers.x_cache, buffers.B_cache, buffers.dt_cache, pool.cursors.ring_start,
            pool.cursors.num_live, x, dt.unsqueeze(-1).expand(*dt.shape, shape[1]),
            weights["A"].view(-1, 1, 1).expand(shape), B, C, None,
            D=weights["D"].unsqueeze(-1).expand(shape[:2]), dt_bias=weights["dt_bias"].unsqueeze(-1).expand(shape[:2]),
            dt_softplus=True, state_batch_indices=slots, state_scale=buffers.state_scale, rand_seed=pool.rand_seed,
            max_window=pool.window, **varlen,
        )  # fmt: skip

    def _gdn(self, pool, slots, buffers, weights, parts, a, b):
        q, k, v = parts
        return gated_delta_rule_checkpointing(
            buffers.state, buffers.v_cache, buffers.k_cache, buffers.g_cache, buffers.beta_cache,
            pool.cursors.ring_start, pool.cursors.num_live, q, k, v, a, b, (-weights["A"]).log(), weights["dt_bias"],
            state_batch_indices=slots, max_window=pool.window,
        )  # fmt: skip


class History:
    """The truth about one request: its tokens, and for every prefix of them each layer's state and output, in FP64."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.tokens = []
        self.states = [[torch.zeros(*each.state_sizes.values(), dtype=torch.float64)] for each in decoder.layers]
        self.outputs = [[] for _ in decoder.layers]

    def copy(self):
        other = History(self.decoder)
        other.tokens = list(self.tokens)
        other.states = [list(states) for states in self.states]
        other.outputs = [list(outputs) for outputs in self.outputs]
        return other

    def truncate(self, count):
        del self.tokens[count:]
        for states, outputs in zip(self.states, self.outputs, strict=True):
            del states[count + 1 :]
            del outputs[count:]

    def conv_window(self, index, count, rows):
        """The convolution's inputs at the ``rows`` tokens up to the ``count``-th, oldest first, else zero."""
        inputs = self.decoder.weights[index]["inputs"].double()
        window = torch.zeros(rows, inputs.shape[1], dtype=torch.float64)
        known = self.tokens[max(count - rows, 0) : count]
        if known:
            window[rows - len(known) :] = inputs[known]
        return window

    def extend(self, tokens):
        for token in tokens:
            self.tokens.append(token)
            for index, (layer, weights) in enumerate(zip(self.decoder.layers, self.decoder.weights, strict=True)):
                window = self.conv_window(index, len(self.tokens), layer.conv_width)
                channels = silu((window.t() * weights["taps"].double()).sum(1) + weights["bias"].double())
                run = self._gdn if isinstance(layer, GDNLayer) else self._mamba2
                state, output = run(layer, weights, self.states[index][-1], self.decoder.split(index, channels), token)
                self.states[index].append(state)
                self.outputs[index].append(output)
        return self

    def _mamba2(self, layer, weights, state, parts, token):
        x, B, C = parts
        per_group = layer.nheads // layer.ngroups
        B, C = B.repeat_interleave(per_group, 0), C.repeat_interleave(per_group, 0)
        dt = softplus(weights["dt"][token].double() + weights["dt_bias"].double())
        state = state * torch.exp(weights["A"].double() * dt)[:, None, None]
        state = state + dt[:, None, None] * x[:, :, None] * B[:, None, :]
        return state, (state * C[:, None, :]).sum(-1) + weights["D"].double()[:, None] * x

    def _gdn(self, layer, weights, state, parts, token):
        q, k, v = parts
        repeats = layer.value_heads // layer.key_heads
        q, k = ((x / (x.square().sum(-1, True) + 1e-6).sqrt()).repeat_interleave(repeats, 0) for x in (q, k))
        dt = softplus(weights["dt"][token].double() + weights["dt_bias"].double())
        beta = logsigmoid(weights["b"][token].double()).exp()
        state = state * torch.exp(weights["A"].double() * dt)[:, None, None]
        change = beta[:, None] * (v - (state * k[:, None, :]).sum(-1))
        state = state + change[:, :, None] * k[:, None, :]
        return state, (state * q[:, None, :]).sum(-1) * layer.key_dim**-0.5

    def prefill(self, pool, slot):
        """Write the newest state and window into a fresh slot."""
        count = len(self.tokens)
        for index, layer in enumerate(self.decoder.layers):
            window = self.conv_window(index, count, layer.conv_width - 1)
            pool.write_state(index, [slot], self.states[index][count][None], window.t()[None])

    def assert_slot(self, pool, slot, count, **tolerance):
        """The slot holds, with no live rows, the state after ``count`` tokens and the window that belongs to it."""
        for index, layer in enumerate(self.decoder.layers):
            buffers = pool.buffers[index]
            torch.testing.assert_close(buffers.state[slot].double(), self.states[index][count], **tolerance)
            history = buffers.conv_rows[slot, : layer.conv_width - 1].double()
            window = self.conv_window(index, count, layer.conv_width - 1)
            assert torch.equal(history, window.to(buffers.conv_rows.dtype).double())


def run(decoder, pool, slot, history, tokens, accepted):
    """One verified and committed step of one request, its outputs compared with the truth."""
    index = torch.tensor([slot])
    truth = history.copy().extend(tokens)
    for layer in range(len(decoder.layers)):
        out = decoder.verify(pool, index, torch.tensor([tokens]), index=layer)
        expected = torch.stack(truth.outputs[layer][-len(tokens) :])
        torch.testing.assert_close(out[0].double(), expected, rtol=2e-4, atol=2e-4)
    pool.commit([slot], [accepted], len(tokens))
    history.extend(tokens[:accepted])


def every_tensor(pool):
    """(name, tensor) of all that has a slot axis, found without the pool's own loop."""
    found = [(f"{i}.{name}", value) for i, each in enumerate(pool.buffers) for name, value in vars(each).items()]
    for name, value in [*found]:
        if isinstance(value, BatchInvariantDecodeBuffers):
            found += [(f"{name}.{inner}", each) for inner, each in vars(value).items()]
    found += list(vars(pool.cursors).items())
    return [(name, value) for name, value in found if isinstance(value, torch.Tensor)]


def as_bytes(tensor):
    """The tensor's bytes, one row per slot."""
    return tensor.contiguous().view(torch.uint8).view(tensor.shape[0], -1)


def snapshot(pool):
    return {name: as_bytes(tensor).clone() for name, tensor in every_tensor(pool)}


def assert_same_bytes(pool, before, slots=slice(None)):
    for name, tensor in every_tensor(pool):
        assert torch.equal(as_bytes(tensor)[slots], before[name][slots]), name


def poison_slot(pool, slot):
    """What a careless tenant leaves behind: NaN in every float, numbers that are no cursors."""
    for _, tensor in every_tensor(pool):
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8)[slot] = 0x7F
        else:
            tensor[slot] = NAN if tensor.is_floating_point() else 113


def poison_dead_rows(pool, slots):
    """NaN in every ring row of the slots that is not live, and in every convolution row that is no history."""
    for slot in slots:
        start, live = int(pool.cursors.ring_start[slot]), int(pool.cursors.num_live[slot])
        dead = [(start + j) % pool.ring_len for j in range(live, pool.ring_len)]
        conv_start = int(pool.cursors.conv_start[slot])
        for layer, buffers in zip(pool.layers, pool.buffers, strict=True):
            for name, tensor in vars(buffers).items():
                if name.endswith("_cache"):
                    tensor[slot][:, dead] = NAN
            unused = [(conv_start + j) % pool.conv_len for j in range(layer.conv_width - 1, pool.conv_len)]
            buffers.conv_rows[slot][unused] = NAN


def cursor_values(pool, slot):
    return {each.name: int(getattr(pool.cursors, each.name)[slot]) for each in fields(pool.cursors)}


def make_pool(decoder, num_slots=5, **options):
    """A pool for the decoder, by default of window 5 for at most 3 tokens a step."""
    return ReplayPool(decoder.layers, num_slots, **({"window": 5, "max_tokens": 3} | options))


def fill_pool(pool, seed=1):
    """Every byte random, but cursors legal."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in every_tensor(pool):
        if tensor.dtype == torch.int32:
            limits = {"ring_start": pool.ring_len, "num_live": 4, "conv_start": pool.conv_len, "last_accepted": 2}
            tensor.random_(0, limits.get(name, 2), generator=generator)
        else:
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
