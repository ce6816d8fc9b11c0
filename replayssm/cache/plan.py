"""What a pool costs, without making one: bytes of a slot, bytes moved by a step, and the window that moves fewest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from replayssm.cache.exact import ExactMamba2Layer
from replayssm.cache.layers import Layer, allocate_buffers, ring_lengths
from replayssm.cache.records import tensors_of
from replayssm.checks import check_number, check_range
from replayssm.cursors import Cursors
from replayssm.mamba.arguments import MAX_WINDOW


@dataclass(frozen=True)
class SlotBytes:
    """Bytes of one slot over all layers.

    Attributes:
        state: checkpoints.
        scale: their scales (8-bit state types).
        ring: the replay ring.
        conv: the convolution's ring.
        cursors: cursors, once for all layers.
    """

    state: int
    scale: int
    ring: int
    conv: int
    cursors: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def overhead(self) -> float:
        """The total in units of the bare state (with its scales)."""
        return self.total / (self.state + self.scale)


def slot_bytes(
    layers: Sequence[Layer],
    *,
    window: int = 16,
    max_tokens: int = 8,
    state_dtype: torch.dtype = torch.float32,
    activation_dtype: torch.dtype = torch.float32,
) -> SlotBytes:
    """Bytes of one slot of a :class:`replayssm.cache.ReplayPool` with the same arguments. Allocates nothing.

    Args:
        layers: sizes of every layer.
        window: most rows that may be replayed.
        max_tokens: most tokens of one step.
        state_dtype: type of the checkpoints.
        activation_dtype: type of the rings.

    Raises:
        TypeError, ValueError: as the pool does.

    Example:
        A Mamba-2 layer of Nemotron-H with fp32 states and bf16 activations: 12.5 % above the bare state.

        >>> from replayssm.cache import Mamba2Layer
        >>> layer = Mamba2Layer(nheads=128, headdim=64, dstate=128, ngroups=8, conv_width=4)
        >>> cost = slot_bytes([layer], window=16, max_tokens=4, activation_dtype=torch.bfloat16)
        >>> cost.state, cost.ring, cost.conv, cost.cursors, round(cost.overhead, 3)
        (4194304, 378880, 143360, 16, 1.125)
    """
    ring_len, conv_len = ring_lengths(layers, window, max_tokens)
    meta = torch.device("meta")
    parts = dict.fromkeys((each.name for each in fields(SlotBytes)), 0)
    for layer in layers:
        buffers = allocate_buffers(
            layer,
            1,
            ring_len=ring_len,
            conv_len=conv_len,
            state_dtype=state_dtype,
            activation_dtype=activation_dtype,
            device=meta,
        )
        for held in tensors_of(buffers):
            parts[held.part] += held.tensor.nbytes
    cursors = Cursors.allocate(1, meta)
    parts["cursors"] = sum(getattr(cursors, each.name).nbytes for each in fields(cursors))
    return SlotBytes(**parts)


@dataclass(frozen=True)
class StateTraffic:
    """Bytes of recurrent state and ring that one request moves, on average, over all layers.

    Attributes:
        ordinary: ordinary decoding, per step, which is one token: the state is read and written.
        snapshots: speculation that keeps a state per token, per step: one read, ``num_tokens`` writes.
        replay: speculation by replay, per step: the state is read once and written only by a flush; ring rows of the
            live tokens are read, those of the new tokens written.
        flush_rate: share of the steps that write the state.
        mean_accepted: tokens that a step yields.
    """

    ordinary: float
    snapshots: float
    replay: float
    flush_rate: float
    mean_accepted: float

    def per_token(self) -> dict[str, float]:
        """The three of them per token, by name."""
        return {
            "ordinary": self.ordinary,
            "snapshots": self.snapshots / self.mean_accepted,
            "replay": self.replay / self.mean_accepted,
        }


def state_traffic(
    layers: Sequence[Layer],
    *,
    num_tokens: int,
    mean_accepted: float,
    window: int = 16,
    state_dtype: torch.dtype = torch.float32,
    activation_dtype: torch.dtype = torch.float32,
) -> StateTraffic:
    """Bytes of state and ring that a step has to move: ordinary decoding, snapshots, replay.

    With S the bytes of a state, r those of a ring row, T tokens a step of which ``a`` are kept on average and a window
    W: the live rows grow from about (a+1)/2 to W-T+1 between two flushes, so that a share ``f = a / (W - T + (a+1)/2)``
    of the steps flushes, all of them at most, and a step moves ``S (1 + f) + r (T + (W-T)/2)``. Ordinary decoding moves
    2 S a token, snapshots S (1 + T) a step.

    Args:
        layers: sizes of every layer.
        num_tokens: T, tokens that a step verifies: the drafts and the token before them. 1 is decoding without drafts.
        mean_accepted: a, in 1..T: the accepted drafts and one.
        window: W, most rows that may be replayed, at least T.
        state_dtype: type of the checkpoints.
        activation_dtype: type of the rings.

    Raises:
        TypeError: a number of another type.
        ValueError: ``num_tokens`` not in 1..window, ``mean_accepted`` not in 1..num_tokens, or an exact layer.

    Example:
        >>> from replayssm.cache import Mamba2Layer
        >>> layer = Mamba2Layer(nheads=128, headdim=64, dstate=128, ngroups=8, conv_width=4)
        >>> moved = state_traffic([layer], num_tokens=4, mean_accepted=3.0, activation_dtype=torch.bfloat16)
        >>> {name: round(count / 2**20, 2) for name, count in moved.per_token().items()}
        {'ordinary': 8.0, 'snapshots': 6.67, 'replay': 1.68}
    """
    check_range("window", window, 1, MAX_WINDOW)
    check_range("num_tokens", num_tokens, 1, window, f"window={window}")
    check_number("mean_accepted", mean_accepted)
    if not 1 <= mean_accepted <= num_tokens:
        raise ValueError(f"mean_accepted: expected 1 <= mean_accepted <= num_tokens={num_tokens}, got {mean_accepted}")
    state, row = _state_and_row(layers, state_dtype, activation_dtype)
    if any(isinstance(layer, ExactMamba2Layer) for layer in layers):
        raise ValueError(
            "layers: expected layers that replay a window, got ExactMamba2Layer, which replays whole chunks"
        )
    flush_rate = min(1.0, mean_accepted / (window - num_tokens + (mean_accepted + 1) / 2))
    return StateTraffic(
        ordinary=2.0 * state,
        snapshots=float(state * (1 + num_tokens)),
        replay=state * (1 + flush_rate) + row * (num_tokens + (window - num_tokens) / 2),
        flush_rate=flush_rate,
        mean_accepted=mean_accepted,
    )


def choose_window(
    layers: Sequence[Layer],
    *,
    num_tokens: int,
    mean_accepted: float,
    state_dtype: torch.dtype = torch.float32,
    activation_dtype: torch.dtype = torch.float32,
) -> int:
    """The window that moves the fewest bytes a step; see :func:`state_traffic` for the formula and the arguments.

    Its minimum lies near ``T - (a+1)/2 + sqrt(2 S a / r)``; without drafts that is ``sqrt(2 S / r)``. It is flat:
    half the window costs a few per cent. A larger window also costs arithmetic, which bytes do not show.

    Returns:
        A window in ``num_tokens..64``.

    Example:
        >>> from replayssm.cache import Mamba2Layer
        >>> layer = Mamba2Layer(nheads=128, headdim=64, dstate=128, ngroups=8, conv_width=4)
        >>> choose_window([layer], num_tokens=1, mean_accepted=1.0, activation_dtype=torch.bfloat16)
        21
    """
    check_range("num_tokens", num_tokens, 1, MAX_WINDOW)

    def moved(window: int) -> float:
        return state_traffic(
            layers,
            num_tokens=num_tokens,
            mean_accepted=mean_accepted,
            window=window,
            state_dtype=state_dtype,
            activation_dtype=activation_dtype,
        ).replay

    return min(range(num_tokens, MAX_WINDOW + 1), key=moved)


def snapshot_bytes(layers: Sequence[Layer], *, num_tokens: int, state_dtype: torch.dtype = torch.float32) -> int:
    """Bytes per slot that speculation by snapshots keeps beside the checkpoint: a state for each of the tokens.

    Args:
        layers: sizes of every layer.
        num_tokens: tokens that a step verifies, at least 1.
        state_dtype: type of the states.

    Example:
        >>> from replayssm.cache import Mamba2Layer
        >>> layer = Mamba2Layer(nheads=128, headdim=64, dstate=128, ngroups=8, conv_width=4)
        >>> snapshot_bytes([layer], num_tokens=4)
        16777216
    """
    check_range("num_tokens", num_tokens, 1, MAX_WINDOW)
    return num_tokens * _state_and_row(layers, state_dtype, torch.float32)[0]


def _state_and_row(layers: Sequence[Layer], state_dtype: torch.dtype, activation_dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the states with their scales, and of one ring row, over all layers."""
    dtypes = {"state_dtype": state_dtype, "activation_dtype": activation_dtype}
    two, three = (slot_bytes(layers, window=window, max_tokens=1, **dtypes) for window in (1, 2))
    return two.state + two.scale, three.ring - two.ring
