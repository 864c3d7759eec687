"""Every kernel compiles for real targets, without spills and within their shared memory: the quick part of
tools/compile_kernels.py, in a process that does not interpret."""

import os
import subprocess
import sys
from pathlib import Path

from kvarn.backends.triton.kernels.compile_case import SHARED_LIMITS

TOOL = Path(__file__).resolve().parents[4] / "tools" / "compile_kernels.py"


def test_the_default_preset_compiles_for_two_targets_without_a_spill() -> None:
    command = [sys.executable, str(TOOL), "--preset", "kvarn_k4v2_g128", "--head-dim", "128", "--arch", "86,90"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line for line in run.stdout.splitlines() if " sm_" in line]
    assert {row.split()[0] for row in rows} >= {"seal"}
    assert {word for row in rows for word in row.split() if word.startswith("sm_")} == {"sm_86", "sm_90"}


def test_the_limits_are_those_of_the_targets() -> None:
    assert SHARED_LIMITS[86] == SHARED_LIMITS[120] == 99
    assert SHARED_LIMITS[90] == 227
