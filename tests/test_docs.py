"""What the documentation shows, runs; what it names, exists."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest

from replayssm.cli.parser import build_parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "replayssm").rglob("*.py")
    if path.name != "__main__.py"
)


def _blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Fenced blocks of one language, with the line where each begins."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_in_order(page, capsys):
    namespace: dict[str, object] = {"__name__": page.stem}
    for line, code in _blocks(page, "python"):
        # Blank lines in front make a failure's line number that of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_the_readme_example_is_short():
    ((_, code),) = _blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line]) <= 15


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    if name.startswith("replayssm.hf"):
        pytest.importorskip("transformers")
    if ".kernels" in name:
        pytest.importorskip("triton")
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_shell_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set()
    for page in PAGES:
        inline = re.findall(r"`([^`\n]+)`", page.read_text())
        lines = [line for _, block in _blocks(page, "(?:bash|console|sh)") for line in block.splitlines()]
        for line in inline + lines:
            words = shlex.split(line.removeprefix("$ "), comments=True) if line.count('"') % 2 == 0 else []
            if words[:1] == ["make"]:
                assert {word for word in words[1:] if "=" not in word} <= targets, f"{page.name}: {line}"
                commands.add("make")
            elif words[:1] == ["replayssm"] and len(words) > 1:
                parse = words[1:] if "--help" not in words else words[1:2]
                assert build_parser().parse_args(parse).command in words, f"{page.name}: {line}"
                commands.add("replayssm")
            elif words[:1] == ["python"] and words[1:2] != ["-m"]:
                assert (ROOT / words[1]).is_file(), f"{page.name}: {line}"
    assert commands == {"make", "replayssm"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_paths_exist(page):
    text = page.read_text()
    quoted = re.findall(r"`((?:replayssm|docs|tests|examples|benchmarks)/[\w./-]+)`", text)
    drawn = re.findall(r"^(replayssm/[\w/]+/|examples/|benchmarks/|tests/)", text, re.MULTILINE)
    for path in quoted + drawn:
        assert (ROOT / path).exists(), f"{page.name} names {path}"
