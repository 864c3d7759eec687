"""`kvarn doctor` says what is here, and leaves with 1 when anything is wrong."""

import importlib.util
import json

import pytest
from click.testing import CliRunner

from kvarn.serve.cli import main


def test_every_operation_of_every_backend_here_passes() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.stdout
    assert "FAIL" not in result.stdout
    for name, framework in (("triton", "torch"), ("mlx", "mlx")):
        if importlib.util.find_spec(framework):
            assert f"{name}: " in result.stdout
        else:
            assert f"{name}: skipped, {framework} is not installed" in result.stdout


def test_json_holds_versions_and_verdicts() -> None:
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert report["packages"]["numpy"]
    assert all(check["passed"] for backend in report["backends"].values() if backend for check in backend["checks"])


def test_a_wrong_operation_is_a_fail_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from kvarn.backends.triton import ops

    monkeypatch.setattr(ops, "rotate", lambda x: torch.roll(x, 1, -1))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "FAIL unseal" in result.stdout
    assert "differ from the oracle on this machine" in result.stderr
