"""The command line in a terminal: its live line, Ctrl-C, and readers that leave."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time

import pytest
import torch
from cli_models import COMMAND, ENVIRONMENT, PROMPT, ROOT, save_model

from replayssm.cli import main

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), seed=1)


def _in_terminal(*arguments):
    """Run the command in a pseudo-terminal; return the process and the terminal's end to read."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=theirs,
        # A shell's background job ignores Ctrl-C, and so would everything it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def _read_all(descriptor):
    chunks = []
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(descriptor)
    return b"".join(chunks).decode()


def test_text_steps_add_up_to_the_whole():
    from replayssm.cli.stream import TextSteps

    text = "naïve — 語 \U0001f600 end".encode() + b"\xff\xe2" + b" x" + b"\xe2" * 50 + b"y\xe2\x82"
    for size in (1, 2, 3, 7):
        steps = TextSteps(lambda ids: bytes(ids).decode(errors="replace"))
        pieces = [steps.add(list(text[i : i + size])) for i in range(0, len(text), size)]
        assert "".join(pieces) + steps.add([], last=True) == text.decode(errors="replace")
        assert len([piece for piece in pieces if piece]) >= 4  # it does stream


def test_the_text_cannot_steer_the_terminal():
    from io import StringIO

    from rich.console import Console

    from replayssm.cli.stream import LiveStream

    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=40)
    with LiveStream(lambda ids: bytes(ids).decode(errors="replace"), console, "prompt\x1b]0;a title\x07") as stream:
        stream.put(torch.tensor([[0]]))
        stream.put(torch.tensor(list(b" text\x1b]0;other\x07 end\n[bold]")))
        stream.on_round(4, 3)
        stream.put(torch.tensor([33]))
        stream.end()
    assert "\x1b]" not in screen.getvalue() and "\x07" not in screen.getvalue()
    assert "[bold]!" in screen.getvalue()  # markup is text too
    assert "75% of the drafts accepted" in stream._status().plain


def test_a_terminal_shows_a_live_line(model):
    process, terminal = _in_terminal(
        "generate", model, "--prompt", PROMPT, "--max-new-tokens", "400"
    )  # longer than a refresh
    screen = _read_all(terminal)
    assert process.wait(60) == 0
    assert re.search(r"\d+ tokens · \d+ tokens/s", screen)  # the live line
    assert "400 tokens in" in screen and "tokens/s" in screen  # the line that stays


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("info", ("batch_invariant_decode_buffered_scan", "runs on it")),
        ("generate --compare --prompt a --max-new-tokens 3 --device cpu", ("tokens/s", "replay + drafts")),
        ("bench mamba --quick --heads 6 --groups 2 --batch 3 --tokens 2 --device cpu", ("of_ceiling", "flush")),
        ("bench generate --quick --device cpu", ("look-up tokens/s", "tiny-mamba2")),
    ],
)
def test_tables_cut_nothing_in_a_narrow_terminal(capsys, monkeypatch, command, words):
    """Half a number is another number. What does not fit goes on in the terminal's next line."""
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    assert main(command.split()) == 0
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).replace("measuring each way …", "")
    assert "…" not in out and all(word in out for word in words)


def test_ctrl_c_is_quiet(model):
    process, terminal = _in_terminal("generate", model, "--prompt", PROMPT, "--max-new-tokens", "1000000")
    seen = b""
    while b"tokens/s" not in seen:
        seen += os.read(terminal, 65536)
    process.send_signal(signal.SIGINT)
    rest = _read_all(terminal)
    assert process.wait(30) == 130
    assert "Traceback" not in rest and "rror" not in rest


def test_a_reader_that_leaves_is_no_error(model):
    process = subprocess.Popen(
        [*COMMAND, "generate", model, "--prompt", PROMPT, "--max-new-tokens", "1000000"],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout.read(3)
    process.stdout.close()
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.returncode == 0
    assert process.stderr.read() == b""
    process.stderr.close()
