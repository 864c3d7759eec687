"""Which operations run: the kernels where they can be had, else the plain ones, with one line that says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarn.backends.triton import dispatch as module
from kvarn.backends.triton import ops
from kvarn.backends.triton.cpu import kernels
from kvarn.backends.triton.cpu.build import importlib, instruction_set, processor_flags
from kvarn.backends.triton.dispatch import choose
from kvarn.errors import UsageError
from kvarn.format import Preset

FMT = Preset().with_head_dim(64)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No choice is remembered from or for other tests."""
    caches = (module._for_cpu, module._for_gpu, module._say, kernels.load)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_on_a_cpu_the_kernels_run() -> None:
    for fmt in (FMT, None):
        chosen = choose(fmt, "cpu")
        assert (chosen.seal, chosen.decode, chosen.attend) == (kernels.seal, kernels.decode, kernels.attend)
        assert chosen.why == f"C++ on the CPU ({instruction_set(processor_flags())})"


def test_elsewhere_the_plain_operations_run() -> None:
    for fmt, device in ((FMT, "xpu:0"), (None, "cuda:0")):
        chosen = choose(fmt, device)
        assert (chosen.seal, chosen.decode, chosen.attend) == (ops.seal, ops.decode, ops.attend)
        assert device in chosen.why


def test_the_triton_kernels_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVARN_TRITON", "off")
    chosen = choose(FMT, "cuda:0")
    assert not chosen.triton
    assert chosen.why == "plain torch operations on cuda:0: the Triton kernels are turned off (KVARN_TRITON=off)"
    assert not caplog.records


def test_an_unknown_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_TRITON", "on")
    with pytest.raises(UsageError, match="KVARN_TRITON=off"):
        choose(FMT, "cuda:0")


def test_without_triton_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for _ in range(2):
        assert choose(FMT, "cuda:0").why.endswith("triton is not installed; pip install triton")
    assert len(caplog.records) == 1


def test_without_a_compiler_one_line_says_so_and_the_plain_operations_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for fmt in (FMT, FMT, Preset(key_bits=8).with_head_dim(64), None):
        chosen = choose(fmt, "cpu")
        assert (chosen.seal, chosen.decode, chosen.attend) == (ops.seal, ops.decode, ops.attend)
        assert "no C++ compiler was found" in chosen.why
    assert [record.getMessage() for record in caplog.records] == [
        "kvarn: attention runs on plain torch operations, which is slow: no C++ compiler was found; "
        "install g++ or clang, or pip install ziglang"
    ]
