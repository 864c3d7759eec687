"""Packed linear layers: the bits of torch's own, what is packed and what stays, and that a whole model agrees."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kvarn.backend import LoadOptions
from kvarn.backends.triton import model as model_module
from kvarn.backends.triton.cpu import linear
from kvarn.backends.triton.cpu.linear import PackedLinear, pack_linears


def layer(inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


if not linear._works(layer(64, 64)):
    pytest.skip("oneDNN packs no bfloat16 weights on this processor or in this torch", allow_module_level=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (576, 192), (96, 1000), (1, 7), (33, 129)])
@pytest.mark.parametrize("lead", [(1,), (5,), (1, 1), (1, 3), (2, 17), (2, 3, 4), (1, 300)])
def test_the_bits_are_those_of_torch(shape: tuple[int, int], bias: bool, lead: tuple[int, ...]) -> None:
    one = layer(*shape, bias=bias)
    x = torch.randn(*lead, shape[0]).bfloat16()
    with torch.inference_mode():
        want, got = one(x), PackedLinear(one)(x)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    # One more rounding at most: the library picks its own order of sums for a few shapes.
    assert (got.float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max()
    if shape in ((64, 64), (576, 192)):
        assert torch.equal(got, want)


def test_the_weight_can_be_looked_at() -> None:
    one = layer(96, 40, bias=True)
    packed = PackedLinear(one)
    assert torch.equal(packed.weight, one.weight)
    assert (packed.in_features, packed.out_features) == (96, 40)


class Model(nn.Module):
    """A head tied to the embedding, a layer that is used twice, one of another dtype, one of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64, dtype=torch.bfloat16)
        self.first = layer(64, 64)
        self.again = nn.ModuleList([self.first])
        self.exact = layer(64, 64, dtype=torch.float32)
        self.own = Own(64, 64, dtype=torch.bfloat16)
        self.head = layer(64, 50)
        self.head.weight = self.embed.weight


class Own(nn.Linear):
    """Somebody's own kind of Linear may do more than multiply."""


def test_what_is_packed_and_what_stays() -> None:
    model = Model()
    weight = model.first.weight.detach().clone()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not name.startswith("first")}
    assert pack_linears(model) == 1
    assert isinstance(model.first, PackedLinear)
    assert model.again[0] is model.first
    assert [type(x) for x in (model.exact, model.own, model.head)] == [nn.Linear, Own, nn.Linear]
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.first.weight, weight)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


@pytest.mark.parametrize("fault", [AttributeError, RuntimeError, "wrong"])
def test_where_it_does_not_work_layers_stay(fault: type[Exception] | str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        if isinstance(fault, str):
            return torch.zeros(len(x), self.out_features)
        raise fault("no such thing here")

    monkeypatch.setattr(PackedLinear, "forward", forward)
    model = Model()
    assert pack_linears(model) == 0
    assert type(model.first) is nn.Linear


def test_a_model_says_the_same_and_lets_go_of_its_file(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = LoadOptions(dtype="bfloat16", device="cpu")
    packed = model_module.load_model(demo_dir, options)
    assert sum(isinstance(x, PackedLinear) for x in packed.module.modules()) == 7 * 30
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(demo_dir / "model.safetensors") not in maps.read_text()
    monkeypatch.setattr(model_module, "pack_linears", lambda module: 0)
    plain = model_module.load_model(demo_dir, options)
    assert packed.weight_bytes == plain.weight_bytes
    for tokens in (1, 9):
        logits = []
        for one in (packed, plain):
            one.module.set_attn_implementation("eager")
            with torch.inference_mode():
                logits.append(one.module(input_ids=torch.arange(100, 100 + tokens)[None], use_cache=False).logits)
        assert (logits[0] - logits[1]).abs().max() <= 2e-2 * logits[1].abs().max()
        assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))
