"""Where tables and the live line are printed."""

from __future__ import annotations

from rich import console


class Console(console.Console):
    """Rich's console; when the reader of a pipe has gone, that is for ``main`` to handle, as for plain text."""

    def on_broken_pipe(self) -> None:
        """Pass the error on, where Rich would end the program with exit code 1."""
        raise BrokenPipeError
