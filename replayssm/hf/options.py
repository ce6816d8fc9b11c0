"""Checks of the options of ``generate``: what a wrong one is called, what was expected, what came."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from replayssm.checks import check_range, check_tensor

# The noise has a 64-bit key and a 32-bit word for the request.
_MOST_SEED = 2**64 - 1
_MOST_REQUEST = 2**32 - 1


def integers(name: str, values: object) -> list[int]:
    """One integer or several, in a sequence or a tensor, as a list.

    Raises:
        TypeError: anything else.
        ValueError: a tensor that holds nothing.

    Example:
        >>> import torch
        >>> integers("eos_token_id", 3), integers("eos_token_id", torch.tensor([3, 5]))
        ([3], [3, 5])
    """
    if isinstance(values, Tensor):
        check_holds(name, values, "an int or several")
    found: Any = values.flatten().tolist() if isinstance(values, Tensor) else values
    each: list[Any] = (
        [found] if isinstance(found, Integral) else list(found) if isinstance(found, Iterable) else [found]
    )
    if isinstance(found, (str, bytes)) or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in each):
        raise TypeError(f"{name}: expected an int or several, got {values!r} of type {type(values).__name__}")
    return [int(number) for number in each]


def check_holds(name: str, tensor: Tensor, what: str) -> None:
    """Raise TypeError or ValueError unless a tensor has values to be read."""
    check_tensor(name, tensor)
    if tensor.is_meta:
        raise ValueError(f"{name}: expected {what}, got a tensor on device 'meta', which holds none")


def check_seed(seed: int) -> None:
    """Raise unless the seed fits the key of the noise."""
    check_range("seed", seed, 0, _MOST_SEED)


def numbers_of_requests(request_ids: object, rows: int) -> list[int]:
    """The requests' numbers: those given, by default 0, 1, ...

    Raises:
        TypeError: not integers.
        ValueError: not one per row, or a number that the noise has no room for.
    """
    if request_ids is None:
        return list(range(rows))
    requests = integers("request_ids", request_ids)
    if len(requests) != rows or not all(0 <= number <= _MOST_REQUEST for number in requests):
        raise ValueError(f"request_ids: expected {rows} numbers in 0..{_MOST_REQUEST}, one per row, got {requests}")
    return requests


def callables(name: str, values: object) -> list[Any]:
    """The processors or criteria of a list; None is an empty one.

    Raises:
        TypeError: a single one without its list, or something that cannot be called.
    """
    if values is None:
        return []
    if not isinstance(values, (list, tuple)) or not all(callable(each) for each in values):
        raise TypeError(f"{name}: expected a list of callables as of transformers, got {type(values).__name__}")
    return list(values)


def check_streamer(streamer: object) -> None:
    """Raise unless a streamer can be written to; None is none."""
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer: expected an object with put and end, got {type(streamer).__name__}")


def check_mode(config: GenerationConfig) -> None:
    """Raise unless a generation config asks for greedy decoding or sampling without further results."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams: expected 1, got {config.num_beams}; beam search is not supported, greedy and sampling are"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"{mode.value.replace('_', ' ')}: not supported by custom_generate; greedy and sampling are")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(f"{name}: not supported with custom_generate; sequences and return_stats=True are")
