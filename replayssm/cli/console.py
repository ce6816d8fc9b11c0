"""Where tables and the live line are printed."""

from __future__ import annotations

from rich import console
from rich.measure import Measurement

_ANY_WIDTH = 10_000


class Console(console.Console):
    """Rich's console; when the reader of a pipe has gone, that is for ``main`` to handle, as for plain text."""

    def on_broken_pipe(self) -> None:
        """Pass the error on, where Rich would end the program with exit code 1."""
        raise BrokenPipeError

    def print_whole(self, table: console.RenderableType) -> None:
        """Print a table at the width that it needs, because a number that is cut to fit is another number.

        In a terminal that is narrower its lines go on in the next ones.
        """
        needed = Measurement.get(self, self.options.update(width=_ANY_WIDTH), table).maximum
        width, self.width = self.width, max(needed, self.width)
        try:
            self.print(table)
        finally:
            self.width = width
