"""tools/metal_on_paper.py: its bytes are those of the arrays of a launch, and the docs hold its output."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("mlx") is None:
    pytest.skip("MLX is not installed", allow_module_level=True)

import mlx.core as mx

from kvarn.backends.mlx.kernels import kernels
from kvarn.format import Preset
from kvarn.visibility import num_sealed

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
paper = importlib.import_module("metal_on_paper")

FMT = Preset.parse("kvarn_k4v2_g128").with_head_dim(128)


class Launched(Exception):
    """The arguments of a launch, in place of the launch."""


def launch(monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, queries: int) -> dict[str, Any]:
    """What kernels.attend hands to the kernel `name` at the end of a sequence of the model on paper."""

    def refuse(**arguments: Any) -> Any:
        raise Launched(arguments)

    monkeypatch.setattr(kernels, name, lambda *args: refuse)
    monkeypatch.setattr(kernels, "rotate", lambda x: x.astype(mx.float32))
    model, g, d = paper.LLAMA, FMT.tile_tokens, FMT.head_dim
    sealed, start = num_sealed(tokens - 1, g), tokens - queries
    tiles = mx.zeros((sealed, model.kv_heads, FMT.tile_nbytes), mx.uint8)
    sink, window = (mx.zeros((2, model.kv_heads, count, d), mx.float16) for count in (g, tokens - start // g * g))
    query = mx.zeros((queries, model.heads, d), mx.float16)
    blocks, flags = mx.arange(sealed, dtype=mx.int32), mx.zeros(tiles.shape[:2], mx.uint8)
    with pytest.raises(Launched) as caught:
        kernels.attend(query, sink, window, tiles, flags, blocks, start, 1.0, FMT)
    arguments: dict[str, Any] = caught.value.args[0]
    return arguments


def output_bytes(arguments: dict[str, Any]) -> int:
    return int(sum(np.prod(shape) * 4 for shape in arguments["output_shapes"]))


@pytest.mark.parametrize(("tokens", "queries"), [(16384, 1), (65536, 1), (16384, 8), (1000, 3)])
def test_decode_reads_and_writes_what_the_call_site_hands_over(
    tokens: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = paper.attend(paper.LLAMA, FMT, tokens, queries)
    arguments = launch(monkeypatch, "_attend_kernel", tokens, queries)
    assert cost.written == output_bytes(arguments)
    query, rotated, sink, window, tiles, flags = arguments["inputs"][:6]
    chunks = arguments["grid"][2]
    shared = sum(x.nbytes for x in (sink, window, tiles, flags))
    assert cost.read == chunks * shared + query.nbytes + rotated.nbytes


def test_prefill_writes_what_the_call_site_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = paper.prefill(paper.LLAMA, FMT, 16384, 512)
    assert cost.written == output_bytes(launch(monkeypatch, "_prefill_kernel", 16384, 512))


def test_a_device_is_bound_by_the_larger_of_its_two_limits() -> None:
    device = paper.Device("one", gb_per_s=100, cores=10, ghz=1)
    memory, arithmetic = device.seconds(80e9, 512e9)
    assert (memory, arithmetic) == pytest.approx((1, 1))
    weights = paper.LLAMA.weight_bytes / 80e9
    layer = (paper.Cost("a", 40e9, 40e9, 1), paper.Cost("b", 1, 1, 1024e9))
    assert paper.step_seconds(paper.LLAMA, device, layer) == pytest.approx(weights + 32 * (1 + 2))


def test_the_documentation_holds_what_the_command_prints() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "metal_on_paper.py")], capture_output=True, text=True, check=True
    )
    tables = [part for part in done.stdout.split("\n\n") if part.startswith("|")]
    assert len(tables) == 4
    text = (ROOT / "docs" / "kernels.md").read_text()
    for table in tables:
        assert table.strip() in text, f"docs/kernels.md does not hold this table any more:\n{table}"
