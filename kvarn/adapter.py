"""LoRA adapters: a folder as peft or mlx-lm writes it -> which module gets scale * B @ A, or a refusal by name.

No tensor is read here: names and shapes come from the header of the safetensors file, and each backend reads the
tensors with its own framework.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvarn.errors import ModelError, UnsupportedModelError

CONFIG = "adapter_config.json"
_FILES = {"peft": "adapter_model.safetensors", "mlx-lm": "adapters.safetensors"}
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes and their bytes
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit

# What peft writes that changes no result, or is used below. Anything else that is set is refused by name.
_PEFT_KNOWN = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "task_type"),
    *("layers_to_transform", "layers_pattern", "exclude_modules", "bias", "init_lora_weights", "fan_in_fan_out"),
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"),
    *("qalora_group_size", "megatron_core", "ensure_weight_tying", "loftq_config", "eva_config", "corda_config"),
}
# Ways to start training that leave the base weights as they are; the others need other base weights.
_PEFT_STARTS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One module's change: W += scale * B @ A, with A `[rank, inputs]` and B `[outputs, rank]`.

    a, b: the tensors' names in the file. transposed: the file holds A and B as `[inputs, rank]` and `[rank, outputs]`.
    """

    module: str
    a: str
    b: str
    scale: float
    rank: int
    inputs: int
    outputs: int
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What an adapter folder says. `wanted`: the ends of the module names that it claims to change, where it does.

    layers: the layers that it claims to change, or their number counted from the last one; None is all of them.
    """

    folder: Path
    kind: Literal["peft", "mlx-lm"]
    file: Path
    targets: tuple[Target, ...]
    wanted: tuple[str, ...]
    layers: tuple[int, ...] | int | None


def read_adapter(folder: Path) -> Adapter:
    """Read adapter_config.json and the header of the tensors; nothing is applied yet.

    Raises ModelError for a folder that is none or is damaged, UnsupportedModelError for a kind of adapter or an option
    that would be computed wrongly.
    """
    config = _read_config(folder)
    if "peft_type" in config:
        return _read_peft(folder, config)
    if "fine_tune_type" in config or "lora_parameters" in config:
        return _read_mlx_lm(folder, config)
    raise ModelError(
        f"{folder / CONFIG} names neither a peft_type nor a fine_tune_type; give the folder of an adapter "
        "that peft or mlx-lm wrote"
    )


def adapter_digest(folder: Path) -> str:
    """sha256 in hex over what the config means and every byte of the tensor file; the same for copies elsewhere."""
    adapter = read_adapter(folder)
    meaning = sorted((x.module, x.a, x.b, x.scale.hex(), x.transposed) for x in adapter.targets)
    with adapter.file.open("rb") as file:
        tensors = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(json.dumps([meaning, tensors]).encode()).hexdigest()


def place(adapter: Adapter, linears: Mapping[str, tuple[int, int]], modules: Iterable[str]) -> list[tuple[Target, str]]:
    """Each target with the name of the model's own module.

    linears: the modules that a matrix can be added to, with their outputs and inputs; modules: all of them. A name is
    found as it stands, or as the one module with the same name from its layer's number on: mlx-lm and transformers
    call the outer parts otherwise.

    Raises ModelError for a target that the model does not have or whose shape is another, and when layers or modules
    that the adapter claims to change are without tensors; UnsupportedModelError for a target that is no linear layer.
    """
    every = set(modules)
    by_end: dict[str, list[str]] = {}
    for name in every:
        by_end.setdefault(_from_layer(name), []).append(name)
    placed: list[tuple[Target, str]] = []
    for target in adapter.targets:
        name = target.module
        near = by_end.get(_from_layer(name), [])
        if name not in every and len(near) == 1:
            name = near[0]
        if name not in every:
            raise ModelError(
                f"the adapter changes {target.module}, which this model does not have; "
                "use the model that the adapter was trained on"
            )
        if name not in linears:
            raise UnsupportedModelError(
                f"the adapter changes {name}, which is no plain linear layer in this model; train an adapter without it"
            )
        if (target.outputs, target.inputs) != linears[name]:
            raise ModelError(
                f"the adapter changes {name} by a matrix of {[target.outputs, target.inputs]}, this model's is "
                f"{[*linears[name]]}; use the model that the adapter was trained on"
            )
        placed.append((target, name))
    twice = len(placed) - len({name for _, name in placed})
    if twice:
        raise ModelError(f"the adapter in {adapter.folder} changes {twice} modules twice; save it again")
    _check_complete(adapter, set(linears), {name for _, name in placed})
    return placed


def _check_complete(adapter: Adapter, linears: set[str], changed: set[str]) -> None:
    """ModelError when a layer, or a module of it, that the adapter claims to change has no tensors."""
    numbers = sorted({n for name in linears if (n := _layer(name)) is not None})
    layers: set[int] | None = None
    if isinstance(adapter.layers, int):
        layers = set(numbers[-adapter.layers :] if adapter.layers > 0 else numbers)
    elif adapter.layers is not None:
        layers = set(adapter.layers)
    claimed = {
        name
        for name in linears
        if any(name == end or name.endswith(f".{end}") for end in adapter.wanted)
        and (layers is None or _layer(name) in layers)
    }
    lacking = sorted(claimed - changed)
    if lacking:
        raise ModelError(
            f"the adapter says that it changes {len(claimed)} modules and has no tensors for {lacking[0]}"
            + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else "")
            + "; get the adapter again"
        )
    empty = sorted((layers or set()) - {n for name in changed if (n := _layer(name)) is not None})
    if empty:
        raise ModelError(
            f"the adapter has no tensors for layer {empty[0]}, which it says that it changes; get it again"
        )


def _layer(name: str) -> int | None:
    """The number of the layer that a module's name holds."""
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else None


def _from_layer(name: str) -> str:
    """`language_model.model.layers.3.mlp.up_proj` -> `3.mlp.up_proj`; a name without a number stays."""
    match = re.search(r"\.(\d+\..*)", name)
    return match[1] if match else name


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(f"{folder} has no {CONFIG}; give the folder of an adapter that peft or mlx-lm wrote")
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; get the adapter again") from error
    return config


def _read_peft(folder: Path, config: Mapping[str, Any]) -> Adapter:
    """What `save_pretrained` of peft writes."""

    def refuse(what: str, fix: str = "train a plain LoRA adapter") -> UnsupportedModelError:
        return UnsupportedModelError(f"the adapter in {folder} {what}, which is not supported; {fix}")

    if config["peft_type"] != "LORA":
        raise refuse(f"is of peft type {config['peft_type']}")
    if config.get("use_dora"):
        raise refuse("uses DoRA (use_dora)")
    if config.get("bias", "none") != "none":
        raise refuse(f"trains biases too (bias = {config['bias']!r})", "train it with bias none")
    start = config.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _PEFT_STARTS):
        raise refuse(
            f"starts from changed base weights (init_lora_weights = {start!r})", "let peft convert it to plain LoRA"
        )
    for name, value in config.items():  # modules_to_save, trainable_token_indices, layer_replication, lora_bias, ...
        if name not in _PEFT_KNOWN and value:
            raise refuse(f"sets {name} = {json.dumps(value)[:60]}", f"train it without {name}")
    ranks, alphas = (config.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
    rank, alpha = config.get("r"), config.get("lora_alpha")
    file, pairs = _pairs(folder, "peft")
    targets = []
    for module, (a, b, shape_a, shape_b) in sorted(pairs.items()):
        own_rank, own_alpha = _pattern(ranks, module, rank), _pattern(alphas, module, alpha)
        if not _number(own_rank) or not _number(own_alpha) or own_rank < 1:
            raise ModelError(
                f"{folder / CONFIG} has r = {own_rank} and lora_alpha = {own_alpha}; get the adapter again"
            )
        scale = own_alpha / (math.sqrt(own_rank) if config.get("use_rslora") else own_rank)
        targets.append(_target(module, a, b, scale, shape_a, shape_b, transposed=False))
        if own_rank != targets[-1].rank:
            raise ModelError(
                f"the adapter's config says rank {own_rank} for {module}, its tensor has {shape_a[0]}; get it again"
            )
    wanted, only = config.get("target_modules"), config.get("layers_to_transform")
    if not isinstance(wanted, list) or config.get("exclude_modules") or config.get("layers_pattern"):
        wanted = []  # a pattern of names: what it is meant to match cannot be told from it
    for end in wanted:
        if not any(x.module == end or x.module.endswith(f".{end}") for x in targets):
            raise ModelError(f"the adapter says that it changes {end} and has no tensors for it; get the adapter again")
    layers = (only,) if isinstance(only, int) else tuple(only) if isinstance(only, list) else None
    return Adapter(
        folder=folder, kind="peft", file=file, targets=tuple(targets), wanted=tuple(wanted), layers=layers or None
    )


def _read_mlx_lm(folder: Path, config: Mapping[str, Any]) -> Adapter:
    """What `mlx_lm.lora` writes."""
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        named = {"dora": "DoRA", "full": "a full fine-tune"}.get(kind, repr(kind))
        fix = "fuse it into a model with mlx_lm.fuse" if kind in ("dora", "full") else "train a LoRA adapter"
        raise UnsupportedModelError(
            f"the adapter in {folder} is {named} (fine_tune_type), which is not supported; {fix}"
        )
    parameters, count = config.get("lora_parameters"), config.get("num_layers")
    scale = parameters.get("scale") if isinstance(parameters, Mapping) else None
    if not isinstance(parameters, Mapping) or scale is None or not _number(scale):
        raise ModelError(f"{folder / CONFIG} has no lora_parameters with a scale; train it with a newer mlx-lm")
    if not isinstance(count, int):
        raise ModelError(f"{folder / CONFIG} has no num_layers; train it with a newer mlx-lm")
    file, pairs = _pairs(folder, "mlx-lm")
    targets = tuple(
        _target(module, a, b, float(scale), shape_a[::-1], shape_b[::-1], transposed=True)
        for module, (a, b, shape_a, shape_b) in sorted(pairs.items())
    )
    rank = parameters.get("rank", targets[0].rank)
    for x in targets:
        if x.rank != rank:
            raise ModelError(
                f"the adapter's config says rank {rank}, its tensor for {x.module} has {x.rank}; get it again"
            )
    keys = parameters.get("keys") or ()
    return Adapter(folder=folder, kind="mlx-lm", file=file, targets=targets, wanted=tuple(keys), layers=count)


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e30


def _pattern(patterns: Any, module: str, usual: Any) -> Any:
    """The value of the first pattern that matches the module's name or its end, as peft looks it up."""
    if not isinstance(patterns, Mapping):
        raise ModelError(f"the adapter's patterns are {patterns!r}, not a mapping; get the adapter again")
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ModelError(f"the adapter's pattern {pattern!r} is no regular expression: {error}") from error
    return usual


def _target(
    module: str, a: str, b: str, scale: float, shape_a: list[int], shape_b: list[int], *, transposed: bool
) -> Target:
    """Shapes as `[rank, inputs]` and `[outputs, rank]`."""
    if len(shape_a) != 2 or len(shape_b) != 2:
        raise UnsupportedModelError(
            f"the adapter's tensors for {module} are {shape_a} and {shape_b}; only linear layers are supported"
        )
    if shape_a[0] != shape_b[1]:
        raise ModelError(
            f"the adapter's A {shape_a} and B {shape_b} for {module} are of two ranks; get the adapter again"
        )
    return Target(
        module=module,
        a=a,
        b=b,
        scale=scale,
        rank=shape_a[0],
        inputs=shape_a[1],
        outputs=shape_b[0],
        transposed=transposed,
    )


Pair = tuple[str, str, list[int], list[int]]


def _pairs(folder: Path, kind: str) -> tuple[Path, dict[str, Pair]]:
    """The tensor file, and module -> names and shapes of A and B."""
    file = folder / _FILES[kind]
    if not file.is_file():
        pickled = " (pickled weights are not loaded)" if list(folder.glob("*.bin")) else ""
        raise ModelError(f"{folder} has no {file.name}{pickled}; save the adapter as safetensors")
    endings = {"peft": (".lora_A.weight", ".lora_B.weight"), "mlx-lm": (".lora_a", ".lora_b")}[kind]
    found: dict[str, dict[str, str]] = {}
    header = _header(file)
    for name, entry in header.items():
        end = next((x for x in endings if name.endswith(x)), None)
        if end is None:
            raise UnsupportedModelError(
                f"the adapter holds {name}, which is no matrix of a LoRA on a linear layer; train a plain LoRA adapter"
            )
        if entry["dtype"] not in _FLOATS:
            raise UnsupportedModelError(
                f"the adapter holds {name} in {entry['dtype']}; save it in {', '.join(_FLOATS)}"
            )
        found.setdefault(name.removesuffix(end).removeprefix("base_model.model."), {})[end] = name
    if not found:
        raise ModelError(f"{file} holds no tensors, so nothing would be applied; get the adapter again")
    pairs: dict[str, Pair] = {}
    for module, both in found.items():
        lacking = [end for end in endings if end not in both]
        if lacking:
            raise ModelError(f"the adapter lacks {module}{lacking[0]}; get the adapter again")
        a, b = (both[end] for end in endings)
        pairs[module] = (a, b, [*header[a]["shape"]], [*header[b]["shape"]])
    return file, pairs


def _header(file: Path) -> dict[str, Any]:
    """The entries of a whole safetensors file, by tensor name; ModelError when it is damaged."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError("its header is cut off")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 0  # the tensors lie side by side, in any order
        for x in sorted(header.values(), key=lambda x: x["data_offsets"]):
            low, high = x["data_offsets"]
            count, itemsize = math.prod(x["shape"]), _FLOATS.get(x["dtype"])
            if low != end or min(x["shape"], default=1) < 1 or (itemsize and high - low != count * itemsize):
                raise ValueError("its header does not fit its tensors")
            end = high
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes, its header asks for {8 + length + end}")
        return header
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} is damaged: {error}; get the adapter again") from error
