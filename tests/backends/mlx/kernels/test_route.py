"""Whole steps of the backend through the kernels, on the host runner, against the same steps in plain operations."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from small_models import Fed, Logits, build, distance, prompt, run

from kvarn.backend import LoadOptions
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx import choose
from kvarn.backends.mlx.backend import MlxBackend
from kvarn.backends.mlx.kernels import kernels
from kvarn.format import Preset

G = 64
PRESET = Preset(tile_tokens=G)
LOGITS, CODES = 2e-3, 1e-3  # as between two schedules, see test_backend.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("route")
    build(made, "llama", hidden_size=192, num_attention_heads=3, num_key_value_heads=1)
    return made


@pytest.fixture
def as_on_metal(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> Iterator[None]:
    """A device that has the kernels: here the host runner, under one schedule with every check on."""
    from metal_host.mlx_kernel import metal_kernel

    monkeypatch.delenv(choose.VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "metal_kernel", partial(metal_kernel, launches=launches, schedules=("random",)))
    forget()
    launches.clear()
    yield
    forget()


def forget() -> None:
    """No kernel and no verdict is kept."""
    for value in (*vars(kernels).values(), *vars(choose).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def ready(backend: MlxBackend) -> MlxBackend:
    """Pools of garbage, with more flags than make a buffer `constant`."""
    backend.allocate(12, 8)
    pool = backend.pool
    for x in (*pool.tiles, *pool.flags):
        x[:] = 0xFF
    for pages in pool.slots.values():
        for page in pages:
            page[:] = mx.nan
    mx.eval(pool.tiles, pool.flags, pool.slots)
    return backend


def answers(backend: MlxBackend) -> list[Logits]:
    """Two sequences: prefill across tile edges, decode and verify that complete tiles, prefill beside decode."""
    one, two = Fed(backend, prompt(3 * G + 5)), Fed(backend, prompt(2 * G + 1, seed=1), first=4)
    got = run(backend, one.span(2 * G + 20))  # seals tile 1
    got += run(backend, one.span(1), two.span(G - 2))
    got += run(backend, one.span(8), two.span(4))  # two of few queries, one across the sink's edge
    got += run(backend, one.span(34), two.span(G - 5))  # fills tile 2 up to its last token but one
    got += run(backend, one.span(1), two.span(1))  # decode seals tile 2 of the first
    got += run(backend, one.span(5), two.span(3))  # verify; the second seals its tile 1 on the way
    assert (one.at, two.at) == (3 * G + 5, 2 * G + 1)
    return got


def tiles_of(backend: MlxBackend) -> np.ndarray:
    """Tiles and flags of the three blocks that are sealed, `[L, 3, Hk, nbytes + 1]`."""
    tiles, flags = (np.array(mx.stack(x))[:, [0, 1, 4]] for x in (backend.pool.tiles, backend.pool.flags))
    return np.concatenate([tiles, flags[..., None]], axis=-1)


def test_whole_steps_through_the_kernels_are_the_plain_ones(
    folder: Path, launches: list[str], request: pytest.FixtureRequest
) -> None:
    plain = mlx_backend.load(folder, PRESET, LoadOptions(dtype="float32", device="cpu"))
    want = answers(ready(plain))
    request.getfixturevalue("as_on_metal")
    metal = plain.share(PRESET)
    assert metal.route()["seal"].startswith("Metal kernels")
    assert {source_of(text) for text in launches} == {"rotate", "seal", "attend", "prefill", "combine"}  # the check
    launches.clear()
    got = answers(ready(metal))
    assert {source_of(text) for text in launches} == {"rotate", "seal", "attend", "prefill", "combine"}
    assert len(got) == len(want)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert np.isfinite(x).all(), f"span {i}: garbage was read"
        assert distance(x, y) < LOGITS, f"span {i}: {distance(x, y):.2g}"
    ours, theirs = tiles_of(metal), tiles_of(plain)
    np.testing.assert_array_equal(ours[0], theirs[0])  # the first layer seals the same keys and values
    assert (ours != theirs).mean() < CODES


def source_of(text: str) -> str:
    """Which .metal file a source comes from."""
    return text.split("custom_kernel_kvarn_", 1)[1].split("_", 1)[0]


@pytest.mark.usefixtures("as_on_metal")
def test_a_model_compiles_few_kernels(folder: Path, launches: list[str]) -> None:
    """The check has compiled every source that a step can need: no stream waits for a compiler."""
    metal = mlx_backend.load(folder, PRESET, LoadOptions(dtype="float32", device="cpu"))
    checked = set(launches)
    launches.clear()
    ready(metal)
    fed = Fed(metal, prompt(4 * G))
    for count in (70, 1, 2, 3, 5, 8, 9, 30, 1):
        run(metal, fed.span(count))
    assert launches
    assert set(launches) <= checked


@pytest.mark.usefixtures("as_on_metal")
def test_a_wrong_kernel_is_found_at_load_and_the_plain_operations_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvarn.backends.mlx.kernels import source

    original = source.read
    monkeypatch.setattr(
        source, "read", lambda name: original(name).replace("position % TILE_TOKENS + 1 : 0", "TILE_TOKENS : 0")
    )
    metal = mlx_backend.load(folder, PRESET, LoadOptions(dtype="float32", device="cpu"))
    assert metal.route()["attend"].startswith("plain MLX operations on the cpu: the Metal kernels of kvarn_k4v2_g64")
    (record,) = caplog.records
    assert "failed their check" in record.getMessage()
