"""A transformers cache whose rows are fixed: what transformers asks of caches and this kind answers at once."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer


def _not_attached(*_: object, **__: object) -> Any:
    raise RuntimeError("ReplayCache: the model is not attached; call replayssm.hf.attach(model) first")


class UnattachedLayer(LinearAttentionLayer):
    """Stands for one layer; a mixer that reads or writes it has not been attached, or not any more."""

    update_conv_state = update_recurrent_state = _not_attached
    # The base class sets both to None; what stands there is of no interest.
    conv_states = property(_not_attached, lambda self, value: None)
    recurrent_states = property(_not_attached, lambda self, value: None)


class FixedCache(Cache):
    """The part of ``ReplayCache`` that does not depend on what it holds."""

    # Asked for by the masks of a model that is not attached; an attached one is given its masks.
    get_mask_sizes = _not_attached

    @property
    def is_croppable(self) -> bool:
        """True: a rollback leaves no trace."""
        return True

    @property
    def is_compileable(self) -> bool:
        """False: the forward branches on the cache."""
        return False

    def activate_past_recording(self) -> None:
        """Nothing to do: the newest forward can always be taken back."""

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Not supported.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ReplayCache: beam search is not supported; supported are greedy decoding, sampling")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Not supported.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ReplayCache: a batch cannot grow; make the cache with the final batch_size")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Not supported; see ``select``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ReplayCache: use select(rows) to go on with some of the rows")

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Not supported.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ReplayCache: cannot be copied; run the prompt through a second cache")
