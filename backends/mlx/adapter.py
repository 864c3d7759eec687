"""A LoRA adapter on an mlx-lm model: merged into plain weights once, kept beside quantized ones.

Merging into a quantized weight would round the change away, so such a layer adds scale * (x @ A.T) @ B.T to its output
in every step.
"""

from typing import Any

import mlx.core as mx
from mlx.core import array
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from kvarn.adapter import Adapter, place


class LoraQuantizedLinear(QuantizedLinear):
    """A quantized linear layer with `lora_a [inputs, rank]` and `lora_b [rank, outputs]`, the scale within."""

    def __call__(self, x: array) -> array:
        """`[..., inputs]` -> `[..., outputs]`."""
        own: Any = super()
        changed: array = own.__call__(x) + (x @ self["lora_a"]) @ self["lora_b"]
        return changed


def apply_adapter(model: Any, adapter: Adapter, dtype: mx.Dtype) -> None:
    """W += scale * B @ A for every target, computed in float32, or the same beside a quantized W, in `dtype`.

    Raises before any weight is changed. ModelError or UnsupportedModelError: a target that the model does not have,
    that is no linear layer, or that has another shape.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    # Exactly these types: others, and their subclasses, may compute with something else than their weight.
    linears: dict[str, tuple[int, int]] = {}
    for name, module in modules.items():
        if type(module) in (Linear, QuantizedLinear):
            outputs, inputs = module.weight.shape
            linears[name] = (outputs, inputs * 32 // module.bits if type(module) is QuantizedLinear else inputs)
    placed = place(adapter, linears, modules)
    tensors: Any = mx.load(str(adapter.file))
    for target, name in placed:
        module = modules[name]
        a, b = (tensors[x].astype(mx.float32) for x in (target.a, target.b))
        if not target.transposed:
            a, b = a.T, b.T
        if type(module) is Linear:
            module.weight = (module.weight.astype(mx.float32) + target.scale * (a @ b).T).astype(module.weight.dtype)
        else:
            module.__class__ = LoraQuantizedLinear
            module.lora_a, module.lora_b = a.astype(dtype), (target.scale * b).astype(dtype)
