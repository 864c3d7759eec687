"""tools/cuda_on_paper.py: loops as in the listing, bytes as of the arrays, and the docs hold its output."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import torch

from kvarn.format import Preset

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "cuda_on_paper.py"
FMT = Preset.parse("kvarn_k4v2_g128").with_head_dim(128)
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_4:
        /*0010*/                   FADD R0, R0, R1 ;
.L_x_2:
        /*0020*/                   MUFU.RCP R2, R3 ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
        /*0040*/                   MOV R4, 0x80 ;
        /*0050*/                   CALL.REL.NOINC `($__internal_0_$__slowpath) ;
.L_x_1:
        /*0060*/               @P0 BRA `(.L_x_2) ;
        /*0070*/               @P0 BRA `(.L_x_3) ;
        /*0080*/                   FADD R0, R0, R2 ;
.L_x_3:
        /*0090*/               @P2 BRA `(.L_x_4) ;
        /*00a0*/                   EXIT ;
.L_x_5:
        /*00b0*/                   BRA `(.L_x_5);
"""


@pytest.fixture(scope="module")
def paper() -> object:
    # The tool turns the interpreter off for its own process; the kernels' tests want it as it is.
    before = os.environ.get("TRITON_INTERPRET")
    sys.path.append(str(ROOT / "tools"))
    module = importlib.import_module("cuda_on_paper")
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before
    return module


def test_loops_are_nested_as_they_jump_and_slow_paths_do_not_count(paper) -> None:  # type: ignore[no-untyped-def]
    whole = paper.parse(LISTING)
    assert (whole.first, whole.last) == (0, 9)  # twelve instructions without the two of the slow path
    (outer,) = whole.inner
    (inner,) = outer.inner
    assert (outer.first, outer.last, inner.first, inner.last) == (1, 7, 2, 4)
    assert (inner.own, outer.own, whole.own) == (3, 4, 3)


def code(paper, loops, **constants):  # type: ignore[no-untyped-def]
    return paper.Code("made up", loops, 2, constants)


def test_a_decode_step_counts_its_tiles_its_pages_and_what_every_program_begins_with(paper) -> None:  # type: ignore[no-untyped-def]
    loop = paper.Loop
    loops = loop(0, 99, (loop(10, 19, ()), loop(30, 69, (loop(40, 59, ()),))))
    counter = paper.Counter(paper.LLAMA, FMT, {"decode attend": code(paper, loops, EXACT_N=32, N=64)})
    tokens = 5 * 128 + 1  # four sealed tiles, in one split
    cost = counter.decode(tokens)
    assert cost.instructions == 8 * 2 * (50 * (1 + 2) + 10 * 8 + (20 + 20 * 2) * 4)
    tiles = torch.empty((4, 8, FMT.tile_nbytes + 1), dtype=torch.uint8)
    exact = torch.empty((2, 128 + 1, 8, 128), dtype=torch.float16)
    query, folded = torch.empty((32, 128), dtype=torch.float16), torch.empty((32, 2, 128))
    peaks, stats, parts = torch.empty(32), torch.empty((32, 3, 2)), torch.empty((32, 3, 128))
    scratch = sum(x.nbytes for x in (folded, peaks, stats, parts))
    assert cost.read == sum(x.nbytes for x in (tiles, exact, query)) + scratch
    assert cost.written == scratch + torch.empty((32, 128)).nbytes


def test_other_loops_than_expected_are_refused(paper) -> None:  # type: ignore[no-untyped-def]
    codes = {"decode attend": code(paper, paper.Loop(0, 9, ()), EXACT_N=32, N=64)}
    with pytest.raises(paper.UnknownCode, match="0 loops where 2 were expected"):
        paper.Counter(paper.LLAMA, FMT, codes).decode(1000)


def test_the_largest_limit_binds(paper) -> None:  # type: ignore[no-untyped-def]
    device = paper.Device("one", 90, 90, gb_per_s=100, multiprocessors=10, ghz=1, tensor_tflops=1)
    times = device.microseconds(paper.Cost("a", 60e3, 30e3, 40e3, 3e6))
    assert times == pytest.approx((1, 1, 3))


def test_the_documentation_holds_what_the_command_prints() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    version = re.search(r"Triton ([\d.]+);", done.stdout)
    assert version is not None
    if f"Triton {version[1]}." not in text:
        pytest.skip(f"docs/kernels.md counts the code of another Triton than {version[1]}, which is installed")
    tables = [part for part in done.stdout.split("\n\n") if part.startswith("|")]
    assert len(tables) == 4
    for table in tables[1:]:  # the first is that of Metal's part
        assert table.strip() in text, f"docs/kernels.md does not hold this table any more:\n{table}"
