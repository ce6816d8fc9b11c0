"""Showing text while it is generated: plainly into a pipe, with a live line of speed in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor

PROMPT_SHOWN = 400  # characters of the prompt that a terminal shows before the text
INCOMPLETE = "\ufffd"  # what decoding makes of a character whose bytes have not all come yet
LONGEST_INCOMPLETE = 32  # tokens to wait for them; more than that is no text

# A model may write control characters; a terminal would obey them.
HARMLESS = {code: INCOMPLETE for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


class TextSteps:
    """Turns tokens into pieces of text whose concatenation is the decoded whole, at a cost that does not grow.

    Args:
        decode: the tokenizer's decode, of a list of ids.

    Example:
        >>> steps = TextSteps(lambda ids: bytes(ids).decode(errors="replace"))
        >>> [steps.add([byte]) for byte in "né!".encode()]
        ['n', '', 'é', '!']
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # ids whose text is out already: a decoder may treat the first one specially

    def add(self, ids: list[int], *, last: bool = False) -> str:
        """Return the text that ``ids`` complete; with ``last`` also what can never be completed."""
        self._ids += ids
        known = self._decode(self._ids[: self._context])
        text = self._decode(self._ids)
        waiting = len(self._ids) - self._context
        if text.endswith(INCOMPLETE) and not last and waiting <= LONGEST_INCOMPLETE:
            return ""
        if waiting:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
        return text[len(known) :]


class PlainStream:
    """A streamer that writes the text alone to stdout, as soon as characters are complete."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._steps = TextSteps(decode)
        self._in_prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt, then the new tokens."""
        if not self._in_prompt:
            self._write(self._steps.add(value.flatten().tolist()))
        self._in_prompt = False

    def end(self) -> None:
        """Write what is left and a line feed."""
        self._write(self._steps.add([], last=True) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class LiveStream:
    """A streamer that writes the text to a terminal, above a line with tokens/s and the accept rate.

    Only the line of text that is still growing and the status are redrawn, so a text of any length scrolls as usual.
    Use it as a context manager around the generation.
    """

    def __init__(self, decode: Callable[[list[int]], str], console: Console, prompt: str) -> None:
        self._steps = TextSteps(decode)
        self._console = console
        self._live = Live(console=console, refresh_per_second=12, transient=True)
        self._growing = Text.assemble((_end_of(prompt).translate(HARMLESS), "dim"))
        self._in_prompt = True
        self._tokens = self._drafted = self._accepted = 0
        self._started = 0.0

    def __enter__(self) -> LiveStream:
        self._live.start()
        self._advance("")
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the whole text and nothing else on the screen, also after Ctrl-C."""
        self._live.update(Text(""))
        self._live.stop()
        self._console.print(self._growing)

    def put(self, value: Tensor) -> None:
        """Take the prompt, then the new tokens."""
        if not self._in_prompt:
            self._started = self._started or time.perf_counter()
            self._tokens += value.numel()
            self._advance(self._steps.add(value.flatten().tolist()))
        self._in_prompt = False

    def on_round(self, drafted: int, accepted: int) -> None:
        """Take the counts of a round's drafts."""
        self._drafted += drafted
        self._accepted += accepted

    def end(self) -> None:
        """Show what is left."""
        self._advance(self._steps.add([], last=True))

    def _advance(self, text: str) -> None:
        """Print the lines that are complete with ``text`` and redraw what grows."""
        self._growing.append(text.translate(HARMLESS))
        *complete, self._growing = self._growing.wrap(self._console, self._console.width)
        for line in complete:
            self._console.print(line)
        self._live.update(Group(self._growing, self._status()))

    def _status(self) -> Text:
        if not self._tokens:
            return Text("reading the prompt", style="cyan")
        line = f"{self._tokens} tokens"
        seconds = time.perf_counter() - self._started
        if self._tokens > 1 and seconds > 0:  # the first token comes with the prompt and starts the clock
            line += f" · {(self._tokens - 1) / seconds:.0f} tokens/s"
        if self._drafted:
            line += f" · {self._accepted / self._drafted:.0%} of the drafts accepted"
        return Text(line, style="cyan")


def _end_of(prompt: str) -> str:
    """Return the prompt, of a long one the last lines, or words where a line is long."""
    if len(prompt) <= PROMPT_SHOWN:
        return prompt
    end = prompt[-PROMPT_SHOWN:]
    separator = "\n" if "\n" in end else " "
    return "…" + separator + end.partition(separator)[2] if separator in end else "…" + end
