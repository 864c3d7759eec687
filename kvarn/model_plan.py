"""From a model's config.json: per layer sealed, exact or refused, each with its reason.

Sealed layers hold KVarN tiles. Exact layers keep every token in the model's dtype, for good. One refused layer, or a
preset that no layer can hold, refuses the model.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvarn.errors import UnsupportedModelError
from kvarn.format import HEAD_DIMS, Preset, TileFormat

Kind = Literal["sealed", "exact", "refused"]

_ALIBI = {"bloom", "mpt", "jais"}
_RECURRENT_TYPES = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "ssm", "hybrid", "linear_ssm"}
_RECURRENT_MODELS = {
    *("bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h", "recurrent_gemma"),
    *("rwkv", "xlstm", "zamba", "zamba2"),
}
# What files written before transformers 5 leave out: every how many layers one reads everything, and which families
# ignore their sliding_window unless use_sliding_window says otherwise.
_PATTERNS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
_WINDOW_OFF = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one decoder layer's cache is: its kind, why, and the shape of its keys and values."""

    index: int
    kind: Kind
    reason: str
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a sliding-window layer reads, its own included


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The layers of a model under one preset (None: everything exact)."""

    layers: tuple[Layer, ...]
    preset: Preset | None
    num_heads: int
    max_context: int

    @property
    def sealed(self) -> tuple[Layer, ...]:
        """The layers that hold tiles; all of one shape."""
        return tuple(layer for layer in self.layers if layer.kind == "sealed")

    @property
    def exact(self) -> tuple[Layer, ...]:
        """The layers that keep every token in the model's dtype."""
        return tuple(layer for layer in self.layers if layer.kind == "exact")

    @property
    def tile_format(self) -> TileFormat | None:
        """The tile format of the sealed layers; None when nothing is sealed."""
        return self.preset.with_head_dim(self.sealed[0].head_dim) if self.preset and self.sealed else None

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile, and of an exact slot."""
        return self.preset.tile_tokens if self.preset else Preset().tile_tokens

    @property
    def name(self) -> str:
        """The cache's dtype as the user names it."""
        return self.preset.name if self.preset else "exact"

    def describe(self) -> str:
        """`30 of 30 layers sealed`, or which are not and why; one line."""
        if self.preset is None:
            return f"0 of {len(self.layers)} layers sealed (exact was asked for)"
        line = f"{len(self.sealed)} of {len(self.layers)} layers sealed"
        reasons: dict[str, list[int]] = {}
        for layer in self.exact:
            reasons.setdefault(layer.reason, []).append(layer.index)
        parts = [f"{_ranges(indices)} exact: {reason}" for reason, indices in reasons.items()]
        return "; ".join([line, *parts])


def plan_model(config: Mapping[str, Any], preset: Preset | None) -> ModelPlan:
    """Decide every layer's kind. `config` is config.json as a mapping (a nested `text_config` is entered).

    Raises UnsupportedModelError, naming the layers and the reason, when a layer is refused, or when a preset was
    asked for and no layer can hold it.
    """
    text = config.get("text_config") or config
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError("encoder-decoder models are not supported; use a decoder-only model")
    _refuse_whole_model(text)
    num_layers = _int(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    max_context = _optional_int(text, "max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx") or 2048
    if max_context < 1:
        raise UnsupportedModelError(f"config.json has a context of {max_context} tokens")
    types = text.get("layer_types")
    if types is not None and (not isinstance(types, list | tuple) or len(types) < num_layers):
        raise UnsupportedModelError(f"config.json has no layer type for each of its {num_layers} layers")

    layers = []
    for index in range(num_layers):
        own = _layer_config(text, index)
        _, kv_heads, head_dim = _heads(own)
        kind, reason, window = _layer_kind(own, index, head_dim, max_context, preset)
        layers.append(
            Layer(index=index, kind=kind, reason=reason, num_kv_heads=kv_heads, head_dim=head_dim, window=window)
        )
    return check_plan(
        ModelPlan(layers=tuple(layers), preset=preset, num_heads=_heads(text)[0], max_context=max_context),
    )


def _layer_config(text: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The configuration of one layer: gemma4 and its like override head_dim and kv heads for some."""
    overrides = text.get("per_layer_config")
    if not isinstance(overrides, Mapping):
        return text
    own = [x for key, x in overrides.items() if str(key).isdecimal() and int(key) == index and isinstance(x, Mapping)]
    return {**text, **own[0]} if own else text


def _heads(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Heads, kv heads and head_dim."""
    num_heads = _int(text, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    hidden = _int(text, "hidden_size", "n_embd", "d_model")
    kv_heads = _optional_int(text, "num_key_value_heads", "num_kv_heads", "n_head_kv")
    if kv_heads is None:
        kv_heads = 1 if text.get("multi_query") else num_heads
    head_dim = _optional_int(text, "head_dim") or hidden // num_heads
    if kv_heads < 1 or num_heads % kv_heads:
        raise UnsupportedModelError(f"config.json has {num_heads} heads for {kv_heads} kv heads, not a multiple")
    if head_dim < 1:
        raise UnsupportedModelError(f"config.json has a head_dim of {head_dim}")
    return num_heads, kv_heads, head_dim


def check_plan(plan: ModelPlan) -> ModelPlan:
    """The same plan with every sealed layer of one shape; raises UnsupportedModelError as `plan_model` says."""
    refused = [layer for layer in plan.layers if layer.kind == "refused"]
    if refused:
        where = _ranges([layer.index for layer in refused])
        raise UnsupportedModelError(f"this model is not supported: {where}: {refused[0].reason}")
    shapes = Counter((layer.num_kv_heads, layer.head_dim) for layer in plan.sealed)
    if len(shapes) > 1:
        common = shapes.most_common(1)[0][0]
        layers = tuple(
            layer
            if layer.kind == "exact" or (layer.num_kv_heads, layer.head_dim) == common
            else _exact(layer, "its kv heads or head_dim differ from those of the sealed layers")
            for layer in plan.layers
        )
        plan = ModelPlan(layers=layers, preset=plan.preset, num_heads=plan.num_heads, max_context=plan.max_context)
    if plan.preset is not None and not plan.sealed:
        reasons = ", ".join(dict.fromkeys(layer.reason for layer in plan.layers))
        raise UnsupportedModelError(
            f"no layer of this model can hold {plan.preset.name} tiles: {reasons}; use --kv-cache-dtype exact"
        )
    return plan


def _exact(layer: Layer, reason: str) -> Layer:
    return Layer(
        index=layer.index,
        kind="exact",
        reason=reason,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        window=layer.window,
    )


def _refuse_whole_model(text: Mapping[str, Any]) -> None:
    model_type = str(text.get("model_type", ""))
    if model_type in _RECURRENT_MODELS:
        raise UnsupportedModelError(f"{model_type} keeps a recurrent state, which is not supported; use another model")
    if model_type in _ALIBI or text.get("alibi"):
        raise UnsupportedModelError(f"{model_type} uses ALiBi position biases, which are not supported")
    if text.get("kv_lora_rank"):
        raise UnsupportedModelError(
            f"{model_type} uses multi-head latent attention (MLA), which is not supported; use another model"
        )
    if text.get("num_kv_shared_layers"):
        raise UnsupportedModelError(f"{model_type} shares keys and values between layers, which is not supported")
    ropes = [x for name in ("rope_scaling", "rope_parameters") if isinstance(x := text.get(name), Mapping)]
    for part in [*ropes, *(x for rope in ropes for x in rope.values() if isinstance(x, Mapping))]:
        rope_type = part.get("rope_type", part.get("type"))
        if rope_type in ("dynamic", "longrope", "su"):
            raise UnsupportedModelError(
                f"rope type {rope_type!r} depends on the length of the sequence, which would change sealed keys; "
                "override rope_scaling in config.json with a fixed type (linear, yarn, llama3)"
            )


def _layer_kind(
    text: Mapping[str, Any], index: int, head_dim: int, max_context: int, preset: Preset | None
) -> tuple[Kind, str, int | None]:
    types = text.get("layer_types")
    layer_type = str(types[index]) if types else _implied_type(text, index)
    window = None
    if layer_type in _RECURRENT_TYPES:
        return "refused", f"{layer_type} keeps a recurrent state, which is not supported", None
    if layer_type == "sliding_attention":
        window = _optional_int(text, "sliding_window", "attention_window_size")
        if window is None or window < 1:
            return "refused", "a sliding-attention layer without a sliding_window", None
        if window < max_context:
            return "exact", f"sliding window of {window} tokens", window
        window = None
    elif layer_type not in ("full_attention", "attention"):
        return "refused", f"layer type {layer_type!r} is not supported", None
    if preset is None:
        return "exact", "asked for", window
    if text.get("attn_logit_softcapping"):
        return "exact", f"soft cap of {text['attn_logit_softcapping']} on the attention scores", window
    if text.get("model_type") == "gpt_oss":
        return "exact", "learned attention sinks", window
    if head_dim not in HEAD_DIMS:
        return "exact", f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}", window
    return "sealed", "full attention", window


def _implied_type(text: Mapping[str, Any], index: int) -> str:
    """The layer type where config.json has no `layer_types` (files written before transformers 5)."""
    family = str(text.get("model_type", ""))
    if not text.get("sliding_window") or not text.get("use_sliding_window", family not in _WINDOW_OFF):
        return "full_attention"
    pattern = _optional_int(text, "sliding_window_pattern") or _PATTERNS.get(family)
    if pattern:
        return "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
    if text.get("use_sliding_window") and index < (_optional_int(text, "max_window_layers") or 0):
        return "full_attention"
    return "sliding_attention"


def _optional_int(text: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _int(text: Mapping[str, Any], *names: str) -> int:
    value = _optional_int(text, *names)
    if value is None or value < 1:
        raise UnsupportedModelError(f"config.json has no {names[0]}; is this the folder of a decoder-only model?")
    return value


def _ranges(indices: list[int]) -> str:
    """[0, 1, 2, 4] -> `layers 0-2, 4`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' if len(indices) > 1 else ''} {text}"
