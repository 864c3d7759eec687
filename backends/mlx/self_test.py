"""The start-up self-test: a model that answers from anything but our attention, or otherwise, is refused by name."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx.core import array

from kvarn.backends.mlx.model import Attention, LoadedModel
from kvarn.checkpoint import first_line
from kvarn.errors import UnsupportedModelError
from kvarn.model_plan import Layer, ModelPlan

# Exact attention of queries `[n, H, D]`, the last n of the tokens whose keys and values `[T, Hk, D]` a call holds.
Reference = Callable[[Attention, int | None], array]

_COUNT = 8  # tokens of the test


def self_test(model: LoadedModel, plan: ModelPlan, reference: Reference) -> LoadedModel:
    """The model, `batched` where it may be; UnsupportedModelError unless a few tokens give its own attention's logits.

    They run in one piece, and in two with some of the logits, so that a state beside attention, or positions that a
    family counts by itself, show. Then as rows, a token each, at the start and at the end of the context.
    """
    name = str(model.config.get("model_type", "this model"))
    _check_layers(model, plan, name)
    probe = _Probe(model, plan, reference)
    near, far = range(_COUNT), range(max(plan.max_context, 2 * _COUNT) - _COUNT, max(plan.max_context, 2 * _COUNT))
    try:
        want = model.own_logits(probe.tokens)
        whole, calls = probe.run(near)
        pieces, _ = probe.run(near, cut=_COUNT // 2, step=2)
        distances = [_distance(whole, want), _distance(pieces, want[::2])]
    except Exception as error:  # whatever a family's own code raises
        raise UnsupportedModelError(f"{name} does not run with attention of ours: {_why(error)}") from error
    for layer in plan.layers:
        _check_calls([call for call in calls if call.layer == layer.index], layer, name)
    for distance, where in zip(distances, ("through our attention", "when its tokens come in two pieces"), strict=True):
        if not distance < (1e-3 if model.dtype == mx.float32 else 5e-2):
            raise UnsupportedModelError(f"{name} gives other logits {where} (relative error {distance:.2g})")
    return replace(model, batched=probe.takes_rows((near, far)))


def _why(error: Exception) -> str:
    if isinstance(error, UnsupportedModelError):
        return str(error)
    if "_Handle" in str(error):  # MLX's operations name the types that they do not take
        return "it computes attention itself from what its cache gives"
    return f"{type(error).__name__}: {first_line(error)}"


class _Probe:
    """Eight tokens through the model, with every call of the hook."""

    def __init__(self, model: LoadedModel, plan: ModelPlan, reference: Reference) -> None:
        self.model, self.plan, self.reference = model, plan, reference
        self.tokens = [i * 7919 % model.vocab_size for i in range(1, _COUNT + 1)]

    def run(self, positions: range, cut: int = 0, step: int = 1) -> tuple[array, list[Attention]]:
        """Logits of every `step`-th token, at consecutive positions, and all calls; in one piece or in two."""
        calls: list[Attention] = []
        past: dict[int, Attention] = {}

        def hook(call: Attention) -> array:
            calls.append(call)
            before = past.get(call.layer)
            if before is not None:
                key, value = mx.concatenate([before.key, call.key]), mx.concatenate([before.value, call.value])
                call = replace(call, key=key, value=value)
            past[call.layer] = call
            return self.reference(call, self.plan.layers[call.layer].window)

        logits = []
        for part in (slice(0, cut), slice(cut, _COUNT)):
            if tokens := self.tokens[part]:
                logits.append(self.model.forward(tokens, [*positions[part]], [*range(0, len(tokens), step)], hook))
        return mx.concatenate(logits), calls

    def run_rows(self, positions: range) -> tuple[array, list[Attention]]:
        """The same with a row per token, in reverse, so that nothing but its position says where a token stands."""
        calls: list[Attention] = []

        def hook(call: Attention) -> array:
            call = replace(call, query=call.query[::-1], key=call.key[::-1], value=call.value[::-1])
            calls.append(call)
            return self.reference(call, self.plan.layers[call.layer].window)[::-1]

        logits = self.model.forward(self.tokens[::-1], [*positions[::-1]], [*range(_COUNT)], hook)
        return logits[::-1], calls

    def takes_rows(self, places: Sequence[range]) -> bool:
        """Whether rows give the queries, keys and logits that consecutive tokens give, wherever they stand."""
        try:
            for positions in places:
                want, one = self.run(positions)
                got, other = self.run_rows(positions)
                pairs = [(got, want)]
                pairs += [p for a, b in zip(other, one, strict=True) for p in ((a.key, b.key), (a.query, b.query))]
                # Wide, for the angles of far positions are rounded themselves; a wrong position is off by far more.
                if not max(_distance(a, b) for a, b in pairs) < 5e-2:
                    return False
        except Exception:  # a family whose positions must be plain numbers says so in its own way
            return False
        return True


def _distance(got: array, want: array) -> float:
    """Relative error over a whole array."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return float(np.array(mx.linalg.norm((got - want).flatten()) / mx.linalg.norm(want.flatten())))


def _check_layers(model: LoadedModel, plan: ModelPlan, name: str) -> None:
    """Refuse, by name, where what mlx-lm itself would keep is of another kind or window than the plan."""
    if model.num_layers != len(plan.layers):
        raise UnsupportedModelError(f"mlx-lm's {name} has {model.num_layers} layers, config.json {len(plan.layers)}")
    kept = model.kept()
    if kept and len(kept) != len(plan.layers):
        raise UnsupportedModelError(f"mlx-lm's {name} keeps {len(kept)} caches for {len(plan.layers)} layers")
    slides = any(window is not None for _, window in kept)
    for layer, (what, window) in zip(plan.layers, kept, strict=False):
        where = f"layer {layer.index} of {name}"
        if what != "keys":
            raise UnsupportedModelError(f"{where} keeps a {what}, which is more than keys and values")
        if window is not None and window >= plan.max_context:
            window = None
        # A family that knows no windows at all is run with those of config.json: our rule decides, not its masks.
        if slides and window != layer.window:
            raise UnsupportedModelError(f"{where} has a window of {window} in mlx-lm, planned was {layer.window}")


def _check_calls(calls: Sequence[Attention], layer: Layer, name: str) -> None:
    """Refuse what a layer asks of attention when it is not what the plan says, by name."""
    where = f"layer {layer.index} of {name}"
    if not calls:
        raise UnsupportedModelError(f"{where} answers without reaching our attention")
    if len(calls) > 1:
        raise UnsupportedModelError(f"{where} runs attention more than once for a token, which is not supported")
    call = calls[0]
    if call.masked:
        raise UnsupportedModelError(f"{where} makes an attention mask of its own, which is not honoured")
    want = (layer.num_kv_heads, layer.head_dim)
    for what, shape in (("key", call.key.shape[1:]), ("value", call.value.shape[1:])):
        if tuple(shape) != want:
            raise UnsupportedModelError(
                f"{where} has {what}s of [kv heads, head_dim] {list(shape)}, config.json says {list(want)}"
            )
