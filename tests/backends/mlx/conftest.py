"""What the MLX tests share. Where MLX is not installed they are skipped, with the name of what is missing."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NEEDED = {"mlx.core": "mlx (on Linux also mlx-cpu)", "mlx_lm": "mlx-lm", "torch": "torch"}


def _missing() -> str:
    for name, package in NEEDED.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported ({error}); pip install {package}"
    return ""


MISSING = _missing()


class SkippedModule(pytest.Module):
    """A test file that is not even imported."""

    def collect(self) -> Any:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    """Every file here imports MLX at its top."""
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(autouse=True, scope="module")
def one_cpu() -> Iterator[None]:
    """MLX's CPU device, where bytes are promised, and one thread for torch: the models here are tiny."""
    import mlx.core as mx
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mx.stream(mx.Device(mx.cpu)):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama with three query heads per kv head and two kv heads, for tests that only read it."""
    from small_models import build

    folder = tmp_path_factory.mktemp("llama")
    build(folder, "llama", hidden_size=192, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=False)
    return folder
