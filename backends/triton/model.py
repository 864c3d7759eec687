"""The one file that touches transformers: load a checkpoint whole, and run it with our attention.

Attention enters through `AttentionInterface` under the name `kvarn`; the step travels through the model as a keyword.
A start-up self-test runs a few tokens through the model's own attention and through ours, and refuses the model by
name when a layer did not reach the hook, passed a keyword that we do not honour, or gave other logits.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from kvarn.backend import LoadOptions
from kvarn.errors import BackendError, CheckpointError, ModelError, UnsupportedModelError, UsageError
from kvarn.model_plan import ModelPlan

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Keywords that models hand to attention and that change nothing here: batching, masks and caches of transformers' own.
_NEUTRAL = {
    "attention_mask",
    "cache_position",
    "cache",
    "dropout",
    "is_causal",
    "layer_idx",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_bias",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What one layer hands to attention, without the batch axis: q `[N, H, D]`, k and v `[N, Hk, D]`."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    unknown: tuple[str, ...]  # names of keywords that are not honoured


Hook = Callable[[Attention], Tensor]  # -> [N, H, D]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: `[1, heads, N, D]` in, `[1, N, H, D]` out."""
    hook: Hook = keywords.pop("kvarn_hook")
    scale = keywords.pop("scaling", None)
    window, softcap, sinks = (keywords.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    unknown = [name for name, x in keywords.items() if name not in _NEUTRAL and x is not None and x is not False]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if keywords.get("is_causal") is False or keywords.get("position_bias") is not None:
        unknown.append("is_causal=False" if keywords.get("is_causal") is False else "position_bias")
    call = Attention(
        layer=module.layer_idx,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=window,
        softcap=softcap,
        sinks=sinks,
        unknown=tuple(unknown),
    )
    return hook(call)[None], None


AttentionInterface.register("kvarn", _attention)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint on its device."""

    module: Any
    config: Mapping[str, Any]
    dtype: torch.dtype
    device: str
    weight_bytes: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @torch.inference_mode()
    def forward(self, tokens: list[int], positions: list[int], rows: list[int], hook: Hook) -> Tensor:
        """Run tokens at positions; logits `[len(rows), vocab]` of the tokens at these indices, or of the last."""

        def tensor(x: list[int]) -> Tensor:
            return torch.tensor(x, device=self.device)

        output = self.module(
            input_ids=tensor(tokens)[None],
            position_ids=tensor(positions)[None],
            use_cache=False,
            logits_to_keep=tensor(rows or [len(tokens) - 1]),
            kvarn_hook=hook,
        )
        logits: Tensor = output.logits[0]
        return logits


def read_config(model_dir: Path) -> Any:
    """The model's configuration as transformers understands it; ModelError when it does not."""
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model_dir / 'config.json'} cannot be used: {_first_line(error)}") from error


def load_model(model_dir: Path, options: LoadOptions) -> LoadedModel:
    """Load every tensor of a checkpoint, or refuse by name.

    CheckpointError: a tensor that is missing, short, unexpected or of another shape; ModelError: anything else that
    keeps transformers from loading it.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _check_files(model_dir)
    config = read_config(model_dir)
    device = _device(options.device)
    dtype = _dtype(options.dtype, config, device)
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        kind = CheckpointError if isinstance(error, (RuntimeError, SafetensorError)) else ModelError
        raise kind(f"{model_dir.name} cannot be loaded: {_first_line(error)}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(map(str, info.get(what, ())))
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(
                f"the checkpoint in {model_dir} does not fit its config.json: {what.replace('_', ' ')}: {listed}; "
                "get the model again"
            )
    module = module.eval().to(device)
    unique = {p.data_ptr(): p.nbytes for p in [*module.parameters(), *module.buffers()]}
    return LoadedModel(
        module=module,
        config=config.to_dict(),
        dtype=dtype,
        device=device,
        weight_bytes=sum(unique.values()),
        vocab_size=module.get_output_embeddings().weight.shape[0],
        eos_token_ids=_eos(model_dir, config),
    )


def _check_files(model_dir: Path) -> None:
    """Every shard that the index names is there and as long as its header says."""
    shards = sorted(model_dir.glob("*.safetensors"))
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {_first_line(error)}; get the model again") from error
        missing = sorted(named - {shard.name for shard in shards})
        if missing:
            raise CheckpointError(f"{model_dir} lacks {', '.join(missing[:3])}, which its index names")
        shards = [shard for shard in shards if shard.name in named]
    if not shards:
        raise CheckpointError(f"{model_dir} holds no .safetensors weights; pickled weights are not loaded")
    for shard in shards:
        try:
            with safe_open(shard, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard} is damaged: {_first_line(error)}; get the model again") from error


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BackendError(f"device {name!r} cannot be used: {_first_line(error)}; try --device cpu") from error
    return name


def _dtype(name: str, config: Any, device: str) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UsageError(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    own = getattr(config, "dtype", None) or torch.float32
    # float16 arithmetic is emulated on most CPUs: slower than float32, and less exact.
    return torch.float32 if own not in DTYPES.values() or (own == torch.float16 and device == "cpu") else own


def _eos(model_dir: Path, config: Any) -> tuple[int, ...]:
    ids: Any = None
    if (model_dir / "generation_config.json").exists():
        ids = GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id
    ids = config.eos_token_id if ids is None else ids
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def self_test(model: LoadedModel, plan: ModelPlan, reference_hook: Hook) -> None:
    """Refuse the model unless every layer reaches the hook and a few tokens give the logits of its own attention.

    `reference_hook` answers a call exactly. Raises UnsupportedModelError.
    """
    name = model.config.get("model_type", "this model")
    tokens = [i * 7919 % model.vocab_size for i in range(1, 9)]
    seen: dict[int, Attention] = {}

    def spy(call: Attention) -> Tensor:
        seen[call.layer] = call
        return reference_hook(call)

    positions = list(range(len(tokens)))
    try:
        model.module.set_attn_implementation("eager")
        want = model.forward(tokens, positions, positions, spy)
        model.module.set_attn_implementation("kvarn")
        got = model.forward(tokens, positions, positions, spy)
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{name} does not run with attention of our own: {type(error).__name__}: {_first_line(error)}"
        ) from error
    missed = [layer.index for layer in plan.layers if layer.index not in seen]
    if missed:
        raise UnsupportedModelError(
            f"{name} answers without reaching our attention in {len(missed)} of {len(plan.layers)} layers"
        )
    for layer in plan.layers:
        check_call(seen[layer.index], layer.num_kv_heads, layer.head_dim, layer.window, name)
        call = seen[layer.index]
        if layer.kind == "sealed" and (call.softcap is not None or call.sinks is not None):
            raise UnsupportedModelError(
                f"{name} uses a soft cap or sinks in layer {layer.index} that config.json hides"
            )
    distance = float((got.float() - want.float()).norm() / want.float().norm())
    if not distance < (1e-3 if model.dtype == torch.float32 else 5e-2):
        raise UnsupportedModelError(f"{name} gives other logits through our attention (relative error {distance:.2g})")


def check_call(call: Attention, num_kv_heads: int, head_dim: int, window: int | None, name: str) -> None:
    """Refuse what a layer asks of attention when it is not what the plan says, by name."""
    if call.unknown:
        raise UnsupportedModelError(f"{name} passes {', '.join(call.unknown)} to attention, which is not honoured here")
    got = {"key": tuple(call.key.shape[1:]), "value": tuple(call.value.shape[1:])}
    want = (num_kv_heads, head_dim)
    for what, shape in got.items():
        if shape != want:
            raise UnsupportedModelError(
                f"layer {call.layer} of {name} has {what}s of [kv heads, head_dim] {list(shape)}, "
                f"config.json says {list(want)}"
            )
    if window is not None and call.window not in (None, window):
        raise UnsupportedModelError(f"layer {call.layer} of {name} has a window of {call.window}, planned {window}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
