"""A pool of slots: everything that belongs to a request of a decoder with recurrent layers, and its lifecycle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from replayssm import cursors as cursor_rule
from replayssm.cache.exact import ExactMamba2Buffers
from replayssm.cache.gdn import GDNLayer
from replayssm.cache.layers import Layer, allocate_buffers, ring_lengths
from replayssm.cache.mamba2 import Mamba2Buffers
from replayssm.cache.materialize import Materializer
from replayssm.cache.records import MAX_SIZE, as_plain, tensors_of
from replayssm.cache.slots import CapacityError, Slots, SlotTable, check_integers, check_same_length
from replayssm.checks import (
    INDICES,
    as_device,
    check_device,
    check_dtype,
    check_flag,
    check_range,
    check_sequence,
    check_shape,
    checked_mode,
)
from replayssm.cursors import Cursors
from replayssm.rounding import encode

__all__ = ["CapacityError", "ReplayPool"]


class ReplayPool:
    """Checkpoints, rings and cursors of ``num_slots`` requests for all recurrent layers of a model.

    The life of a slot: ``allocate``, ``write_state`` for every layer (prefill), then step by step: the ops verify T
    tokens, ``commit`` keeps some of them; ``free`` at the end. Between a commit and the next verify ``fork`` and
    ``copy`` duplicate slots, ``materialize`` takes tokens back, and ``replayssm.cache.snapshot`` takes slots out of the
    pool. All layers share the cursors. ``docs/cache.md`` tells the rules.

    Slot arguments are int32 or int64 tensors ``[n]`` or lists of ints, of slots in use. Their values are checked on
    the CPU, on other devices with ``REPLAYSSM_CHECK=1`` (and always when they are lists). What is neither raises
    TypeError. A call that raises has changed nothing.

    Args:
        layers: sizes of every recurrent layer, in the model's order; kinds may be mixed.
        num_slots: slots, at least 1.
        window: most ring rows that may be replayed before they are folded into the checkpoint, at most 64. It stays
            fixed while the number of tokens a step changes; pass it to the op as ``max_window``.
        max_tokens: most tokens of one step, in ``1..window``, with GDN layers at most 16.
        state_dtype: type of the checkpoints: float32, bfloat16 or float16; for Mamba-2 layers also int8 or
            float8_e4m3fn (with scales).
        activation_dtype: type of the rings: float32, bfloat16 or float16.
        stochastic_rounding: keep a seed, ``rand_seed``, that every commit advances; pass it to the op. Not for
            float32 checkpoints, which are not rounded, and not for GDN layers, which round to the nearest.
        seed: first value of it.
        device: where the tensors live.

    Attributes:
        layers: as given.
        buffers: one :class:`Mamba2Buffers`, :class:`GDNBuffers` or :class:`ExactMamba2Buffers` per layer.
        cursors: the :class:`replayssm.cursors.Cursors` of all slots.
        num_slots, window, max_tokens: as given.
        ring_len: rows of the replay ring, ``window + max_tokens``.
        conv_len: rows of the convolution's ring, largest width - 1 + ``max_tokens``.
        rand_seed: int64 ``[1]`` or None.
        table: which slots are in use, and the checks of slot arguments.
        materializer: calls the materialize ops of the layers.

    Raises:
        TypeError: a number of another type.
        ValueError: an argument out of range.

    Example:
        >>> import torch
        >>> from replayssm.cache import Mamba2Layer
        >>> pool = ReplayPool([Mamba2Layer(nheads=4, headdim=8, dstate=16, ngroups=2, conv_width=4)], num_slots=3)
        >>> slots = pool.allocate(2)
        >>> pool.commit(slots, torch.tensor([3, 0]), seq_len=4)
        >>> pool.cursors.num_live.tolist(), pool.num_free, pool.bytes_per_slot()
        ([3, 0, 0], 1, 12816)
        >>> pool.free(slots)
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_slots: int,
        *,
        window: int = 16,
        max_tokens: int = 8,
        state_dtype: torch.dtype = torch.float32,
        activation_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        check_range("num_slots", num_slots, 1, MAX_SIZE)
        check_range("seed", seed, -(1 << 63), (1 << 63) - 1)
        check_flag("stochastic_rounding", stochastic_rounding)
        check_sequence("layers", layers, "layers")
        if stochastic_rounding and state_dtype == torch.float32:
            raise ValueError("stochastic_rounding: expected a state_dtype that is rounded, got torch.float32")
        self.layers = list(layers)
        if stochastic_rounding and any(isinstance(layer, GDNLayer) for layer in self.layers):
            raise ValueError(
                "stochastic_rounding: expected False with GDN layers, which round to the nearest, got True"
            )
        self.ring_len, self.conv_len = ring_lengths(self.layers, window, max_tokens)
        self.num_slots, self.window, self.max_tokens = num_slots, window, max_tokens
        self.device = as_device("device", device)
        with torch.inference_mode(False):  # a pool made in inference mode can be written outside of it
            self.buffers = [
                allocate_buffers(
                    layer,
                    num_slots,
                    ring_len=self.ring_len,
                    conv_len=self.conv_len,
                    state_dtype=state_dtype,
                    activation_dtype=activation_dtype,
                    device=self.device,
                )
                for layer in self.layers
            ]
            self.cursors = Cursors.allocate(num_slots, self.device)
            self.rand_seed = torch.tensor([seed], device=self.device) if stochastic_rounding else None
        self.table = SlotTable(num_slots, self.device)
        self.materializer = Materializer(self.layers, self.buffers, self.window, self.ring_len)

    # ---- slots

    @property
    def num_free(self) -> int:
        """Slots that are not in use."""
        return self.table.num_free

    def can_allocate(self, n: int) -> bool:
        """Whether ``allocate(n)`` and a fork of n slots would succeed."""
        check_range("n", n, 0, MAX_SIZE)
        return n <= self.num_free

    def allocate(self, n: int = 1) -> Tensor:
        """Take ``n`` slots (at least 0) and zero every field of them.

        Returns:
            int64 ``[n]``.

        Raises:
            CapacityError: fewer than ``n`` slots are free.
        """
        slots = self._take(n)
        self._zero(slots)
        return slots

    def free(self, slots: Slots) -> None:
        """Give slots back. Their contents stay until the slot is allocated again, and are never read.

        Raises:
            ValueError: a slot is not in use or is named twice.
        """
        self.table.give_back(slots)

    def reset(self, slots: Slots) -> None:
        """Zero every field of the slots: states, scales, rings, convolution rows and cursors."""
        self._zero(self.table.resolve("slots", slots))

    def fork(self, src_slots: Slots) -> Tensor:
        """Take new slots that hold copies of everything the given ones hold; one slot may be named several times.

        Returns:
            int64 ``[n]``, in the order of ``src_slots``.

        Raises:
            CapacityError: too few slots are free.
        """
        src = self.table.resolve("src_slots", src_slots, distinct=False)
        dst = self._take(src.numel())
        self._copy(src, dst)
        return dst

    def copy(self, src_slots: Slots, dst_slots: Slots) -> None:
        """Copy everything of ``src_slots[i]`` to ``dst_slots[i]``, as if all were read before one is written.

        Args:
            src_slots: ``[n]``; one slot may be named several times.
            dst_slots: ``[n]``, distinct.
        """
        src = self.table.resolve("src_slots", src_slots, distinct=False)
        dst = self.table.resolve("dst_slots", dst_slots)
        check_same_length(src, dst)
        self._copy(src, dst)

    # ---- one request's life

    def write_state(
        self,
        layer_index: int,
        slots: Slots,
        state: Tensor,
        conv_window: Tensor,
        rows: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Store what a prefill has computed, in slots that are freshly allocated or reset.

        Args:
            layer_index: which layer.
            slots: ``[n]``, distinct.
            state: final states ``[n, nheads, headdim, dstate]``, for GDN ``[n, value_heads, value_dim, key_dim]``, any
                floating type; rounded to the nearest.
            conv_window: inputs of the convolution at the last tokens, oldest first, zero before the first token:
                ``[n, conv_channels, conv_width - 1]``, any floating type.
            rows: for exact layers, whose ``state`` is that of the last chunk boundary: x ``[n, r, nheads, headdim]``,
                dt ``[n, r, nheads]`` before bias and softplus, and B ``[n, r, ngroups, dstate]`` of the r tokens since
                then. None for other layers.

        Raises:
            ValueError: wrong index, shape, dtype or device, or a cursor of a slot is not zero (read as slots are).
        """
        check_range("layer_index", layer_index, 0, len(self.layers) - 1)
        slots = self.table.resolve("slots", slots)
        layer, buffers = self.layers[layer_index], self.buffers[layer_index]
        if (rows is not None) != isinstance(buffers, ExactMamba2Buffers):
            raise ValueError(
                f"rows: expected them for exact layers and no others, layer {layer_index} is {type(layer).__name__}"
            )
        history = layer.conv_width - 1
        sizes = {"n": slots.numel(), **layer.state_sizes}
        check_shape("state", state, " ".join(sizes), sizes)
        sizes |= {"conv_channels": layer.conv_channels, "conv_width-1": history}
        check_shape("conv_window", conv_window, "n conv_channels conv_width-1", sizes)
        for name, tensor in (("state", state), ("conv_window", conv_window)):
            check_dtype(name, tensor, torch.float32, torch.float64, torch.bfloat16, torch.float16)
            check_device(name, tensor, buffers.state.device)
        if isinstance(buffers, ExactMamba2Buffers):
            buffers.check_rows(rows, slots.numel())
        if self._reads_values() and any(bool(cursor[slots].any()) for _, cursor in self._cursor_fields()):
            raise ValueError("slots: expected slots without live rows (reset them first), got some in use by tokens")
        # Detached: a prefill that records gradients must not hang its graph on the pool.
        codes, scale = encode(state.detach().float(), buffers.state.dtype)
        as_plain(buffers.state)[slots] = as_plain(codes)
        if scale is not None and isinstance(buffers, Mamba2Buffers) and buffers.state_scale is not None:
            buffers.state_scale[slots] = scale
        buffers.conv_rows[slots, :history] = conv_window.detach().transpose(1, 2).to(buffers.conv_rows.dtype)
        if isinstance(buffers, ExactMamba2Buffers) and rows is not None:
            buffers.write_rows(slots, *rows)

    def commit(self, slots: Slots, num_accepted: Tensor | Sequence[int], seq_len: Tensor | Sequence[int] | int) -> None:
        """Keep the first ``num_accepted`` of the tokens that the step just verified; once a step, for all layers.

        Args:
            slots: ``[n]``, distinct; a negative slot is padding.
            num_accepted: ``[n]``, in ``0..seq_len``.
            seq_len: tokens that the verify saw, one number or ``[n]``, in ``0..max_tokens``; 0 changes nothing.

        Raises:
            ValueError: wrong shape or dtype, or a value out of range (read as slots are).
        """
        slots = self.table.resolve("slots", slots, padding=True)
        num_accepted = self._integers("num_accepted", num_accepted)
        seq_len = seq_len if isinstance(seq_len, int) else self._integers("seq_len", seq_len)
        cursor_rule.commit(
            self.cursors,
            slots,
            seq_len,
            num_accepted,
            window=self.window,
            ring_len=self.ring_len,
            conv_len=self.conv_len,
        )
        for buffers in self.buffers:
            if isinstance(buffers, ExactMamba2Buffers):
                buffers.records.commit(slots, num_accepted)
        if self.rand_seed is not None:
            self.rand_seed += 1

    def materialize(
        self,
        src_slots: Slots,
        dst_slots: Slots,
        rewind: Tensor | Sequence[int],
        A: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Write the state ``rewind`` tokens before the newest committed one into other slots, as a checkpoint.

        Call it between a commit and the next verify. ``dst_slots`` get the state (rounded to the nearest), the
        convolution's history and cursors at zero, hence no live rows; a request can go on from there. A source is
        unchanged, unless it is its own destination, which takes tokens back in place.

        Args:
            src_slots: ``[n]``; one slot may be named several times.
            dst_slots: ``[n]``, distinct; ``dst_slots[i]`` may be ``src_slots[i]`` but no other source.
            rewind: ``[n]``, in ``0..`` the slot's last ``num_accepted``: a convolution window from before that
                commit is gone.
            A: per Mamba-2 layer the heads' decay rates ``[nheads]`` as the op takes them (its broadcast view ``[nheads,
                headdim, dstate]`` will do), negative, one dtype; per GDN or exact layer None. None if no layer needs
                them.

        Raises:
            ValueError: wrong shape or dtype, or a value out of range (read as slots are).
        """
        src = self.table.resolve("src_slots", src_slots, distinct=False)
        dst = self.table.resolve("dst_slots", dst_slots)
        check_same_length(src, dst)
        rewind = self._integers("rewind", rewind)
        check_shape("rewind", rewind, "n", {"n": src.numel()})
        check_dtype("rewind", rewind, *INDICES)
        check_device("rewind", rewind, self.cursors.num_live.device)
        if self._reads_values():
            self._check_rewind(src.tolist(), dst.tolist(), rewind.tolist())
        decays = self.materializer.decays(A)
        # Read every cursor before one is written: a destination may be its own source.
        conv_first = self.cursors.conv_start[src] - rewind
        ring_start, prefix_len = self.cursors.ring_start[src], self.cursors.num_live[src] - rewind
        self.materializer.write_states(src, dst, ring_start, prefix_len, decays, rewind)
        for layer, buffers in zip(self.layers, self.buffers, strict=True):
            history = torch.arange(layer.conv_width - 1, device=self.device)
            rows = (conv_first.unsqueeze(1) + history) % self.conv_len
            buffers.conv_rows[dst, : layer.conv_width - 1] = buffers.conv_rows[src.unsqueeze(1), rows]
        cursor_rule.reset(self.cursors, dst)

    # ---- what there is

    def per_slot(self) -> dict[str, Tensor]:
        """All that belongs to slots, first axis slots, by layer and field: what reset, fork and snapshot go over."""
        named = {
            f"{index}.{each.name}": each.tensor
            for index, buffers in enumerate(self.buffers)
            for each in tensors_of(buffers)
            if each.of_slot
        }
        return named | {f"cursors.{name}": tensor for name, tensor in self._cursor_fields()}

    def bytes(self) -> int:
        """Bytes of all tensors of the pool."""
        return sum(self.bytes_by_field().values())

    def bytes_per_slot(self) -> int:
        """Bytes of one slot, cursors included."""
        return (self.bytes() - (0 if self.rand_seed is None else self.rand_seed.nbytes)) // self.num_slots

    def bytes_by_field(self) -> dict[str, int]:
        """Bytes of all slots and layers by the name of the field, and of ``rand_seed`` if there is one."""
        counts: dict[str, int] = {}
        held = [(each.name, each.tensor) for buffers in self.buffers for each in tensors_of(buffers)]
        for name, tensor in (*held, *self._cursor_fields()):
            counts[name] = counts.get(name, 0) + tensor.nbytes
        if self.rand_seed is not None:
            counts["rand_seed"] = self.rand_seed.nbytes
        return counts

    # ---- inside

    def _cursor_fields(self) -> Iterator[tuple[str, Tensor]]:
        for field in fields(self.cursors):
            yield field.name, getattr(self.cursors, field.name)

    def _take(self, n: int) -> Tensor:
        check_range("n", n, 0, MAX_SIZE)
        return self.table.take(n)

    def _zero(self, slots: Tensor) -> None:
        plain = [as_plain(tensor) for tensor in self.per_slot().values()]
        if slots.numel() == self.num_slots:
            for dtype in {tensor.dtype for tensor in plain}:  # few launches, where there would be some per layer
                torch._foreach_zero_([tensor for tensor in plain if tensor.dtype == dtype])
            return
        for tensor in plain:
            tensor.index_fill_(0, slots, 0)

    def _copy(self, src: Tensor, dst: Tensor) -> None:
        for tensor in self.per_slot().values():
            plain = as_plain(tensor)
            plain.index_copy_(0, dst, plain.index_select(0, src))

    def _reads_values(self) -> bool:
        return self.device.type == "cpu" or checked_mode()

    def _integers(self, name: str, values: Tensor | Sequence[int]) -> Tensor:
        if isinstance(values, Tensor):
            return values
        check_integers(name, values)
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _check_rewind(self, src: list[int], dst: list[int], rewind: list[int]) -> None:
        last_accepted = self.cursors.last_accepted.tolist()
        for index, (source, target, back) in enumerate(zip(src, dst, rewind, strict=True)):
            if not 0 <= back <= last_accepted[source]:
                raise ValueError(
                    f"rewind: expected 0 <= rewind <= {last_accepted[source]} (tokens that the last commit kept in "
                    f"slot {source}; the convolution's window of an older token is gone), got {back}"
                )
            if target in src[:index] or target in src[index + 1 :]:
                raise ValueError(f"dst_slots: expected no slot that another request reads, got {target}")
