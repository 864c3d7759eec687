"""A LoRA adapter on a transformers model: merged into the weights once, so that a step costs what it did before."""

from collections import Counter
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvarn.adapter import Adapter, place
from kvarn.errors import UnsupportedModelError


@torch.inference_mode()
def apply_adapter(model: Any, adapter: Adapter) -> None:
    """W += scale * B @ A for every target, computed in float32; raises before any weight is changed.

    ModelError or UnsupportedModelError: a target that the model does not have, that is no linear layer of its own, or
    that has another shape.
    """
    # Exactly these types: others, and their subclasses, may compute with something else than their weight.
    modules = dict(model.named_modules())
    linears: dict[str, tuple[int, int]] = {}
    for name, module in modules.items():
        if type(module) in (nn.Linear, Conv1D):
            first, second = module.weight.shape
            linears[name] = (first, second) if type(module) is nn.Linear else (second, first)
    owners = Counter(x.data_ptr() for _, x in model.named_parameters(remove_duplicate=False))
    placed = place(adapter, linears, modules)
    for _, name in placed:
        if owners[modules[name].weight.data_ptr()] > 1:
            raise UnsupportedModelError(
                f"the adapter changes {name}, whose weight this model shares with its embeddings; "
                "train an adapter without it"
            )
    tensors = load_file(adapter.file)
    for target, name in placed:
        weight = modules[name].weight
        a, b = (tensors[x].to(weight.device, torch.float32) for x in (target.a, target.b))
        delta = target.scale * (a @ b if target.transposed else (b @ a).T)  # [inputs, outputs]
        weight.copy_(weight.float() + (delta.T if type(modules[name]) is nn.Linear else delta))
