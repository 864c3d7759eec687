"""The one file that touches mlx-lm: load a checkpoint whole, and run it with our attention.

Attention enters where mlx-lm hands a quantized cache to its own attention: a cache object of ours per layer carries
`bits`, returns an opaque handle from `update_and_fetch`, and `quantized_scaled_dot_product_attention` is replaced by a
wrapper that gives handles to us and everything else to mlx-lm. Masks that a model makes are not used: the visibility
rule decides. A start-up self-test refuses a model by name when a layer did not reach us, or the logits are not those
of its own attention.

Positions travel as `cache.offset`. One sequence: tokens `[1, N]` and a number. Several in one step: tokens `[N, 1]` and
an offset per row, where the self-test found that the model takes that; else one sequence after another.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from mlx.core import array
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import base as mlx_lm_base
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import load_model as mlx_lm_load_model
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import logging as transformers_logging

from kvarn.adapter import read_adapter
from kvarn.backend import LoadOptions
from kvarn.backends.mlx.adapter import apply_adapter
from kvarn.backends.mlx.config import check_rope, mlx_lm_overrides
from kvarn.checkpoint import check_files, check_memory, eos_token_ids, first_line
from kvarn.errors import BackendError, CapacityError, CheckpointError, ModelError, UnsupportedModelError, UsageError
from kvarn.rope_scaling import apply, describe

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

_BITS = object()  # what our caches give as `bits`; nothing can compute with it
_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    NotImplementedError,
    UnsupportedModelError,
)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What one layer hands to attention: q `[N, H, D]`, k and v `[N, Hk, D]`, N tokens of one or more sequences."""

    layer: int
    query: array
    key: array
    value: array
    scale: float
    masked: bool  # the model made a mask of its own instead of asking the cache for one


Hook = Callable[[Attention], array]  # -> [N, H, D]


class _Handle:
    """A layer's fresh keys and values on their way to our attention; whatever else reads them is refused.

    Their dtype may be read, and they may be cast: phi and stablelm compute attention in float32 and cast its output
    back to the values' dtype. Our attention computes in float32 anyway.
    """

    def __init__(self, layer: int, keys: array, values: array, hook: Hook) -> None:
        self._layer, self._keys, self._values, self._hook = layer, keys, values, hook
        self.dtype = values.dtype

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModelError(f"layer {self._layer} reads its cache ({name}) outside of our attention")

    def astype(self, _: mx.Dtype) -> "_Handle":
        """The same handle."""
        return self

    def attend(self, query: array, scale: float, mask: Any) -> array:
        """`[B, H, L, D]` in and out; B * L is the number of tokens."""
        batch, heads, length, _ = query.shape

        def tokens(x: array) -> array:
            return x.swapaxes(1, 2).flatten(0, 1)

        call = Attention(
            layer=self._layer,
            query=tokens(query),
            key=tokens(self._keys),
            value=tokens(self._values),
            scale=float(scale),
            masked=mask is not None,
        )
        out = self._hook(call).reshape(batch, length, heads, -1)
        return out.swapaxes(1, 2).astype(query.dtype)


class _Cache:
    """One layer's cache for one forward pass, as far as mlx-lm's model code looks at it."""

    bits = _BITS
    group_size = 0

    def __init__(self, layer: int, offset: int | array, hook: Hook) -> None:
        self.offset = offset
        self._layer, self._hook = layer, hook

    def update_and_fetch(self, keys: array, values: array) -> tuple[_Handle, _Handle]:
        """The handle stands for the keys and for the values."""
        handle = _Handle(self._layer, keys, values, self._hook)
        return handle, handle

    def make_mask(self, *_: Any, **__: Any) -> None:
        """No mask: the visibility rule decides."""


_mlx_lm_attention = mlx_lm_base.quantized_scaled_dot_product_attention


def _attention(
    queries: array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: Any = 8
) -> array:
    """What mlx-lm calls for caches that have `bits`: ours, or its own quantized ones."""
    if not isinstance(q_keys, _Handle):
        theirs: array = _mlx_lm_attention(queries, q_keys, q_values, scale, mask, group_size, bits)
        return theirs
    if q_values is not q_keys:
        raise UnsupportedModelError("a layer mixes keys and values of two caches")
    handle: _Handle = q_keys
    return handle.attend(queries, scale, mask)


mlx_lm_base.quantized_scaled_dot_product_attention = _attention


class _Head:
    """Keeps the output matrix from running for tokens whose logits nobody wants."""

    def __init__(self, module: Any) -> None:
        self.rows: list[int] | None = None
        for name, child in module.named_modules():
            if isinstance(child, (Embedding, QuantizedEmbedding)):
                self._wrap(child, "as_linear")
            elif name.split(".")[-1] in ("lm_head", "embed_out") and isinstance(child, (Linear, QuantizedLinear)):
                self._wrap(child, "__call__")

    def _wrap(self, child: Module, method: str) -> None:
        kind = type(child)
        inner = getattr(kind, method)

        def narrowed(module: Any, hidden: array) -> Any:
            return inner(module, self.narrow(hidden))

        child.__class__ = type(kind.__name__, (kind,), {method: narrowed})

    def narrow(self, x: array) -> array:
        """Hidden states or logits `[B, L, X]` -> `[1, R, X]` of the wanted rows, once."""
        if self.rows is None or x.ndim != 3:
            return x
        rows, self.rows = self.rows, None
        return x.flatten(0, 1)[mx.array(rows, dtype=mx.int32)][None]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint on its device. `batched`: several sequences run in one pass, each row with its own position."""

    module: Any
    head: _Head
    config: Mapping[str, Any]
    dtype: mx.Dtype
    device: str
    weight_bytes: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    batched: bool = False

    @property
    def num_layers(self) -> int:
        """How many layers mlx-lm's model has, each with a cache of its own."""
        return len(self.module.layers)

    def own_logits(self, tokens: list[int]) -> array:
        """Logits `[N, vocab]` of tokens from position 0 on, with the model's own attention."""
        return _logits(self.module(mx.array([tokens])))[0]

    def kept(self) -> list[tuple[str, int | None]]:
        """What mlx-lm itself would keep for each layer: `keys` or the name of something else, and its window.

        Empty where the model leaves it to mlx-lm, which then keeps every key.
        """
        make = getattr(self.module, "make_cache", None)
        kept: list[tuple[str, int | None]] = []
        for cache in make() if make is not None else []:
            plain = type(cache) in (KVCache, RotatingKVCache)
            window = cache.max_size if isinstance(cache, RotatingKVCache) else None
            kept.append(("keys" if plain else type(cache).__name__, window))
        return kept

    def forward(self, tokens: list[int], positions: list[int], rows: list[int], hook: Hook) -> array:
        """Run tokens of one sequence at consecutive positions, or of several (then `batched` must hold).

        Returns logits `[len(rows), vocab]` of the tokens at these indices, not computed yet.
        """
        first, count = positions[0], len(tokens)
        single = positions == list(range(first, first + count))
        offset = first if single else mx.array(positions, dtype=mx.int32)
        # An offset array of one row per token; a model that changes it in place must not reach the other layers.
        cache = [_Cache(i, offset if single else mx.array(offset), hook) for i in range(self.num_layers)]
        ids = mx.array(tokens, dtype=mx.int32).reshape((1, count) if single else (count, 1))
        self.head.rows = rows
        try:
            return self.head.narrow(_logits(self.module(ids, cache=cache)))[0]
        finally:
            self.head.rows = None


def _logits(output: Any) -> array:
    """Logits `[B, L, vocab]`; olmo gives its cache back beside them."""
    logits: array = output[0] if isinstance(output, tuple) else output
    return logits


def read_config(model_dir: Path, rope_scaling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json with a RoPE override, and with the defaults that transformers knows for its model type.

    ModelError when it cannot be used, UnsupportedModelError when the override is not what would be computed.
    """
    return _read_configs(model_dir, rope_scaling)[1]


def _read_configs(model_dir: Path, rope_scaling: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json with the override alone, and with transformers' defaults too."""
    transformers_logging.set_verbosity_error()
    path = model_dir / "config.json"
    raw = _read_json(model_dir)
    known = raw.get("model_type") in CONFIG_MAPPING  # mlx-lm may know it otherwise, and says so if not
    full = _with_defaults(model_dir, raw, f"{path} cannot be used") if known else raw
    if rope_scaling is None:
        return raw, full
    full = raw = apply(raw, rope_scaling, full)
    if known:
        with tempfile.TemporaryDirectory() as folder:  # read as if config.json said it
            (Path(folder) / path.name).write_text(json.dumps(raw))
            full = _with_defaults(Path(folder), raw, f"{raw['model_type']} does not take this --rope-scaling")
        full["_name_or_path"] = str(model_dir)
    if describe(full) != describe(raw):
        raise UnsupportedModelError(f"transformers' {raw['model_type']} does not take this --rope-scaling")
    return raw, full


def _with_defaults(folder: Path, raw: Mapping[str, Any], fault: str) -> dict[str, Any]:
    try:
        full = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:  # each family checks its fields in its own way
        raise ModelError(f"{fault}: {first_line(error)}") from error
    return {**raw, **{name: value for name, value in full.items() if value is not None or name not in raw}}


def _other_names(raw: Mapping[str, Any]) -> Mapping[str, str]:
    """Old names of fields -> the names under which transformers writes them now."""
    kind = raw.get("model_type")
    return CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}


def _read_json(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelError(f"{model_dir} has no config.json; is this the folder of a model?")
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise ValueError("it names no model_type")
        return content
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be used: {first_line(error)}") from error


def load_model(model_dir: Path, options: LoadOptions) -> LoadedModel:
    """Load every tensor of a checkpoint, or refuse by name.

    CheckpointError: a tensor that is missing, short, unexpected or of another shape; ModelError: anything else that
    keeps mlx-lm from loading it, UnsupportedModelError: a checkpoint that brings its own code.
    """
    shards = check_files(model_dir)
    named = {shard.name for shard in shards}
    stray = sorted({path.name for path in model_dir.glob("model*.safetensors")} - named)
    if stray:
        raise CheckpointError(f"{model_dir} holds {stray[0]}, which its index does not name; move it away")
    raw, config = _read_configs(model_dir, options.rope_scaling)
    adapter = None if options.adapter is None else read_adapter(options.adapter)
    if "model_file" in config:
        raise UnsupportedModelError(
            f"{model_dir.name} brings code of its own ({config['model_file']}), which is never run; use another model"
        )
    device = _device(options.device)
    check_memory(shards, _itemsize(options.dtype, config, device), available_bytes(device), device)
    with mx.stream(mx.Device(mx.gpu if device == "gpu" else mx.cpu)):
        try:
            own = _read_json(model_dir)
            overrides = {name: x for name, x in raw.items() if name not in own or own[name] != x}
            overrides |= mlx_lm_overrides(raw, config, _other_names(raw))
            module, _ = mlx_lm_load_model(model_dir, strict=True, model_config=overrides)
            vocab_size = _logits(module(mx.zeros((1, 1), mx.int32))).shape[-1]  # a shape alone computes nothing
        except SystemExit as error:  # olmo.py leaves the process when a package is missing
            raise ModelError(f"{model_dir.name} cannot be loaded: mlx-lm lacks a package for it") from error
        except Exception as error:  # whatever a family's own code raises
            if "allocate" in str(error):
                raise CapacityError(
                    f"the weights of {model_dir.name} do not fit on {device}: {_named(error)}"
                ) from error
            kind = CheckpointError if _about_tensors(error) else ModelError
            raise kind(f"{model_dir.name} cannot be loaded: {_named(error)}") from error
        check_rope(config, module)
        dtype = _cast(module, options.dtype, device)
        if adapter is not None:
            apply_adapter(module, adapter, dtype)
        mx.eval(_weights(module))
    return LoadedModel(
        module=module,
        head=_Head(module),
        config=config,
        dtype=dtype,
        device=device,
        weight_bytes=sum(x.nbytes for x in _weights(module)),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids(model_dir, config),
    )


def _weights(module: Any) -> list[array]:
    tensors: Any = tree_flatten(module.parameters())
    return [x for _, x in tensors]


def _about_tensors(error: Exception) -> bool:
    """mlx raises the same ValueError for a config that it cannot use and for tensors that do not fit."""
    return isinstance(error, (OSError, RuntimeError)) or any(x in str(error) for x in (" parameters", " shape "))


def _named(error: BaseException) -> str:
    """mlx-lm lists tensors over many lines; the first line and the first few names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])[:300].rstrip(".,") or type(error).__name__


def available_bytes(device: str) -> int:
    """Memory that is free on a device."""
    if device == "gpu":
        return max(int(mx.device_info()["max_recommended_working_set_size"]) - mx.get_active_memory(), 0)
    return int(psutil.virtual_memory().available)


def _itemsize(name: str, config: Mapping[str, Any], device: str) -> int:
    """Bytes of a float weight as it will be held; the fewest where neither the user nor config.json says."""
    if name == "auto":
        name = str(config.get("dtype", config.get("torch_dtype")))
        name = "float32" if name == "float16" and device == "cpu" else name
    return 4 if name == "float32" else 2


def _device(name: str) -> str:
    gpu = mx.is_available(mx.gpu)
    if name == "auto":
        return "gpu" if gpu else "cpu"
    if name not in ("cpu", "gpu") or (name == "gpu" and not gpu):
        raise BackendError(f"device {name!r} cannot be used with MLX here; use --device {'gpu or ' if gpu else ''}cpu")
    return name


def _cast(module: Any, name: str, device: str) -> mx.Dtype:
    """Bring the floating-point weights (and the scales of quantized ones) to one dtype; `auto` keeps the model's."""
    if name not in ("auto", *DTYPES):
        raise UsageError(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    held: dict[mx.Dtype, int] = {}
    for x in _weights(module):
        held[x.dtype] = held.get(x.dtype, 0) + x.size
    own = max((x for x in held if x in DTYPES.values()), key=lambda x: held[x], default=mx.float32)
    # As on torch: float16 is slower than float32 on a CPU, and less exact.
    usual = mx.float32 if own == mx.float16 and device == "cpu" else own
    dtype = DTYPES.get(name, usual)
    keep = getattr(module, "cast_predicate", lambda _: True)
    if dtype != own or name != "auto":

        def cast(path: str, x: array) -> array:
            return x.astype(dtype) if x.dtype in DTYPES.values() and keep(path) else x

        module.update(tree_map_with_path(cast, module.parameters()))
    return dtype
