"""CUDA graphs of a function of fixed buffers: captured when a shape comes again, replayed from then on."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.checks import checked_mode


def why_not(model: nn.Module, device: torch.device) -> str | None:
    """Why the forwards of a model on a device cannot be captured, None if nothing is known to prevent it."""
    if device.type != "cuda":
        return f"device '{device.type}' has no CUDA graphs"
    if checked_mode():
        return "REPLAYSSM_CHECK=1 reads values back"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "a replay would not call the model's forward hooks"
    return None


# Threads take turns, as they share the stream.
_LOCK = threading.Lock()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all graphs: they share memory only on one stream, and every stream has a workspace of cuBLAS for good."""
    return torch.cuda.Stream(device)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Objects of CUDA that are collected during a capture would break it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Graph:
    """One captured call.

    Args:
        function: works on tensors that stay where they are, reads nothing back, and has run before: whatever it
            compiles or loads has to be there.
        pool: memory that graphs share which do not run at the same time.
    """

    def __init__(self, function: Callable[[], Tensor], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(torch.cuda.current_device())
        with _LOCK, _without_collection():  # waiting for the stream, or making it wait, would break another's capture
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._capture(function, pool)
            torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, function: Callable[[], Tensor], pool: Any) -> None:
        # Other threads may go on allocating and launching meanwhile.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._result = function()
        except BaseException:
            with suppress(RuntimeError):  # it has ended the capture already, and is the error to be told
                self._graph.capture_end()
            with suppress(RuntimeError):  # else torch's generator would believe that the capture goes on
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.graphsafe_set_state(generator.clone_state())
            raise
        self._graph.capture_end()

    def replay(self) -> Tensor:
        """Run it on what the tensors hold now. The result is overwritten by the next graph of the same memory."""
        self._graph.replay()
        return self._result


class Graphs:
    """The graphs of one owner by key.

    Args:
        refused: why nothing can be captured, None if it can.

    Attributes:
        refused: as given, or what the first failed capture said; nothing is captured from then on.
    """

    def __init__(self, refused: str | None) -> None:
        self.refused = refused
        self._graphs: dict[Hashable, Graph | None] = {}
        self._pool = None if refused else torch.cuda.graph_pool_handle()

    def find(
        self, key: Hashable, function: Callable[[], Tensor], recording: Callable[[], AbstractContextManager[None]]
    ) -> Graph | None:
        """The graph of a key, None the first time that it comes up or when nothing can be captured.

        Args:
            key: what ``function`` depends on beside the contents of tensors.
            function: captured the second time, see ``Graph``.
            recording: entered while it is captured, so that nothing else than the device is told.
        """
        if self.refused or self._pool is None:
            return None
        if key not in self._graphs:
            self._graphs[key] = None
            return None
        graph = self._graphs[key]
        if graph is None:
            try:
                with recording():
                    graph = self._graphs[key] = Graph(function, self._pool)
            except (RuntimeError, NotImplementedError) as error:
                self.refused = f"capture failed: {str(error).splitlines()[0]}"
                warnings.warn(f"generation goes on without CUDA graphs, {self.refused}", stacklevel=2)
        return graph
