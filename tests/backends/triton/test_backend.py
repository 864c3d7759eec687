"""The torch backend: the contract of every backend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_contract import BAD, SIGNAL, BackendContract, Framework
from small_models import Logits, build

from kvarn.backend import LoadOptions
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton.backend import TorchBackend
from kvarn.backends.triton.sampling import sample
from kvarn.format import Preset
from kvarn.step import SamplingRow
from kvarn.tile import Bytes

SHAPE: dict[str, Any] = {
    **{"vocab_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 2048, "eos_token_id": [2, 3]},
}
MIXED: dict[str, Any] = {
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build(folder, "llama", **SHAPE)
    return folder


@pytest.fixture(scope="session")
def mixed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sliding layers around a full one."""
    folder = tmp_path_factory.mktemp("mixed")
    build(folder, "gemma3_text", **SHAPE, **MIXED)
    return folder


class TorchFramework(Framework):
    capacity_error = "could not be allocated"
    routes = frozenset({"seal", "unseal", "decode", "attend", "attend_exact"})

    def load(self, folder: Path, preset: Preset | None, options: LoadOptions) -> TorchBackend:
        return torch_backend.load(folder, preset, options)

    def poison(self, backend: TorchBackend) -> None:
        pool = backend.pool
        pages = [*pool.exact_slots.values(), *pool.exact_blocks.values()]
        if pool.row:
            pool.tiles.fill_(0xFF)
            pool.flags.fill_(0xFF)
            pages.append(pool.slots)
        for page in pages:
            page.fill_(torch.nan)

    def sealed(self, backend: TorchBackend) -> tuple[Bytes, Bytes]:
        return backend.pool.tiles.numpy().copy(), backend.pool.flags.numpy().copy()

    def slot(self, backend: TorchBackend, layer: int, index: int) -> Logits:
        page: Logits = backend.pool.slot(layer, index).numpy()
        return page

    def exact_blocks(self, backend: TorchBackend, layer: int, count: int) -> Logits:
        pages: Logits = backend.pool.exact_blocks[layer][:count].numpy()
        return pages

    def pool_bytes(self, backend: TorchBackend) -> int:
        pool = backend.pool
        tensors = [*pool.exact_slots.values(), *pool.exact_blocks.values()]
        tensors += [pool.tiles, pool.flags, pool.slots] if pool.row else []
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def sample(self, logits: Logits, row: SamplingRow) -> Any:
        return sample(torch.from_numpy(logits), [row])[0]

    def sabotage(self, backend: TorchBackend, projection: str, row: int, weight: float) -> None:
        module = backend.model.module.model
        with torch.no_grad():
            module.embed_tokens.weight[:, SIGNAL] = 0
            module.embed_tokens.weight[BAD, SIGNAL] = 3
            module.layers[0].self_attn.o_proj.weight[SIGNAL] = 0
            module.layers[0].mlp.down_proj.weight[SIGNAL] = 0
            getattr(module.layers[1].self_attn, projection).weight[row, SIGNAL] = weight


TORCH = TorchFramework()


@pytest.fixture(scope="module")
def models(llama_dir: Path, mixed_dir: Path) -> dict[str, TorchBackend]:
    return TORCH.load_all(llama=llama_dir, mixed=mixed_dir)


class TestTorch(BackendContract):
    framework = TORCH

    def test_sizes_and_special_tokens_are_the_checkpoints(self, llama: TorchBackend) -> None:
        assert (llama.info.vocab_size, llama.info.eos_token_ids) == (128, (2, 3))
        module = llama.model.module
        assert llama.info.weight_bytes == sum(x.nbytes for x in (*module.parameters(), *module.buffers()))

    def test_a_sliding_layer_stands_on_either_side_of_a_sealed_one(self, models: dict[str, TorchBackend]) -> None:
        assert [layer.kind for layer in models["mixed"].info.plan.layers] == ["exact", "sealed", "exact"]
