"""The seal kernel against the oracle, kvarn.reference.seal: bytes, flags and status words, with no tolerance."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvarn import reference
from kvarn.backends.triton.kernels import seal as kernel
from kvarn.backends.triton.kernels.seal import seal, seal_into
from kvarn.errors import FormatError, SealError
from kvarn.format import HEAD_DIMS, TILE_TOKENS, Preset, SealStatus, TileFormat

ROOT = Path(__file__).resolve().parents[4]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "format1.json").read_text())["vectors"]
WIDTHS = ((2, 3), (3, 2), (4, 6), (5, 8), (6, 5), (8, 4))


def _make_golden() -> ModuleType:
    """tools/make_golden.py, which makes the golden inputs; tools is not a package."""
    for name in ("golden_mutants", "make_golden"):
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


make_golden = _make_golden()


def make(d: int = 64, g: int = 64, key_bits: int = 4, value_bits: int = 2) -> TileFormat:
    return TileFormat(key_bits=key_bits, value_bits=value_bits, tile_tokens=g, head_dim=d)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def kernel_seal(keys: Tensor, values: Tensor, fmt: TileFormat) -> tuple[Tensor, Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the interpreter is NumPy, which warns of infinities and NaN
        return seal(keys, values, fmt)


def oracle(keys: Tensor, values: Tensor, fmt: TileFormat) -> tuple[Tensor, int, SealStatus]:
    """The oracle's bytes, flags and status of one tile; no bytes where it refuses."""
    try:
        tile, flags = reference.seal(*(np.ascontiguousarray(x.float().numpy()) for x in (keys, values)), fmt)
    except SealError as error:
        return torch.empty(0), 0, next(s for s in SealStatus if s.reason == error.reason)
    return torch.from_numpy(tile), flags, SealStatus.OK


def assert_tile(tile: Tensor, flags: Tensor, status: Tensor, keys: Tensor, values: Tensor, fmt: TileFormat) -> None:
    """One tile is what the oracle makes of keys and values `[G, D]`."""
    want, want_flags, want_status = oracle(keys, values, fmt)
    assert SealStatus(int(status)) == want_status
    if want_status == SealStatus.OK:
        wrong = [
            name
            for name, field in fmt.fields.items()
            for part in [slice(field.offset, field.offset + field.nbytes)]
            if not torch.equal(tile[part], want[part])
        ]
        assert not wrong, f"{wrong} of {fmt.name}, D={fmt.head_dim}"
        assert int(flags) == want_flags


def assert_sealed(keys: Tensor, values: Tensor, fmt: TileFormat) -> list[SealStatus]:
    """Tiles `[B, G, D]`, sealed in one launch, are the oracle's."""
    tiles, flags, status = kernel_seal(keys, values, fmt)
    assert tiles.dtype == flags.dtype == status.dtype == torch.uint8
    assert tiles.shape == (len(keys), fmt.tile_nbytes)
    assert flags.shape == status.shape == (len(keys),)
    for tile in zip(tiles, flags, status, keys, values, strict=True):
        assert_tile(*tile, fmt)
    return [SealStatus(int(word)) for word in status]


@pytest.fixture
def large_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and larger slices than on a device, for the sake of time; the other tests have those of a device."""
    monkeypatch.setattr(kernel, "SLICE_TOKENS", {64: 64, 128: 64, 256: 64, 512: 32})


@pytest.mark.parametrize("stored", GOLDEN, ids=lambda stored: stored["name"])
@pytest.mark.usefixtures("large_slices")
def test_golden_vectors(stored: dict[str, Any]) -> None:
    fmt = Preset.parse(stored["preset"]).with_head_dim(stored["head_dim"])
    keys, values = (
        torch.from_numpy(make_golden.Input(x["kind"], x["seed"], tuple(map(tuple, x["edits"]))).array(fmt))
        for x in (stored["keys"], stored["values"])
    )
    tile, flags, status = kernel_seal(keys, values, fmt)
    assert SealStatus(int(status)).name == stored["status"]
    if stored["status"] == "OK":
        assert hashlib.sha256(tile.numpy().tobytes()).hexdigest() == stored["tile"]
        assert int(flags) == stored["flags"]


@pytest.mark.parametrize(("key_bits", "value_bits"), WIDTHS)
def test_every_width(key_bits: int, value_bits: int) -> None:
    keys, values = normal(key_bits, 2, 2, 64, 64)
    keys[1, :, 3] += 50  # a large bias keeps the plain candidate
    assert_sealed(keys, values, make(64, 64, key_bits, value_bits))


@pytest.mark.parametrize("g", TILE_TOKENS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_shape(d: int, g: int) -> None:
    """Two-bit keys and three-bit values, in the slices of a device: four of 64 x 64 to sixteen of 128 x 512."""
    keys, values = normal(d + g, 2, 1, g, d)
    if g == 64:
        keys[0, :, d // 3] += 80
    assert_sealed(keys, values, make(d, g, 2, 3))


@pytest.mark.usefixtures("large_slices")
def test_awkward_tiles_in_one_launch() -> None:
    keys, values = normal(1, 2, 14, 64, 64)
    keys[0], values[0] = 3.25, -0.7
    keys[1], values[1] = 0, 0
    keys[2, :, 5], values[2, 7] = 0, 0
    keys[3, 9], values[3, :, 11] = 0, 0
    keys[4], values[4] = keys[4] * 2.0**-12, values[4] * 2.0**-12
    keys[5], values[5] = keys[5] * 2.0**12, values[5] * 2.0**12
    keys[6], values[6] = keys[6] * 2.0**-60, values[6] * 2.0**-60
    keys[7, 17] *= 1000
    values[7, :, 17] *= 1000
    keys[8] *= 1e6
    values[9] *= 1e6
    keys[10, 1, 2] = torch.nan
    values[11, 3, 4] = torch.inf
    keys[12, -1, -1] = -torch.inf
    keys[13, ::2], values[13, ::3] = -0.0, -0.0
    status = assert_sealed(keys, values, make())
    assert set(status) == set(SealStatus)
    assert [status[i] for i in (8, 9, 10, 11, 12)] == [2, 3, 1, 1, 1]


def test_a_tile_in_a_batch_has_the_bytes_that_it_has_alone() -> None:
    fmt = make(64, 64, 2, 2)
    keys, values = normal(2, 2, 3, 64, 64)
    keys[1:], values[1:] = keys[1:] * 40, values[1:] * 40
    batch = kernel_seal(keys, values, fmt)
    for together, alone in zip(batch, kernel_seal(keys[0], values[0], fmt), strict=True):
        assert torch.equal(together[0], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_read_exactly(dtype: torch.dtype) -> None:
    keys, values = normal(3, 2, 1, 64, 64).to(dtype)
    assert_sealed(keys, values, make())


def test_leading_axes_and_strides() -> None:
    fmt = make()
    keys, values = normal(4, 2, 1, 2, 64, 64)
    want = kernel_seal(keys, values, fmt)
    assert_tile(want[0][0, 1], want[1][0, 1], want[2][0, 1], keys[0, 1], values[0, 1], fmt)
    rows_apart = torch.full((1, 2, 64, 2, 64), torch.nan)
    rows_apart[..., 0, :] = keys
    strided = kernel_seal(rows_apart[..., 0, :], values.mT.contiguous().mT, fmt)
    more = kernel_seal(keys.reshape(2, 1, 1, 1, 64, 64), values.reshape(2, 1, 1, 1, 64, 64), fmt)
    for x, y, z in zip(want, strided, more, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x.flatten(), z.flatten())
    assert [x.shape[0] for x in kernel_seal(keys[0, :0], values[0, :0], fmt)] == [0, 0, 0]


def test_more_tiles_than_scratch_memory_holds_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SCRATCH_BYTES", 2 * 4 * 64 * 80)  # two tiles of 64 x 64 with their sums, not three
    keys, values = normal(8, 2, 3, 64, 64)
    assert_sealed(keys, values, make())


def test_into_the_pool_writes_its_tiles_and_nothing_else() -> None:
    """Two layers, two tiles, two heads out of the slots, one with a NaN, into blocks at the pool's end and inside."""
    fmt, layers, heads, blocks = make(), 2, 2, 5
    slots = normal(5, 3, layers, 2, heads, 64, 64).bfloat16()
    slots[1, 0, 0, 1, 3, 3] = torch.nan
    taken = slots[[2, 1]].transpose(0, 1)  # [L, T, 2, Hk, G, D]
    pool = torch.full((layers, blocks, heads, fmt.tile_nbytes), 0xA5, dtype=torch.uint8)
    flags = torch.full((layers, blocks, heads), 0xA5, dtype=torch.uint8)
    status = torch.full((layers, 2, heads), 0xA5, dtype=torch.uint8)
    into = [4, 1]
    arguments = (taken[:, :, 0], taken[:, :, 1], pool, flags, status, torch.tensor(into, dtype=torch.int32), fmt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seal_into(*arguments)
    for layer, t, head in np.ndindex(layers, 2, heads):
        at = (layer, into[t], head)
        assert_tile(pool[at], flags[at], status[layer, t, head], *taken[layer, t, :, head], fmt)
    assert int(status[0, 1, 1]) == SealStatus.NON_FINITE
    others = [0, 2, 3]
    assert (pool[:, others] == 0xA5).all()
    assert (flags[:, others] == 0xA5).all()


def test_one_layer_may_come_without_its_axis() -> None:
    fmt = make()
    keys, values = normal(6, 2, 1, 1, 64, 64)
    pool, flags = torch.zeros((3, 1, fmt.tile_nbytes), dtype=torch.uint8), torch.zeros((3, 1), dtype=torch.uint8)
    status = torch.full((1, 1), 9, dtype=torch.uint8)
    seal_into(keys, values, pool, flags, status, torch.tensor([2], dtype=torch.int32), fmt)
    assert_tile(pool[2, 0], flags[2, 0], status[0, 0], keys[0, 0], values[0, 0], fmt)


def test_wrong_shapes_and_dtypes_are_named() -> None:
    fmt = make()
    keys = normal(7, 1, 1, 64, 64)
    with pytest.raises(FormatError, match=r"keys are torch.float32 \[1, 1, 64, 32\]"):
        seal(keys[..., :32], keys, fmt)
    with pytest.raises(FormatError, match=r"values are torch\.float64"):
        seal(keys, keys.double(), fmt)
    with pytest.raises(FormatError, match="give as many of both"):
        seal(keys, keys[0], fmt)
    pool, flags = torch.zeros((3, 1, fmt.tile_nbytes), dtype=torch.uint8), torch.zeros((3, 1), dtype=torch.uint8)
    status, blocks = torch.zeros((1, 1), dtype=torch.uint8), torch.tensor([2])
    with pytest.raises(FormatError, match=r"blocks are torch\.int64"):
        seal_into(keys, keys, pool, flags, status, blocks, fmt)
    with pytest.raises(FormatError, match="tiles are"):
        seal_into(keys, keys, pool[..., :-1], flags, status, blocks.int(), fmt)
    with pytest.raises(FormatError, match="whose last axis is contiguous"):
        seal_into(keys, keys, torch.cat([pool, pool], dim=-1)[..., ::2], flags, status, blocks.int(), fmt)


def test_real_keys_and_values(demo_dir: Path) -> None:
    """One layer of the demo model: 64 tokens of text after the first, three kv heads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (ROOT / "README.md").read_text()
    tokens = AutoTokenizer.from_pretrained(demo_dir)(text, return_tensors="pt").input_ids[:, :128]
    model = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.bfloat16)
    model.model.layers = model.model.layers[:6]
    with torch.no_grad():
        cache = model.model(tokens, use_cache=True).past_key_values
    keys, values = (x[0, :, 64:] for x in (cache.layers[5].keys, cache.layers[5].values))
    assert set(assert_sealed(keys, values, make())) == {SealStatus.OK}


def test_the_plain_operations_do_not_import_triton() -> None:
    """Nor does anything else of ours: transformers brings torch._dynamo, which imports it if it can."""
    for file in sorted((ROOT / "backends" / "triton").glob("*.py")):
        found = re.search(
            r"^(import|from) triton\b|^from kvarn\.backends\.triton\.kernels", file.read_text(), re.MULTILINE
        )
        assert found is None, f"{file.name}: {found}"
    code = "import sys, kvarn.backends.triton.ops; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
