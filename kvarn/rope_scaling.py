"""RoPE overrides: the text of `--rope-scaling`, the config.json that it gives, and the RoPE really used."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvarn.errors import UnsupportedModelError, UsageError

FORMS = (
    "linear:FACTOR, yarn:FACTOR, yarn:FACTOR:ORIGINAL_CONTEXT, llama3:FACTOR, llama3:FACTOR:ORIGINAL_CONTEXT, none, "
    'or JSON as in config.json, for example {"rope_type": "yarn", "factor": 4.0}'
)

_FIELDS = {  # what each type takes besides rope_type and rope_theta
    "default": (),
    "linear": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_MOST = 10_000  # beyond every factor that makes sense
_BY_LENGTH = ("dynamic", "longrope", "su")
_THETA = ("rope_theta", "rotary_emb_base", "rope_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")  # as in kvarn.model_plan


def parse(text: str) -> dict[str, Any]:
    """`--rope-scaling` as a mapping with `rope_type`; UsageError with the forms that exist for anything else."""
    text = text.strip()
    if text.startswith("{"):
        try:
            content = json.loads(text)
        except ValueError as error:
            raise UsageError(f"--rope-scaling is not JSON: {error}; use {FORMS}") from error
        return _checked(content)
    kind, *numbers = text.split(":")
    if kind == "none" and not numbers:
        return {"rope_type": "default"}
    if kind in _BY_LENGTH:
        return _checked({"rope_type": kind})
    names = ("factor", "original_max_position_embeddings")[: 1 if kind == "linear" else 2]
    if kind not in ("linear", "yarn", "llama3") or not 1 <= len(numbers) <= len(names):
        raise UsageError(f"unknown --rope-scaling {text!r}; use {FORMS}")
    try:
        values = [float(numbers[0]), *(int(x) for x in numbers[1:])]
    except ValueError:
        raise UsageError(f"--rope-scaling {text!r} has a number that is none; use {FORMS}") from None
    return _checked({"rope_type": kind, **dict(zip(names, values, strict=False))})


def _checked(override: Mapping[str, Any]) -> dict[str, Any]:
    """An override with `rope_type` for the old name `type`; UsageError for what is not known or out of range."""
    given = {name: x for name, x in override.items() if name not in ("type", "rope_type")}
    kind = override.get("rope_type", override.get("type"))
    if kind in _BY_LENGTH:
        raise UsageError(
            f"rope type {kind!r} depends on the length of the sequence, which would change sealed keys; use {FORMS}"
        )
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise UsageError(f"unknown rope type {kind!r}; use {FORMS}")
    for name, value in given.items():
        if name not in (*_FIELDS[kind], "rope_theta"):
            raise UsageError(f"rope type {kind!r} takes no {name!r}; it takes {', '.join(_FIELDS[kind]) or 'nothing'}")
        _check_number(name, value)
    if kind != "default" and "factor" not in given:
        raise UsageError(f"rope type {kind!r} needs a factor; use {FORMS}")
    if kind == "llama3":
        given = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | given
        if given["low_freq_factor"] >= given["high_freq_factor"]:
            raise UsageError(
                f"low_freq_factor {given['low_freq_factor']:g} is not below high_freq_factor "
                f"{given['high_freq_factor']:g}; use 1 and 4 as llama 3.1 does"
            )
    return {"rope_type": kind, **given}


def _check_number(name: str, value: Any) -> None:
    if name == "truncate":
        fits = isinstance(value, bool)
    elif name == "original_max_position_embeddings":
        fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1e9
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
        least = {"factor": 1, "mscale": 0, "mscale_all_dim": 0}.get(name)
        fits = number and (value >= least if least is not None else value > 0)
        fits = fits and not (name == "factor" and value > _MOST)
    if not fits:
        raise UsageError(
            f"--rope-scaling has {name} = {value!r}; use "
            + {
                "truncate": "true or false",
                "factor": f"a number from 1 to {_MOST}",
                "original_max_position_embeddings": "a whole number of tokens",
            }.get(name, "a positive number")
        )


def apply(
    config: Mapping[str, Any], override: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json with another RoPE scaling, in every field that transformers or mlx-lm reads; theta stays.

    The context becomes factor times the original one. The original context is the override's own; else that of the
    scaling which is replaced; else `max_position_embeddings`. An override that names it never shortens the context.
    defaults: the same configuration with what a library knows of the family, for fields that config.json leaves out.

    Raises UsageError for an override that is none, UnsupportedModelError for a model whose RoPE cannot be overridden.
    """
    override = _checked(override)
    text, known = _text(config), _text(config if defaults is None else defaults)
    name = str(text.get("model_type", "this model"))
    old = describe(known)
    if old["rope_type"] == "none":
        raise UnsupportedModelError(f"{name} has no RoPE in its config.json, so --rope-scaling cannot override it")
    if old["rope_type"] == "per layer type" or "rope_local_base_freq" in known:
        raise UnsupportedModelError(
            f"{name} has a RoPE for each type of layer, which --rope-scaling cannot override; edit its config.json"
        )
    if "mrope_section" in _flat(known):
        raise UnsupportedModelError(f"{name} has a RoPE of several axes (mrope), which --rope-scaling cannot override")
    field = next((x for x in _CONTEXT if isinstance(known.get(x), int)), None)
    if field is None:
        raise UnsupportedModelError(f"the config.json of {name} has no max_position_embeddings to scale; add it")
    context, kind = known[field], override["rope_type"]
    named = override.get("original_max_position_embeddings")
    original = named or old.get("original_max_position_embeddings") or context
    scaled = int(original * override.get("factor", 1))
    rope: dict[str, Any] = dict(override)
    if "original_max_position_embeddings" in _FIELDS[kind]:
        rope["original_max_position_embeddings"] = original
    theta = override.get("rope_theta", old["rope_theta"])
    if theta is not None:
        rope["rope_theta"] = theta
    if any(_first(x, _PARTIAL) is not None for x in (_flat(known), known)):
        rope["partial_rotary_factor"] = old["partial_rotary_factor"]
    changed = {
        "rope_parameters": rope,
        # mlx-lm has families that look for `type` alone; phi3 insists on a float.
        "rope_scaling": None if kind == "default" else {**rope, "type": kind, "factor": float(rope["factor"])},
        field: max(context, scaled) if named else scaled,
    }
    if theta is not None:
        changed |= {x: theta for x in _THETA if x == "rope_theta" or x in text}
    if "original_max_position_embeddings" in {**known, **text}:  # transformers prefers it to the one inside
        changed["original_max_position_embeddings"] = original
    if isinstance(config.get("text_config"), Mapping):
        return {**config, "text_config": {**text, **changed}}
    return {**config, **changed}


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE that a configuration asks for, canonical: equal for equal tables, whichever fields say it.

    `rope_type` is `none` for a model without RoPE; `per layer type` comes with one description per type in `layers`.
    Take the configuration that a backend loaded: config.json alone may leave a family's own theta out.
    """
    text = _text(config)
    nested = text.get("rope_parameters")
    if isinstance(nested, Mapping) and any(isinstance(x, Mapping) for x in nested.values()):
        layers = {str(k): _describe(x, text) for k, x in sorted(nested.items()) if isinstance(x, Mapping)}
        return {"rope_type": "per layer type", "layers": layers}
    rope = _flat(text)
    if not rope and not any(name in text for name in (*_THETA, *_PARTIAL, "rope_scaling")):
        return {"rope_type": "none"}
    return _describe(rope, text)


def _describe(rope: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    theta, partial = (
        next((x for x in (_first(rope, names), _first(text, names)) if x is not None), None)
        for names in (_THETA, _PARTIAL)
    )
    found: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": None if theta is None else float(theta),
        "partial_rotary_factor": 1.0 if partial is None else float(partial),
    }
    if kind == "default":
        return found
    found["factor"] = factor = float(rope.get("factor") or 1)
    if kind != "linear":
        original = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        found["original_max_position_embeddings"] = original or _first(text, _CONTEXT)
    if kind == "llama3":
        for name, usual in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0)):
            found[name] = float(rope.get(name) or usual)
    elif kind == "yarn":
        found["attention_factor"] = _attention_factor(rope, factor)
        found["beta_fast"], found["beta_slow"] = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
        found["truncate"] = bool(rope.get("truncate", True))
    elif kind != "linear":  # a type that cannot be set here: as it stands
        found |= {name: x for name, x in sorted(rope.items()) if name not in (*found, "type")}
    return found


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """What YaRN multiplies queries and keys with, as transformers derives it."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    log = 0.1 * math.log(factor) if factor > 1 else 0.0
    return float((above * log + 1) / (below * log + 1)) if above and below else log + 1


def frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[NDArray[np.float64], float]:
    """Radians per position of each rotated pair `[rotated dims / 2]`, and what queries and keys are multiplied with.

    rope: a description of `describe` of type default, linear, yarn or llama3, with a theta.
    """
    dim = int(head_dim * rope["partial_rotary_factor"])
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0)
    plain = theta ** -(np.arange(0, dim, 2) / dim)
    if kind in ("default", "linear"):
        return plain / factor, 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = original * plain / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    if kind != "yarn":
        raise UnsupportedModelError(f"rope type {kind!r} cannot be checked; use linear, yarn or llama3")
    first, last = (
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope["beta_fast"], rope["beta_slow"])
    )
    if rope["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - first) / (last - first if last != first else 0.001), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), rope["attention_factor"]


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _flat(text: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` under `rope_scaling`, which both libraries prefer, each with `rope_type` for `type`."""
    merged: dict[str, Any] = {}
    for part in (text.get("rope_parameters"), text.get("rope_scaling")):
        if isinstance(part, Mapping):
            kind = part.get("rope_type") or part.get("type")
            merged |= {**part, **({"rope_type": kind} if kind else {})}
    return merged


def _first(mapping: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)
