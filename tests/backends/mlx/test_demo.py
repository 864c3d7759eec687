"""The real model of the README on MLX and on torch: the same tiles, the same greedy text."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from small_models import Fed, run

from kvarn import reference
from kvarn.backend import Backend, LoadOptions
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx import ops as mlx_ops
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton import ops as torch_ops
from kvarn.backends.triton.backend import TorchBackend
from kvarn.engine import Engine, EngineConfig
from kvarn.format import Preset
from kvarn.keys import layer_names
from kvarn.request import RequestParams
from kvarn.serve.tokenizer import Tokenizer

OPTIONS = LoadOptions(dtype="float32", device="cpu")
G64 = Preset(tile_tokens=64)
TEXT = """The Hadamard transform of a vector is its product with a matrix of ones and minus ones with orthogonal rows.
It spreads one large entry over all entries, and it is its own inverse up to a factor. A cache of keys and values that
is rotated in this way can be held in few bits, since no channel is much larger than the others. What is left are the
tokens: some of them are larger than others, so every token gets a scale of its own. The scales of rows and columns are
found by turns: divide each row by its deviation, then each column by its own, a few times over, until neither moves.
Only then are the numbers rounded, each row between its least and its greatest entry. In short, """


@pytest.fixture(scope="module")
def prompt(demo_dir: Path) -> tuple[int, ...]:
    return tuple(Tokenizer(demo_dir).encode(TEXT))


@pytest.fixture(scope="module")
def on_torch(demo_dir: Path) -> TorchBackend:
    return torch_backend.load(demo_dir, G64, OPTIONS)


Seal = Callable[[Any, Any], tuple[Any, Any]]


def test_keys_and_values_of_a_real_model_seal_to_one_hash(on_torch: TorchBackend, prompt: tuple[int, ...]) -> None:
    """Layers 0, 14 and 29, two tiles of every kv head each, all presets of two and four bits."""
    assert len(prompt) >= 131
    exact = on_torch.share(None)
    exact.allocate(0, 2)
    run(exact, Fed(exact, prompt[:128]).span(128))
    pages = np.stack([exact.pool.slot(layer, 0).numpy() for layer in (0, 14, 29)], axis=1)  # [2, layers, Hk, 128, D]
    keys, values = pages.reshape(2, -1, 64, 64)
    for key_bits, value_bits in ((4, 2), (4, 4), (2, 2)):
        fmt = Preset(key_bits=key_bits, value_bits=value_bits, tile_tokens=64).with_head_dim(64)
        oracle = [reference.seal(k, v, fmt) for k, v in zip(keys, values, strict=True)]
        sealed = {
            "numpy": (np.stack([t for t, _ in oracle]), np.array([f for _, f in oracle], np.uint8)),
            "torch": [x.numpy() for x in torch_ops.seal(torch.from_numpy(keys), torch.from_numpy(values), fmt)[:2]],
            "mlx": mlx_ops.seal(mx.array(keys), mx.array(values), fmt)[:2],
        }
        hashes = {
            name: hashlib.sha256(bytes(memoryview(tiles)) + bytes(memoryview(flags))).hexdigest()
            for name, (tiles, flags) in sealed.items()
        }
        assert len(set(hashes.values())) == 1, hashes


def greedy(backend: Backend, prompt: tuple[int, ...], count: int) -> list[int]:
    engine = Engine(backend, EngineConfig(context=len(prompt) + count, prefill_chunk=100))
    events = engine.stream(RequestParams(prompt=prompt, max_tokens=count))
    return [event.token for event in events if event.token is not None]


def test_blocks_are_named_alike_on_both_backends(demo_dir: Path, on_torch: TorchBackend) -> None:
    """What a backend adds to a fingerprint: the layer plan, the dtype and the RoPE in use."""
    infos = [x.info for x in (on_torch, mlx_backend.load(demo_dir, G64, OPTIONS))]
    assert len({layer_names(info.plan) for info in infos}) == len({info.dtype for info in infos}) == 1
    assert (
        infos[0].rope == infos[1].rope == {"rope_type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 1.0}
    )


def test_greedy_text_is_that_of_torch(demo_dir: Path, on_torch: TorchBackend, prompt: tuple[int, ...]) -> None:
    """20 tokens in float32 that read sealed tiles; MLX's own BLAS on Linux is slow, so the prompt is short."""
    prompt = prompt[:131]
    want = greedy(on_torch, prompt, 20)
    assert len(want) == 20
    assert greedy(mlx_backend.load(demo_dir, G64, OPTIONS), prompt, 20) == want
