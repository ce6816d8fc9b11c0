"""How a command ends when it cannot do what was asked."""

from __future__ import annotations


class CommandError(Exception):
    """A failure that the user should read as one line.

    Attributes:
        exit_code: 1, the command failed; 2, it was called wrongly.
    """

    exit_code = 1


class UsageError(CommandError):
    """The command was called wrongly."""

    exit_code = 2
