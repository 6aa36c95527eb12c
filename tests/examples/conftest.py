"""The example's files: `examples/` is a folder of scripts, not a package, so they are imported by path."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """`example("text")`: the module of examples/text.py, which finds its siblings as it does when run as a script."""

    def load(name: str) -> ModuleType:
        sys.path.insert(0, str(EXAMPLES))
        try:
            module = importlib.import_module(name)
        finally:
            sys.path.remove(str(EXAMPLES))
        assert Path(module.__file__).parent == EXAMPLES
        return module

    return load
