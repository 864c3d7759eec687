"""One sha256 for every implementation of sealing: over the golden set, and over layers of a real model.

NumPy (the oracle), plain torch, C++ on the CPU, Triton in its interpreter, plain MLX, Metal on the host runner. C++ has
a library for every format, which takes seconds to build: it seals the tiles of CPP_FORMATS.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from golden_tiles import golden_batches
from operation_cases import Floats, oracle_seal
from small_models import Fed, run

from kvarn.backend import LoadOptions
from kvarn.backends.mlx import ops as mlx_ops
from kvarn.backends.mlx.kernels import kernels as metal_kernels
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton import ops as torch_ops
from kvarn.backends.triton.cpu import kernels as cpp_kernels
from kvarn.backends.triton.cpu.build import BuildError
from kvarn.format import Preset, SealStatus, TileFormat
from kvarn.serve.tokenizer import Tokenizer
from kvarn.tile import Bytes

ROOT = Path(__file__).resolve().parents[4]
LAYERS = (0, 14, 29)
REAL = ("kvarn_k4v2_g64", "kvarn_k2v2_g64")  # presets that seal them
CPP_FORMATS = {("kvarn_k4v2_g128", 128), ("kvarn_k4v2_g64", 64), ("kvarn_k2v2_g64", 64), ("kvarn_k8v8_g64", 128)}

Sealed = tuple[Bytes, Bytes, Bytes]
Batch = tuple[TileFormat, Floats, Floats]  # keys and values [T, G, D]


def real(folder: Path) -> list[Batch]:
    """Two tiles of every kv head of a few layers of the demo model, under two presets."""
    text = "Rotate, balance, then round: a tile of keys and values in few bits. " * 12
    prompt = tuple(Tokenizer(folder).encode(text))[:128]
    exact = torch_backend.load(folder, None, LoadOptions(dtype="float32", device="cpu"))
    exact.allocate(0, 2)
    run(exact, Fed(exact, prompt).span(128))
    pages = np.stack([exact.pool.slot(layer, 0).numpy() for layer in LAYERS], axis=1)  # [2, layers, Hk, 128, D]
    keys, values = pages.reshape(2, -1, 64, 64)
    return [(Preset.parse(name).with_head_dim(64), keys, values) for name in REAL]


def numpy_seal(keys: Floats, values: Floats, fmt: TileFormat) -> Sealed:
    tiles, flags, status = zip(*map(oracle_seal, keys, values, [fmt] * len(keys)), strict=True)
    return np.stack(tiles), np.array(flags, np.uint8), np.array(status, np.uint8)


def over_torch(seal: Callable[..., Any], keys: Floats, values: Floats, fmt: TileFormat) -> Sealed:
    tiles, flags, status = seal(torch.from_numpy(keys), torch.from_numpy(values), fmt)
    return tiles.numpy(), flags.numpy(), status.numpy()


def over_mlx(seal: Callable[..., Any], keys: Floats, values: Floats, fmt: TileFormat) -> Sealed:
    tiles, flags, status = seal(mx.array(keys), mx.array(values), fmt)
    return np.array(tiles), np.array(flags), np.array(status)


SEALS: dict[str, Callable[[Floats, Floats, TileFormat], Sealed]] = {
    "NumPy": numpy_seal,
    "torch": partial(over_torch, torch_ops.seal),
    "MLX": partial(over_mlx, mlx_ops.seal),
    "Metal": partial(over_mlx, metal_kernels.seal),
}


def digest(sealed: list[Sealed]) -> str:
    """One sha256 over status, flags and tile of every tile; a refused tile counts by its status alone."""
    whole = hashlib.sha256()
    for batch in sealed:
        for tile, flags, status in zip(*batch, strict=True):
            whole.update(bytes([status]))
            whole.update(bytes([flags]) + tile.tobytes() if status == SealStatus.OK else b"")
    return whole.hexdigest()


class Interpreted:
    """The Triton kernel at work in another process, beside what this one does meanwhile."""

    def __init__(self, batches: list[Batch], folder: Path) -> None:
        self.count, self.target = len(batches), folder / "sealed.npz"
        arrays: dict[str, Any] = {f"{i}.keys": keys for i, (_, keys, _) in enumerate(batches)}
        arrays |= {f"{i}.values": values for i, (_, _, values) in enumerate(batches)}
        arrays["formats"] = np.array([json.dumps([fmt.name, fmt.head_dim]) for fmt, _, _ in batches])
        np.savez(folder / "given.npz", **arrays)
        script = ROOT / "tests" / "support" / "interpreted_seal.py"
        self.process = subprocess.Popen([sys.executable, str(script), str(folder / "given.npz"), str(self.target)])

    def read(self) -> list[Sealed]:
        assert self.process.wait() == 0, "the interpreter failed, see above"
        made = np.load(self.target)
        return [(made[f"{i}.tiles"], made[f"{i}.flags"], made[f"{i}.status"]) for i in range(self.count)]


Everything = tuple[list[Batch], dict[str, list[Sealed]]]


@pytest.fixture(scope="module")
def everything(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Everything]:
    """The batches of the golden set and of the model, and what every implementation makes of each."""
    from metal_host.mlx_kernel import metal_kernel

    batches = [(fmt, *tiles) for fmt, tiles in golden_batches().items()] + real(demo_dir)
    has_triton = importlib.util.find_spec("triton") is not None
    interpreted = Interpreted(batches, tmp_path_factory.mktemp("interpreted")) if has_triton else None
    # One schedule here: three run in the other tests.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metal_kernels, "metal_kernel", partial(metal_kernel, schedules=("random",), races=False))
        metal_kernels._seal_kernel.cache_clear()
        metal_kernels._rotate_kernel.cache_clear()
        made = {name: [seal(keys, values, fmt) for fmt, keys, values in batches] for name, seal in SEALS.items()}
    metal_kernels._seal_kernel.cache_clear()
    metal_kernels._rotate_kernel.cache_clear()
    if interpreted is not None:
        made["Triton"] = interpreted.read()
    yield batches, made
    if interpreted is not None:
        interpreted.process.kill()


def hashes(everything: Everything, chosen: Callable[[int, TileFormat], bool]) -> dict[str, str]:
    """One digest per implementation over the chosen batches."""
    batches, made = everything
    indices = [i for i, (fmt, _, _) in enumerate(batches) if chosen(i, fmt)]
    assert indices
    return {name: digest([sealed[i] for i in indices]) for name, sealed in made.items()}


def need_triton(found: dict[str, str]) -> None:
    if "Triton" not in found:
        pytest.skip(f"triton is not installed; {', '.join(found)} agree")


def test_the_whole_golden_set_seals_to_one_hash(everything: Everything) -> None:
    last = len(everything[0]) - len(REAL)
    found = hashes(everything, lambda i, fmt: i < last)
    assert len(set(found.values())) == 1, found
    need_triton(found)


def test_layers_of_a_real_model_seal_to_one_hash(everything: Everything) -> None:
    last = len(everything[0]) - len(REAL)
    found = hashes(everything, lambda i, fmt: i >= last)
    assert len(set(found.values())) == 1, found
    need_triton(found)


def test_the_kernels_of_the_cpu_seal_to_that_hash_too(everything: Everything) -> None:
    """Both tile lengths, golden tiles and those of the real layers."""
    batches, made = everything

    def chosen(i: int, fmt: TileFormat) -> bool:
        return (fmt.name, fmt.head_dim) in CPP_FORMATS

    assert {(fmt.name, fmt.head_dim) for fmt, _, _ in batches} >= CPP_FORMATS
    seal = partial(over_torch, cpp_kernels.seal)
    try:
        for fmt, _, _ in batches:
            if chosen(0, fmt):
                cpp_kernels.prepare(fmt)
    except BuildError as error:
        pytest.skip(f"the C++ kernels cannot be built here: {error}")
    cpp = [seal(keys, values, fmt) if chosen(i, fmt) else None for i, (fmt, keys, values) in enumerate(batches)]
    found = hashes((batches, {**made, "C++": cpp}), chosen)  # type: ignore[dict-item]
    assert len(set(found.values())) == 1, found
    assert "C++" in found


def test_the_hash_sees_every_byte_flag_and_status_word(everything: Everything) -> None:
    batch = everything[1]["NumPy"][0]
    want = digest([batch])
    for which, at in ((0, (0, -1)), (1, 0), (2, 0)):
        changed = [x.copy() for x in batch]
        assert batch[2][0] == SealStatus.OK
        changed[which][at] ^= 1
        assert digest([(changed[0], changed[1], changed[2])]) != want
