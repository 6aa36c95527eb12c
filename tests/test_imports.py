"""The shape of the code: who may import whom, what files are called, what is documented, what importing does."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "vescale_jax": ROOT / "vescale_jax",
    "vescale_layouts": ROOT / "layouts" / "vescale_layouts",
    "vescale_planner": ROOT / "planner" / "vescale_planner",
}
# What each package may import besides itself and the standard library. vescale_jax: its run-time dependencies, and
# those of the extras, which must stand inside a function (see `test_extras_are_imported_late`).
ALLOWED = {
    "vescale_jax": {
        "vescale_layouts", "vescale_planner",
        "jax", "jaxlib", "flax", "optax", "numpy", "chex", "orbax", "tensorstore", "rich", "matplotlib",
    },
    "vescale_layouts": {"vescale_planner", "jax", "jaxlib", "numpy"},
    "vescale_planner": set(),
}  # fmt: skip
EXTRAS = {"matplotlib"}
VAGUE_NAME = re.compile(r"_*(utils?|helpers?|common|base|managers?)")
MAX_LINES = 500


def python_files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the full dotted name of every absolute import, wherever it stands in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_imports(package: str, source: str) -> list[str]:
    """What is wrong with the imports of one file of `package`, as "line N: ..." sentences."""
    allowed = ALLOWED[package] | {package} | sys.stdlib_module_names
    faults = []
    for line, name in imported(ast.parse(source)):
        top, *rest = name.split(".")
        if top not in allowed:
            faults.append(f"line {line}: {package} may not import {name}")
        elif top in PACKAGES and top != package and any(part.startswith("_") for part in rest):
            faults.append(f"line {line}: {name} is private to {top}")
    return faults


def exported_without_docstring(init: Path) -> list[str]:
    """The names that `from ._x import y as y` makes public in a package's `__init__.py` and that have no docstring."""
    faults = []
    for node in ast.parse(init.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or node.level != 1:
            continue
        for alias in node.names:
            if alias.asname != alias.name:
                continue
            home = module_file(init.parent, *(node.module or alias.name).split("."))
            if node.module is None:  # `from . import optimizers as optimizers` exports a module
                documented = ast.get_docstring(ast.parse(home.read_text()))
            else:
                documented = docstring_of(home, alias.name)
            if not documented:
                faults.append(f"{alias.name} ({home.relative_to(init.parent.parent)})")
    return faults


def module_file(folder: Path, *parts: str) -> Path:
    as_package = folder.joinpath(*parts, "__init__.py")
    return as_package if as_package.exists() else folder.joinpath(*parts).with_suffix(".py")


def docstring_of(module: Path, name: str) -> str | None:
    """The docstring of a function, class, or constant (a string right below it) at the top level of a module."""
    tree = ast.parse(module.read_text())
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_docstring(node)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and any(a.name == name for a in node.names):
            return docstring_of(module_file(module.parent, *(node.module or name).split(".")), name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            text = after.value if isinstance(after, ast.Expr) else None
            return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else None
    return None


def run_python(code: str, folder: Path) -> str:
    """The output of a fresh interpreter that knows the three packages and nothing of this test run."""
    path = os.pathsep.join(str(package.parent) for package in PACKAGES.values())
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    faults = {
        str(file.relative_to(ROOT)): found
        for file in python_files(PACKAGES[package])
        if (found := wrong_imports(package, file.read_text()))
    }
    assert not faults


@pytest.mark.parametrize(
    ("package", "source", "fault"),
    [
        ("vescale_planner", "import jax", "line 1: vescale_planner may not import jax"),
        ("vescale_planner", "def f():\n    import numpy", "line 2: vescale_planner may not import numpy"),
        (
            "vescale_layouts",
            "from vescale_jax import describe",
            "line 1: vescale_layouts may not import vescale_jax.describe",
        ),
        (
            "vescale_jax",
            "from vescale_layouts._ragged import X",
            "line 1: vescale_layouts._ragged.X is private to vescale_layouts",
        ),
        (
            "vescale_jax",
            "from vescale_planner import _pack",
            "line 1: vescale_planner._pack is private to vescale_planner",
        ),
    ],
)
def test_a_wrong_import_is_found(package: str, source: str, fault: str) -> None:
    assert wrong_imports(package, source) == [fault]


def test_right_imports_pass() -> None:
    lines = ["import json", "import jax.numpy as jnp", "from vescale_planner import Slot", "from ._ragged import X"]
    assert wrong_imports("vescale_layouts", "\n".join(lines)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_extras_are_imported_late(package: str) -> None:
    """A plain installation has none of the extras, so importing the package must not need them."""
    faults = []
    for file in python_files(PACKAGES[package]):
        at_import = ast.Module(
            [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)], []
        )
        faults += [f"{file.name}: {name}" for _, name in imported(at_import) if name.split(".")[0] in EXTRAS]
    assert not faults


def test_names_say_what_a_file_holds() -> None:
    files = python_files(*PACKAGES.values(), *(ROOT / folder for folder in ("tests", "examples", "benchmarks")))
    vague = {
        str(file.relative_to(ROOT))
        for file in files
        if any(VAGUE_NAME.fullmatch(part) for part in file.relative_to(ROOT).with_suffix("").parts)
    }
    assert not vague


def test_files_are_short() -> None:
    files = python_files(*PACKAGES.values(), *(ROOT / folder for folder in ("tests", "examples", "benchmarks")))
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_have_docstrings(package: str) -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in python_files(PACKAGES[package])
        if not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert not silent


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package: str) -> None:
    silent = [
        fault
        for init in python_files(PACKAGES[package])
        if init.name == "__init__.py"
        for fault in exported_without_docstring(init)
    ]
    assert not silent


def test_a_missing_docstring_is_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    exports = ["Said", "Silent", "DEFAULT", "BARE"]
    (package / "__init__.py").write_text("".join(f"from ._x import {name} as {name}\n" for name in exports))
    (package / "_x.py").write_text(
        'class Said:\n    """Yes."""\nclass Silent:\n    x: int = 0\nDEFAULT = 1\n"""Elements."""\nBARE: int = 2\n'
    )
    found = exported_without_docstring(package / "__init__.py")
    assert found == [f"Silent ({Path('package/_x.py')})", f"BARE ({Path('package/_x.py')})"]


def test_planner_needs_only_the_standard_library(tmp_path: Path) -> None:
    # Compared with a start without the import, since an environment may load modules of its own when Python starts.
    code = "import sys; before = set(sys.modules); import vescale_planner; print(*set(sys.modules) - before)"
    loaded = {name.split(".")[0] for name in run_python(code, tmp_path).split()}
    assert "vescale_planner" in loaded
    assert loaded - {"vescale_planner"} <= sys.stdlib_module_names


def test_importing_changes_no_setting(tmp_path: Path) -> None:
    code = """
import os
env = dict(os.environ)
import jax
from jax._src import xla_bridge
values = dict(jax.config.values)
import vescale_jax, vescale_layouts
now = jax.config.values
assert dict(os.environ) == env, {k for k in {*env, *os.environ} if env.get(k) != os.environ.get(k)}
assert {k: (v, now[k]) for k, v in values.items() if now[k] != v} == {}
assert not xla_bridge.backends_are_initialized(), "importing the library starts a backend"
print("unchanged")
"""
    assert run_python(code, tmp_path) == "unchanged"
