"""What is predicted is what is taken, and what does not fit is said."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvarn.errors import UsageError
from kvarn.serve.cli import main
from kvarn.serve.estimate import parse_bytes


def estimate(demo_dir: Path, *args: object) -> dict[str, object]:
    result = CliRunner().invoke(main, ["estimate", str(demo_dir), "--json", *map(str, args)])
    assert result.exit_code == 0, result.stderr
    report: dict[str, object] = json.loads(result.stdout)
    return report


def test_the_prediction_is_what_a_run_takes(demo_dir: Path) -> None:
    predicted = estimate(demo_dir, "--dtype", "float32", "-c", 1000)
    args = ["run", str(demo_dir), "hi", "-n", "1", "--json", "--dtype", "float32", "-c", "1000"]
    for cache in predicted["caches"]:  # type: ignore[attr-defined]
        result = CliRunner().invoke(main, [*args, "--kv-cache-dtype", cache["kv_cache_dtype"]])
        got = json.loads(result.stdout)
        assert got["memory"]["weight_bytes"] == pytest.approx(predicted["weight_bytes"], rel=0.02)
        assert f"KV {got['kv']['bytes_allocated'] / 2**20:.1f} MiB for 1000 tokens" in result.stderr


def test_less_memory_means_a_shorter_context_and_names_the_limit(demo_dir: Path) -> None:
    sealed, exact = estimate(demo_dir, "--memory", "300MiB")["caches"]  # type: ignore[misc]
    assert sealed["limit"] == exact["limit"] == "memory"
    assert sealed["context"] > 3 * exact["context"]
    assert estimate(demo_dir, "--memory", "8G")["caches"][0]["limit"] == "the model's context"  # type: ignore[index]


def test_what_does_not_fit_says_why(demo_dir: Path) -> None:
    caches = estimate(demo_dir, "--memory", "300M", "-c", 8192)["caches"]
    assert all(not cache["fits"] and "--ctx-size" in cache["reason"] for cache in caches)  # type: ignore[attr-defined]
    result = CliRunner().invoke(main, ["estimate", str(demo_dir), "--memory", "100M"])
    assert result.exit_code == 0
    assert "does not fit" in result.stdout


def test_a_longer_rope_means_a_longer_context(demo_dir: Path) -> None:
    plain, scaled = estimate(demo_dir), estimate(demo_dir, "--rope-scaling", "yarn:4")
    for one, four in zip(plain["caches"], scaled["caches"], strict=True):  # type: ignore[call-overload]
        assert four["model_context"] == 4 * one["model_context"]
        assert four["bytes_per_token"] == one["bytes_per_token"]
    result = CliRunner().invoke(main, ["estimate", str(demo_dir), "--rope-scaling", "yarn"])
    assert result.exit_code == 2
    assert "yarn:FACTOR" in result.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1000", 1000), ("24GiB", 24 << 30), ("1.5 G", 3 << 29), ("512m", 512 << 20), ("2TB", 2 << 40)]
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "lots", "-1", "1x", "G"])
def test_a_bad_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="like 24GiB"):
        parse_bytes(text)
