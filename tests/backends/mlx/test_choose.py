"""Which operations a step runs: the kernels after their check, else the plain ones, with one line that says why."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvarn.backend import LoadOptions
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx import choose as module
from kvarn.backends.mlx import ops
from kvarn.backends.mlx.choose import choose
from kvarn.backends.mlx.kernels import kernels
from kvarn.errors import UsageError
from kvarn.format import Preset
from kvarn.model_plan import ModelPlan, plan_model

PRESET = Preset(tile_tokens=64)
CONFIG = {
    **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 192, "num_attention_heads": 3},
    **{"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024},
}
PLAN = plan_model(CONFIG, PRESET)
PLAIN = (ops.seal, ops.attend)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No verdict is remembered from or for other tests, and the user's own setting does not count."""
    monkeypatch.delenv(module.VARIABLE, raising=False)
    for cache in (module._fault, module._say):
        cache.cache_clear()
    yield
    for cache in (module._fault, module._say):
        cache.cache_clear()


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has the kernels; they compute as the plain operations do."""
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "seal", lambda *args: ops.seal(*args))
    monkeypatch.setattr(kernels, "attend", lambda *args: ops.attend(*args))


def test_without_metal_the_plain_operations_run() -> None:
    chosen = choose(PLAN, mx.float32)
    assert (chosen.seal, chosen.attend) == PLAIN
    assert chosen.why == "plain MLX operations on the cpu; the Metal kernels need a Mac's GPU"


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_kernels_that_pass_their_check_run(dtype: mx.Dtype, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kvarn.mlx"):
        chosen = choose(PLAN, dtype)
    assert (chosen.seal, chosen.attend) == (kernels.seal, kernels.attend)
    assert chosen.why.startswith("Metal kernels")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("kvarn.mlx", "DEBUG", f"kvarn: seal and attend: {chosen.why}")
    ]


@pytest.mark.usefixtures("on_metal")
def test_the_check_runs_once_for_what_a_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        module,
        "quick_check",
        lambda operations, fmt, heads, kv_heads: checked.append((fmt, heads, kv_heads, operations.dtype)),
    )
    other = plan_model(CONFIG, Preset(key_bits=8, tile_tokens=64))
    for plan, dtype in ((PLAN, mx.float16), (PLAN, mx.float16), (other, mx.float16), (PLAN, mx.bfloat16)):
        assert choose(plan, dtype).seal is kernels.seal
    formats = [x.tile_format for x in (PLAN, other, PLAN)]
    dtypes = (mx.float16, mx.float16, mx.bfloat16)
    assert checked == [(fmt, 6, 2, dtype) for fmt, dtype in zip(formats, dtypes, strict=True)]


def wrong_byte(*args: Any) -> Any:
    tiles, flags, status = ops.seal(*args)
    return tiles ^ 1, flags, status


def refused(*args: Any) -> Any:
    raise ValueError("Thread group size (512) is greater than the maximum.\nSecond line")


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("seal", wrong_byte, r"tile 0: \d+ of \d+ bytes differ from the oracle's"),
    ("attend", lambda *args: ops.attend(*args) * 1.001, "queries 196 to 197: relative error 1.0e-03, at most 1e-04"),
    ("attend", lambda *args: ops.attend(*args) * (1 + 1e-3 * (len(args[0]) == 4)), "queries 193 to 197: relative"),
    ("attend", lambda *args: ops.attend(*args) * (1 + 1e-3 * (len(args[0]) > 8)), "queries 185 to 197: relative"),
    ("seal", refused, r"ValueError: Thread group size \(512\) is greater than the maximum\.\)"),
]


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize(("name", "wrong", "detail"), WRONG)
def test_kernels_that_fail_their_check_do_not_run_and_one_line_says_so(
    name: str,
    wrong: Callable[..., Any],
    detail: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernels, name, wrong)
    for _ in range(2):
        chosen = choose(PLAN, mx.float32)
        assert (chosen.seal, chosen.attend) == PLAIN
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelname == "WARNING"
    assert "\n" not in text
    assert "the Metal kernels of kvarn_k4v2_g64 at head_dim 64 failed their check" in text
    assert re.search(detail, text), text
    assert chosen.why.split(": ", 1)[1] in text


@pytest.mark.usefixtures("on_metal")
def test_the_user_can_go_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "quick_check", lambda *args, **options: pytest.fail("nothing to check"))
    monkeypatch.setenv("KVARN_METAL", "off")
    chosen = choose(PLAN, mx.float32)
    assert (chosen.seal, chosen.attend) == PLAIN
    assert chosen.why.endswith("KVARN_METAL=off")
    assert not caplog.records


@pytest.mark.usefixtures("on_metal")
def test_on_is_the_default_and_anything_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_METAL", "on")
    assert choose(PLAN, mx.float32).seal is kernels.seal
    monkeypatch.setenv("KVARN_METAL", "0")
    with pytest.raises(UsageError, match=r"KVARN_METAL is '0'; use off .* or on, or unset it"):
        choose(PLAN, mx.float32)


@pytest.mark.usefixtures("on_metal")
def test_a_cache_without_tiles_needs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "quick_check", lambda *args, **options: pytest.fail("nothing to check"))
    exact: ModelPlan = plan_model(CONFIG, None)
    assert choose(exact, mx.float32).why.endswith("no layer holds tiles")


def test_a_backend_names_its_route(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = mlx_backend.load(llama_dir, PRESET, LoadOptions(dtype="float32", device="cpu"))
    assert backend.route()["seal"] == backend.route()["attend"] == choose(PLAN, mx.float32).why
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setenv("KVARN_METAL", "off")
    off = backend.share(PRESET)
    assert off.route()["seal"] == off.route()["attend"] == "plain MLX operations on the cpu: KVARN_METAL=off"
    assert off.route()["unseal"] == "plain MLX operations on the cpu"
