"""tools/bench_cuda.py without a GPU: it says that there is none, and its functions run in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).resolve().parents[4] / "tools" / "bench_cuda.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(TOOL), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    got = run()
    assert got.returncode == 1
    assert got.stdout == ""
    assert "sees no CUDA device" in got.stderr


def test_every_part_runs_in_the_interpreter() -> None:
    got = run("--interpret")
    assert got.returncode == 0, got.stdout + got.stderr
    for part in ("seal ", "prefill ", "decode ", "verify ", "graph "):
        assert f"\n{part}" in got.stdout or f" ok    {part}" in got.stdout
    assert "equal to the bit" in got.stdout
    assert got.stdout.endswith("all right\n")
    assert "WRONG" not in got.stdout
