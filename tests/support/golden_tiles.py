"""The inputs of the golden set (tests/golden/), as tools/make_golden.py makes them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
from operation_cases import Floats

from kvarn.format import TileFormat

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load_tool(name: str) -> ModuleType:
    """A module of tools/, which is not a package; registered, so that its neighbours can import it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def golden_batches() -> dict[TileFormat, tuple[Floats, Floats]]:
    """Keys and values of every golden vector, `[T, G, D]`, by format."""
    load_tool("golden_mutants")  # make_golden imports it
    pairs: dict[TileFormat, list[tuple[Floats, Floats]]] = {}
    for vector in load_tool("make_golden").VECTORS:
        pairs.setdefault(vector.fmt, []).append((vector.keys.array(vector.fmt), vector.values.array(vector.fmt)))
    return {
        fmt: (np.stack([keys for keys, _ in some]), np.stack([values for _, values in some]))
        for fmt, some in pairs.items()
    }
