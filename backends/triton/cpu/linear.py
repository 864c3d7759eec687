"""Linear layers on a CPU: bfloat16 weights are laid out once as oneDNN reads them; torch does it in every call.

The results are the same, bit for bit; a token's products take about half the time. The two operators are those that
torch.compile uses for the same purpose. They are no public interface, so each shape is tried against torch's own linear
before it is used, and where it does not work the layer stays as it is.
"""

import logging
from collections import Counter

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear

_log = logging.getLogger("kvarn.triton")
TOLERANCE = 2e-2  # of the largest output; bfloat16 has 8 bits


class PackedLinear(Module):
    """A Linear whose weight lies as oneDNN wants it."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The weight as it was, `[out_features, in_features]`: a copy, for families that look at it."""
        weight: Tensor = self.packed.to_dense()
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """See torch.nn.Linear."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return output


@torch.no_grad()
def pack_linears(module: Module) -> int:
    """Pack the bfloat16 Linears of a model on a CPU in place; how many.

    A weight that another layer holds too, such as a head tied to the embedding, stays: it would be there twice. What
    stays is copied out of the checkpoint's file, whose pages would else remain in memory beside the packed ones.
    """
    owners = Counter(p.data_ptr() for one in module.modules() for p in one.parameters(recurse=False))
    works: dict[tuple[int, int, bool], bool] = {}
    packed: dict[Module, Module] = {}
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not Linear or layer.weight.dtype != torch.bfloat16 or layer.weight.device.type != "cpu":
                continue
            if owners[layer.weight.data_ptr()] > 1:
                continue
            shape = (layer.out_features, layer.in_features, layer.bias is not None)
            if shape not in works:
                works[shape] = _works(layer)
            if works[shape]:
                if layer not in packed:
                    packed[layer] = PackedLinear(layer)
                setattr(parent, name, packed[layer])
    if packed:
        copies: dict[int, Tensor] = {}
        for parameter in module.parameters():
            at = parameter.data_ptr()
            if at not in copies:
                copies[at] = parameter.data.clone()
            parameter.data = copies[at]
    _log.debug("kvarn: %d linear layers packed for oneDNN", len(packed))
    return len(packed)


def _works(layer: Linear) -> bool:
    """Whether a layer of this shape gives packed what it gives as it is, for one row and for several."""
    try:
        candidate = PackedLinear(layer)
        for rows in (1, 5):
            x = torch.linspace(-1, 1, rows * layer.in_features).reshape(rows, layer.in_features).bfloat16()
            want, got = linear(x, layer.weight, layer.bias).float(), candidate(x).float()
            if not (got - want).abs().max() <= TOLERANCE * want.abs().max():
                return False
    except (AttributeError, RuntimeError, NotImplementedError) as error:  # another torch, or another processor
        _log.debug("kvarn: oneDNN does not pack linear layers here: %s", str(error).splitlines()[0])
        return False
    return True
