"""How kernels are timed: replays of a CUDA graph over buffers that rotate, so that the cache holds none of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def graph_time(calls: list[Callable[[], object]], repeats: int = 12) -> float:
    """Median microseconds of one call, over replays of a graph that makes every call once.

    Args:
        calls: the same work on different buffers; each is run once before the capture.
        repeats: replays that are timed.
    """
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


def copy_ceiling() -> float:
    """Bytes read and written per microsecond by the largest elementwise copy: what memory allows on this device.

    A kernel does the copying: within a graph, ``copy_`` becomes a slower memcpy node.
    """
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_time([lambda: torch.add(source, 1.0, out=target)], 8)
