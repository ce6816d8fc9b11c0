"""The shape of the package: who may import whom, what an import loads, how long a file or a function may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "replayssm"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own layer and from the layers above it in this list, never from one below.
LAYERS = [
    {"checks", "rounding", "cursors", "dispatch", "custom_op", "kernels"},
    {"delta_rule", "recurrence"},
    {"mamba", "conv", "ssd", "gdn_decode", "row_product", "rms_norm", "gumbel"},
    {"batch_invariant_decode"},
    {"cache"},
    {"hf", "models"},
    {"warming"},
    {"testing", "bench"},
    {"cli", "__main__"},
]
UNLAYERED = {"__init__"}  # the package itself holds a version, and loads its parts when they are used
OPS = LAYERS[2]
LAYER_OF = {name: depth for depth, names in enumerate(LAYERS) for name in names}
HEAVY = ("torch", "numpy", "triton", "transformers", "rich")


def _top(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Names directly under ``replayssm`` that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {module.split(".")[1] for module in modules if module.startswith("replayssm.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    top = _top(path)
    if top in UNLAYERED:
        return
    assert top in LAYER_OF, f"{top}: give the new module a layer in this test"
    for name in _imports(path):
        assert name in LAYER_OF, f"{path.name} imports replayssm.{name}, which has no layer"
        assert LAYER_OF[name] <= LAYER_OF[top], f"{path.name} imports upwards: replayssm.{name}"


def test_the_rule_catches_an_upward_import(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from replayssm.hf import generate\n    import replayssm.cache.pool\n")
    assert _imports(path) == {"hf", "cache"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_family_never_imports_another(path):
    if _top(path) in OPS:
        assert not (_imports(path) & OPS) - {_top(path)}


def test_files_and_functions_stay_short():
    scripts = [p for folder in ("tests", "benchmarks", "examples") for p in (ROOT / folder).rglob("*.py")]
    for path in [*SOURCES, *scripts]:
        text = path.read_text()
        assert text.count("\n") < 400, f"{path}: 400 lines or more"
        if path in SOURCES:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                    length = node.end_lineno - _body_start(node) + 1
                    assert length < 60, f"{path}: {node.name} has {length} lines without its docstring"


def _is_kernel(node: ast.FunctionDef) -> bool:
    """Whether the function is compiled for a device: there a call is no boundary, and the limit is for host code."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)


def _body_start(node: ast.FunctionDef) -> int:
    """First line after the docstring: the contract of a public function is long, its code is not."""
    has_docstring = ast.get_docstring(node) is not None
    return node.body[0].end_lineno + 1 if has_docstring else node.lineno


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _loaded_by(statement: str) -> set[str]:
    return set(_run(f"import sys\n{statement}\nprint(*[m for m in {HEAVY} if m in sys.modules])").split())


def test_importing_the_package_loads_nothing():
    assert _loaded_by("import replayssm") == set()


def test_the_command_line_answers_without_torch():
    assert _loaded_by("import replayssm.cli\nreplayssm.cli.main(['--version'])") - {"0.1.0", "replayssm"} == set()


@pytest.mark.parametrize(
    "module",
    ["mamba", "conv", "ssd", "batch_invariant_decode", "gdn_decode", "row_product", "rms_norm", "cache", "testing"],
)
def test_ops_and_pool_load_neither_triton_nor_transformers(module):
    assert _loaded_by(f"import replayssm.{module}") & {"triton", "transformers", "rich"} == set()


@pytest.mark.parametrize(
    "module",
    [
        "mamba",
        "conv",
        "ssd",
        "batch_invariant_decode",
        "gdn_decode",
        "row_product",
        "rms_norm",
        "gumbel",
        "cache",
        "hf",
        "models",
    ],
)
def test_public_names_exist_and_are_documented(module):
    code = (
        f"import replayssm\nm = replayssm.{module}\nfor name in m.__all__:\n    assert getattr(m, name).__doc__, name\n"
    )
    _run(code)


def test_the_version_is_the_package_metadata():
    assert _run("import replayssm; print(replayssm.__version__)") == _run(
        "from importlib.metadata import version; print(version('replayssm'))"
    )


def test_files_of_tests_have_names_of_their_own():
    # Tests import each other by name, so pytest cannot tell two files of one name apart.
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
