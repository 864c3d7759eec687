"""The real model of the README on MLX and on torch: the same block names, the same greedy text."""

from pathlib import Path

import pytest

from kvarn.backend import Backend, LoadOptions
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.triton import backend as torch_backend
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
