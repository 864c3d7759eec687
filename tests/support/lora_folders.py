"""Adapter folders written by hand, as peft and mlx-lm document them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Matrix = NDArray[np.float32]
Matrices = dict[str, tuple[Matrix, Matrix]]  # module -> A [rank, inputs], B [outputs, rank]

SCALE = 2.0  # of both kinds of folder


def matrices(shapes: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0) -> Matrices:
    """Random A and B for modules of [outputs, inputs], large enough to change every logit."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32),
            rng.normal(0, 0.2, (outputs, rank)).astype(np.float32),
        )
        for name, (outputs, inputs) in shapes.items()
    }


def write(folder: Path, config: Mapping[str, Any], file: str, tensors: Mapping[str, Matrix]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / file)
    return folder


def write_peft(folder: Path, given: Matrices, **config: Any) -> Path:
    """A folder of peft, with r of the first matrix and alpha = SCALE * r unless said otherwise."""
    rank = len(next(iter(given.values()))[0])
    usual = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere",
        "r": rank,
        "lora_alpha": SCALE * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": sorted({name.split(".")[-1] for name in given}),
    }
    tensors = {f"base_model.model.{name}.lora_A.weight": a for name, (a, _) in given.items()}
    tensors |= {f"base_model.model.{name}.lora_B.weight": b for name, (_, b) in given.items()}
    return write(folder, usual | config, "adapter_model.safetensors", tensors)


def write_mlx_lm(folder: Path, given: Matrices, num_layers: int, **config: Any) -> Path:
    """A folder of mlx-lm, whose matrices are the other way round."""
    rank = len(next(iter(given.values()))[0])
    usual = {
        "fine_tune_type": "lora",
        "num_layers": num_layers,
        "lora_parameters": {"rank": rank, "scale": SCALE, "dropout": 0.0},
    }
    tensors = {f"{name}.lora_a": a.T for name, (a, _) in given.items()}
    tensors |= {f"{name}.lora_b": b.T for name, (_, b) in given.items()}
    return write(folder, usual | config, "adapters.safetensors", tensors)
