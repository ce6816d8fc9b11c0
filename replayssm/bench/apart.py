"""Cases in a process of their own, so that a library which crashes takes no other row with it."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import warnings
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from replayssm.bench import Options, Row
from replayssm.bench.timing import Timer

__all__ = ["Apart", "Crashed"]


class Crashed(Exception):
    """The process that ran a case has died."""


class Apart:
    """A second process that runs cases of a family one at a time; the next one after a crash runs in a new process.

    Args:
        module: the family's module, see ``replayssm.bench``.
        options: what its ``cases`` are asked for.

    Example:
        >>> with Apart("replayssm.bench.mamba", Options(quick=True, peers=True)) as apart:
        ...     pass  # apart.run(3, timer) is the row of the fourth case
    """

    def __init__(self, module: str, options: Options) -> None:
        self._module, self._options = module, options
        self._process: Any = None
        self._connection: Connection

    def __enter__(self) -> Apart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.terminate()
            self._process.join()

    def run(self, number: int, timer: Timer) -> Row:
        """Run a case there and return its row.

        Args:
            number: its place in the family's list.
            timer: whose ceiling the other process takes over.

        Raises:
            Crashed: the process died.
            Exception: what the case raised.
        """
        if self._process is None:
            self._start(timer.ceiling)
        try:
            self._connection.send(number)
            row, error, said = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code, self._process = self._process.exitcode, None
            raise Crashed(f"the process died ({_cause(code)})") from None
        for message in said:
            warnings.warn(message, stacklevel=2)
        if error is not None:
            raise error
        return row

    def _start(self, ceiling: float) -> None:
        if self._options.device == "cuda":
            torch.cuda.empty_cache()  # the other process needs the memory
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self._module, self._options, ceiling)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()


def _serve(connection: Connection, module: str, options: Options, ceiling: float) -> None:
    """Answer numbers of cases with rows, until the other end is closed."""
    os.dup2(2, 1)  # compilers print, and standard output is for the tables
    cases = importlib.import_module(module).cases(options)
    timer = Timer(options.device, quick=options.quick, ceiling=ceiling)
    with contextlib.suppress(EOFError, KeyboardInterrupt), torch.no_grad():
        while True:
            number = connection.recv()
            row, error = None, None
            with warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("ignore")
                warnings.filterwarnings("always", module=r"replayssm\.")
                try:
                    row = cases[number].run(timer)
                except Exception as problem:
                    error = problem
            connection.send((row, error, [str(warning.message) for warning in caught]))


def _cause(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
