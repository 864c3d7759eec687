"""The Metal kernels on the host runner: production call sites, the exact source that MLX would compile on a Mac."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tools")]  # for cases.py and metal_host


def _clear() -> None:
    from kvarn.backends.mlx.kernels import kernels

    for value in vars(kernels).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture(scope="module")
def launches() -> list[str]:
    """The sources that ran, in order."""
    return []


@pytest.fixture(autouse=True, scope="module")
def host(launches: list[str]) -> Iterator[None]:
    """Every kernel of these tests runs on the CPU, under three schedules."""
    from metal_host.mlx_kernel import metal_kernel

    from kvarn.backends.mlx.kernels import kernels

    real, kernels.metal_kernel = kernels.metal_kernel, partial(metal_kernel, launches=launches)
    _clear()
    yield
    kernels.metal_kernel = real
    _clear()


@pytest.fixture
def one_schedule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For long lists of shapes: the random schedule alone, with every check but the comparison of three."""
    from metal_host.mlx_kernel import metal_kernel

    from kvarn.backends.mlx.kernels import kernels

    monkeypatch.setattr(kernels, "metal_kernel", partial(metal_kernel, schedules=("random",)))
    _clear()
    yield
    monkeypatch.undo()
    _clear()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`plant(old, new)`: the kernels' sources with one text, found at `occurrence`, replaced; options of the runner."""
    from metal_host.mlx_kernel import metal_kernel

    from kvarn.backends.mlx.kernels import kernels, source

    original = source.read

    def replace(name: str, old: str, new: str, occurrence: int = 0, **options: Any) -> None:
        def read(wanted: str) -> str:
            text: str = original(wanted)
            if wanted != name:
                return text
            parts = text.split(old)
            assert len(parts) > occurrence + 1, f"{name}.metal has no {old!r} number {occurrence}"
            return old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :])

        monkeypatch.setattr(source, "read", read)
        monkeypatch.setattr(kernels, "metal_kernel", partial(metal_kernel, **options))
        _clear()

    yield replace
    monkeypatch.undo()
    _clear()
