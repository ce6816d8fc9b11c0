"""How calls are timed and checked: graph replays on a GPU, interleaved calls on one thread of a CPU."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from replayssm.bench import WrongAnswer

Calls = Sequence[Callable[[], object]]

_CACHE = {"cuda": 4e8, "cpu": 6.4e7}  # bytes that rotating buffers fill together, several times the last cache
_MOST_SETS = {"cuda": 512, "cpu": 4}
_CACHED_SETS = 16
_REPLAYS = 20
_CPU_SECONDS = 0.25  # for which a case is repeated
_COPY = {"cuda": 1 << 30, "cpu": 1 << 26}  # elements of the copy that measures the ceiling


class Timer:
    """Times calls on one device and knows what its memory allows.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        quick: repeat less.
        ceiling: what another timer on this device measured; None measures it.

    Attributes:
        device: where buffers belong.
        ceiling: bytes read and written per microsecond by a large elementwise copy on this device, measured here.
    """

    def __init__(self, device: str, *, quick: bool = False, ceiling: float | None = None) -> None:
        self.device = torch.device(device)
        self._quick = quick
        self.ceiling = self._copy_ceiling() if ceiling is None else ceiling

    def _copy_ceiling(self) -> float:
        elements = _COPY[self.device.type] >> (3 if self._quick else 0)
        if self.device.type == "cuda":
            elements = min(elements, torch.cuda.mem_get_info()[0] // 32)  # source and target take a quarter of it
        source = torch.randn(elements, device=self.device)
        target = torch.empty_like(source)
        # A kernel does the copying: within a graph, copy_ becomes a slower memcpy node.
        copying = self.micros({"copy": [lambda: torch.add(source, 1.0, out=target)]})["copy"]
        return 2 * source.nbytes / copying

    def sets(self, size: float) -> int:
        """Sets of buffers of ``size`` bytes to rotate through, so that the cache holds none of them."""
        kind = self.device.type
        return max(1, min(_MOST_SETS[kind], int(_CACHE[kind] / (4 if self._quick else 1) // size) + 1))

    def cached_sets(self, size: float) -> int:
        """16, if so many sets of ``size`` bytes stay in a GPU's L2, else 0.

        Published times of small batches were taken with so few sets, hence from the cache.
        """
        if self.device.type == "cpu":
            return 0
        return _CACHED_SETS if _CACHED_SETS * size < torch.cuda.get_device_properties(self.device).L2_cache_size else 0

    def micros(self, ways: Mapping[str, Calls]) -> dict[str, float]:
        """Time several ways to do the same work, each as a list of calls on buffers that rotate.

        Args:
            ways: for every name its calls; each has run before it is timed.

        Returns:
            Median microseconds of one call, by name.
        """
        if self.device.type == "cuda":
            return {name: graph_time(calls, 5 if self._quick else _REPLAYS) for name, calls in ways.items()}
        return interleaved_time(ways, _CPU_SECONDS / (5 if self._quick else 1))


def graph_time(calls: Calls, repeats: int) -> float:
    """Median microseconds of one call, over replays of a CUDA graph that makes every call once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) / len(calls) * 1e3)
    return statistics.median(times)


def interleaved_time(ways: Mapping[str, Calls], seconds: float) -> dict[str, float]:
    """Median microseconds of one call on the CPU: the ways in turn, until each has had its share of ``seconds``."""
    for calls in ways.values():
        for call in calls:
            call()
    times: dict[str, list[float]] = {name: [] for name in ways}
    started, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - started < seconds * len(ways):
        for name, calls in ways.items():
            begin = time.perf_counter()
            for call in calls:
                call()
            times[name].append((time.perf_counter() - begin) / len(calls) * 1e6)
        rounds += 1
    return {name: statistics.median(taken) for name, taken in times.items()}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread on one core for the block: the scheduler then moves nothing between measurements."""
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    torch.set_num_threads(1)
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)


def verify(name: str, actual: Tensor, expected: Tensor, limit: float) -> float:
    """Compare an answer with that of the reference.

    Args:
        name: what was computed, for the message.
        actual: any floating-point dtype, on any device.
        expected: same shape.
        limit: largest accepted norm of the difference over the norm of ``expected``.

    Returns:
        That quotient.

    Raises:
        WrongAnswer: it is above the limit, or not a number.

    Example:
        >>> verify("ones", torch.ones(3), torch.ones(3), 1e-6)
        0.0
    """
    actual, expected = actual.double().cpu(), expected.double().cpu()
    error = float((actual - expected).norm() / expected.norm())
    if not error <= limit:
        raise WrongAnswer(f"{name}: relative error {error:.2e} against the fp64 reference, allowed are {limit:.0e}")
    return error
