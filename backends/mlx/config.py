"""From a config.json to what mlx-lm reads: transformers 5 spells some fields in a way that mlx-lm may not know.

transformers 5 writes `rope_parameters` and no `rope_theta`; mlx-lm then quietly computes with a theta of 10000 and the
model writes plausible, wrong text. So the old names are added where they are missing, and after loading it is checked
that mlx-lm's own arguments hold the theta, the share of rotated channels and the scaling that config.json asks for.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.positional_encoding import RoPE

from kvarn.errors import UnsupportedModelError
from kvarn.rope_scaling import describe, frequencies

_THETA = ("rope_theta", "rotary_emb_base", "rope_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct")


def mlx_lm_overrides(
    raw: Mapping[str, Any], config: Mapping[str, Any], other_names: Mapping[str, str]
) -> dict[str, Any]:
    """What to add to config.json (`raw`) for mlx-lm; `config` is the same with transformers' defaults.

    other_names: old names of fields -> the names under which transformers writes them now.
    """
    text, full = raw.get("text_config"), config.get("text_config")
    if isinstance(text, Mapping):
        inner = _overrides(text, full if isinstance(full, Mapping) else text)
        return {"text_config": {**text, **inner}} if inner else {}
    renamed = {old: raw[new] for old, new in other_names.items() if new in raw and raw.get(old) is None}
    return renamed | _overrides(raw, config)


def _overrides(raw: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    added: dict[str, Any] = {}
    main, local = _rope(raw)
    if main:
        added = {name: main["rope_theta"] for name in _THETA if "rope_theta" in main}
        added |= {name: main["partial_rotary_factor"] for name in _PARTIAL if "partial_rotary_factor" in main}
        kind = main.get("rope_type", "default")
        scaling = {name: x for name, x in main.items() if name not in ("rope_theta", "partial_rotary_factor")}
        added["rope_scaling"] = None if kind == "default" else {**scaling, "type": kind}
    if local and "rope_theta" in local:
        added["rope_local_base_freq"] = local["rope_theta"]
    pattern = _pattern(config.get("layer_types"))
    if pattern is not None:
        added["sliding_window_pattern"] = pattern
    return {name: x for name, x in added.items() if raw.get(name) is None}


def _rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The `rope_parameters` of the full-attention layers, and of the sliding ones where they have their own."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}, {}
    if any(isinstance(x, Mapping) for x in rope.values()):
        main, local = rope.get("full_attention"), rope.get("sliding_attention")
        return main or local or {}, local or {}
    return rope, {}


def _pattern(layer_types: Any) -> int | None:
    """P where every P-th layer is a full one and all others slide; None where there is no such number."""
    if not isinstance(layer_types, list) or "sliding_attention" not in layer_types:
        return None
    pattern = layer_types.index("full_attention") + 1 if "full_attention" in layer_types else len(layer_types) + 1
    regular = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(len(layer_types))]
    return pattern if regular == layer_types else None


def check_rope(config: Mapping[str, Any], module: Any) -> None:
    """Refuse the model unless mlx-lm's arguments, and a scaled table in use, are the RoPE of `config`, by name."""
    args = getattr(module, "language_model", module).args
    text = config.get("text_config") or config
    name = text.get("model_type", "this model")
    main, local = _rope(text)
    theta = main.get("rope_theta")
    if theta is not None:
        known = _values(args, _THETA, default=10000.0)
        if theta not in known:
            raise UnsupportedModelError(f"config.json has a RoPE theta of {theta}, mlx-lm's {name} uses {known[0]}")
        near = local.get("rope_theta", theta)
        if near != theta and near not in _values(args, ("rope_local_base_freq",), default=theta):
            raise UnsupportedModelError(f"mlx-lm's {name} does not take the sliding layers' RoPE theta of {near}")
    partial = main.get("partial_rotary_factor")
    if partial is not None and partial not in _values(args, _PARTIAL, default=1.0):
        raise UnsupportedModelError(f"mlx-lm's {name} does not rotate the {partial} of the channels that it should")
    kind = main.get("rope_type", "default")
    taken = [getattr(args, x, None) or {} for x in ("rope_scaling", "rope_parameters")]
    if kind != "default" and not any(kind in (x.get("rope_type"), x.get("type")) for x in taken):
        raise UnsupportedModelError(f"mlx-lm's {name} does not take the rope type {kind!r} of config.json")
    if local.get("rope_type", "default") != "default":
        raise UnsupportedModelError(f"mlx-lm's {name} does not take a rope type for sliding layers")
    _check_rotation(config, module)


def _values(args: Any, names: tuple[str, ...], *, default: float) -> list[float]:
    nested = getattr(args, "rope_parameters", None) or {}
    found = [getattr(args, name, None) for name in names] + [nested.get(name) for name in names]
    return [value for value in found if value is not None] or [default]


def _check_rotation(config: Mapping[str, Any], module: Any) -> None:
    """Refuse the model unless every rotary layer turns by the scaled table that `config` asks for, by name.

    Some families of mlx-lm take a scaling into their arguments and never use it.
    """
    rope = describe(config)
    if rope["rope_type"] not in ("linear", "yarn", "llama3") or rope["rope_theta"] is None:
        return
    layers = [x for x in module.modules() if isinstance(x, RoPE) or "_freqs" in x]
    if layers and all(_turns(layer, rope) for layer in layers):
        return
    name = (config.get("text_config") or config).get("model_type", "this model")
    raise UnsupportedModelError(
        f"mlx-lm's {name} does not rotate by the {rope['rope_type']} scaling of config.json or --rope-scaling; "
        "use --backend triton"
    )


def _turns(layer: Any, rope: Mapping[str, Any]) -> bool:
    """Whether a rotary layer turns pairs of (1, 0) as the table says, near and far."""
    dim = layer.dim if hasattr(layer, "dim") else layer.dims
    table, factor = frequencies(rope, round(dim / rope["partial_rotary_factor"]))
    if len(table) != dim // 2:
        return False
    pairs = mx.stack([mx.ones(dim // 2), mx.zeros(dim // 2)], axis=-1)  # [pairs, 2]
    traditional = getattr(layer, "traditional", False)
    x = (pairs if traditional else pairs.T).reshape(1, 1, 1, dim)
    for position in (1, 1000):
        got = np.array(layer(x, offset=position)).reshape((dim // 2, 2) if traditional else (2, dim // 2))
        got = got if traditional else got.T
        want = factor * np.stack([np.cos(position * table), np.sin(position * table)], axis=-1)
        if not abs(got - want).max() < 2e-3:  # float32 angles at position 1000 are off by less
            return False
    return True
