"""Imports go one way, and what is installed is what is checked."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE_MAY_IMPORT = {"numpy", "kvarn"} | set(sys.stdlib_module_names)
RECORD_MAY_IMPORT = {"safetensors", "xxhash"}
LAYERS = [
    {"runner"},
    {"engine"},
    {"scheduler"},
    {"disk_tier"},
    {"prefix_cache", "capacity", "cache_explain"},
    {"block_pool"},
    {"store_writer", "store_disk"},
    {"store_shared"},
    {"store_index", "store_files"},
    {"store"},
    {"record", "tier"},
    {"keys"},
    {"reference"},
    {"tile"},
    {"format"},
    {"errors"},
]


def imports(file: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            module = node.module or ""
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("file", sorted((ROOT / "kvarn").glob("*.py")), ids=lambda f: f.name)
def test_the_core_imports_numpy_and_the_standard_library_only(file: Path) -> None:
    allowed = CORE_MAY_IMPORT | (RECORD_MAY_IMPORT if file.name == "record.py" else set())
    for name in imports(file):
        assert name.split(".")[0] in allowed, f"{file.name} imports {name}"
        assert not name.startswith(("kvarn.backends", "kvarn.serve")), f"{file.name} imports {name}"


@pytest.mark.parametrize("file", sorted((ROOT / "backends").rglob("*.py")), ids=str)
def test_backends_import_neither_each_other_nor_serve(file: Path) -> None:
    folder = file.relative_to(ROOT / "backends").parts[0]
    other = {"mlx": "kvarn.backends.triton", "triton": "kvarn.backends.mlx"}.get(folder, "kvarn.backends.")
    for name in imports(file):
        assert not name.startswith(("kvarn.serve", other)), f"{file} imports {name}"


def test_the_core_layers_import_downwards_only() -> None:
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    for file in (ROOT / "kvarn").glob("*.py"):
        for name in imports(file):
            used = name.removeprefix("kvarn.").split(".")[0]
            if name.startswith("kvarn.") and file.stem in level and used in level and used != file.stem:
                assert level[used] > level[file.stem], f"{file.name} imports {name}"


def test_the_installed_package_holds_every_file_of_the_three_folders() -> None:
    from setuptools import find_packages

    packages = set(find_packages(str(ROOT), include=["kvarn*"]))
    assert {"kvarn", "kvarn.backends", "kvarn.backends.triton", "kvarn.serve"} <= packages
    folders = {ROOT / package.replace(".", "/") for package in packages}
    for top in ("kvarn", "backends", "serve"):
        for file in (ROOT / top).rglob("*.py"):
            if "__pycache__" in file.parts:
                continue
            below = file.relative_to(ROOT)
            inside = ROOT / ("kvarn" if below.parts[0] != "kvarn" else "") / below
            assert inside.parent in folders, f"{below} would not be installed"


def test_mypy_sees_every_file() -> None:
    run = subprocess.run([sys.executable, "-m", "mypy", "--version"], capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip("mypy is not installed (extra dev)")
    checked = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    files = sum(len(list((ROOT / top).rglob("*.py"))) for top in ("backends", "serve"))
    files += len(list((ROOT / "kvarn").glob("*.py")))
    assert f"in {files} source files" in checked.stdout
