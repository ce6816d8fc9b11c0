"""The command line: ``replayssm generate``, ``replayssm bench`` and ``replayssm info``.

Each command lives in a module of its own and is imported when it runs, so that ``--help`` and a mistyped option answer
at once, without loading torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from threading import current_thread, main_thread
from types import FrameType, ModuleType

from replayssm.cli.errors import CommandError
from replayssm.cli.parser import build_parser

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments without the program's name; None takes them from ``sys.argv``.

    Returns:
        The exit code: 0, 1 for a failure, 2 for wrong use, 130 after Ctrl-C. An error is one line on stderr; set
        ``REPLAYSSM_TRACEBACK=1`` to see where it came from instead.

    Example:
        >>> main(["generate", "--draft", "lookup", "--num-draft-tokens", "0"])
        2
    """
    try:
        options = build_parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what other libraries say to their developers
            warnings.filterwarnings("once", module=r"replayssm\.")
            warnings.showwarning = _warn
            command = _import(f"replayssm.cli.{options.command}")
            code: int = command.run(options)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: help, version
        return stop.code if isinstance(stop.code, int) else 1
    except CommandError as error:
        return _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`). Python flushes stdout once more at exit, which must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("REPLAYSSM_TRACEBACK") == "1":
            raise
        return _report(str(error) or type(error).__name__, 1)


def _import(name: str) -> ModuleType:
    """Import a module; a Ctrl-C meanwhile counts even if the import loses it, as torch's does for a while."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        return importlib.import_module(name)
    seen = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        module = importlib.import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt
    return module


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    sys.stderr.write(f"replayssm: warning: {' '.join(str(message).split())}\n")


def _report(message: str, exit_code: int) -> int:
    """Print ``message`` to stderr as one line and return ``exit_code``."""
    sys.stderr.write(f"replayssm: error: {' '.join(message.split())}\n")
    return exit_code
