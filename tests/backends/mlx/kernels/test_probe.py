"""The probe of contraction, and `kvarn doctor`'s checks of the kernels, on the host runner."""

import mlx.core as mx
import numpy as np
import pytest
from metal_host.compiler import can_contract

from kvarn import selfcheck
from kvarn.backends.mlx import check, ops
from kvarn.backends.mlx.kernels import kernels, probe
from kvarn.selfcheck import run_checks


@pytest.mark.skipif(not can_contract(), reason="this CPU has no fused multiply-add")
def test_the_probe_sees_contraction_and_that_the_pragma_forbids_it() -> None:
    assert probe.contraction() == "contraction: products are fused without the pragma, the pragma forbids it"


def test_the_probe_says_when_the_pragma_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "fuses", lambda header: True)
    assert "does NOT forbid it" in probe.contraction()


def test_doctor_names_what_it_skips_here() -> None:
    assert not kernels.available()
    text = check.describe()
    for name in ("rotate", "seal", "attend", "prefill", "contraction"):
        assert name in text.split("skipped:")[1]


@pytest.fixture
def as_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: True)
    small = [fmt for fmt in selfcheck.FORMATS if fmt.tile_tokens == fmt.head_dim == 64]
    monkeypatch.setattr(selfcheck, "FORMATS", small)


@pytest.mark.usefixtures("as_on_metal")
def test_doctor_checks_plain_operations_and_kernels_on_metal() -> None:
    checks = list(run_checks(check.Operations()))
    assert [c.name.split()[0] for c in checks] == ["seal", "unseal", "attend"]
    assert all(c.passed for c in checks), checks


@pytest.mark.usefixtures("as_on_metal")
def test_doctor_fails_when_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_seal(*args: object) -> tuple[mx.array, ...]:
        tiles, flags, status = ops.seal(*args)  # type: ignore[arg-type]
        tiles = np.array(tiles)
        tiles[0, 5] ^= 1
        return mx.array(tiles), flags, status

    monkeypatch.setattr(kernels, "seal", wrong_seal)
    monkeypatch.setattr(kernels, "attend", lambda *args: ops.attend(*args) * 1.001)
    failed = {c.name.split()[0]: c.detail for c in run_checks(check.Operations()) if not c.passed}
    assert failed["seal"] == "bytes of the Metal kernel and of plain MLX differ"
    assert failed["attend"].startswith("the Metal kernel and plain MLX differ by")
