"""The one file that touches transformers: load a checkpoint whole, and run it with our attention.

Attention enters through `AttentionInterface` under the name `kvarn`; the step travels through the model as a keyword.
A start-up self-test runs a few tokens through the model's own attention and through ours, in one piece and in two,
reads each layer's window off the model's own mask, and refuses the model by name when a layer did not reach the hook,
passed a keyword that we do not honour, or gave other logits.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.utils import logging as transformers_logging

from kvarn.adapter import read_adapter
from kvarn.backend import LoadOptions
from kvarn.backends.triton.adapter import apply_adapter
from kvarn.backends.triton.cpu.linear import pack_linears
from kvarn.checkpoint import check_files, check_memory, eos_token_ids, first_line
from kvarn.errors import (
    BackendError,
    CapacityError,
    CheckpointError,
    KvarnError,
    ModelError,
    UnsupportedModelError,
    UsageError,
)
from kvarn.model_plan import Layer, ModelPlan
from kvarn.rope_scaling import apply, describe, frequencies

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
    mask_window: int | None  # what the model's own mask shows, in the self-test only: 0 is everything before
    unknown: tuple[str, ...]  # names of keywords that are not honoured


Hook = Callable[[Attention], Tensor]  # -> [N, H, D]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: `[1, heads, N, D]` in, `[1, N, H, D]` out."""
    hook: Hook | None = keywords.pop("kvarn_hook", None)
    if hook is None:
        raise UnsupportedModelError(
            f"{module.config.model_type} does not hand our step on to its attention, so it cannot use our cache"
        )
    scale = keywords.pop("scaling", None)
    window, softcap, sinks = (keywords.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    unknown = [name for name, x in keywords.items() if name not in _NEUTRAL and x is not None and x is not False]
    mask_window = None
    if attention_mask is not None and attention_mask.dtype == torch.int64 and attention_mask.numel() == 1:
        mask_window = int(attention_mask)
    elif attention_mask is not None:
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
        mask_window=mask_window,
        unknown=tuple(unknown),
    )
    return hook(call)[None], None


_FAR = 2**20  # a position beyond every window


def _probe_mask(mask_function: Callable[..., Tensor], device: Any, **keywords: Any) -> Tensor:
    """In place of a mask: the window that its rule shows, as one number in the shape of a mask.

    0 where a query sees everything up to itself, -1 where the rule is neither that nor a window.
    """
    windows = set()
    for query in (_FAR, _FAR - 7):
        keys = torch.arange(query + 2, device=device)
        try:
            zero, position = torch.zeros_like(keys[:1]), torch.full_like(keys[:1], query)
            visible = torch.as_tensor(mask_function(zero, zero, position, keys), device=device).expand(len(keys))
        except (IndexError, RuntimeError):  # a rule that looks at the tokens
            return torch.full((1, 1, 1, 1), -1, device=device)
        window = int(visible.sum())
        plain = bool(visible[query + 1 - window : query + 1].all())
        windows.add(-1 if window == 0 or not plain else 0 if window == query + 1 else window)
    return torch.full((1, 1, 1, 1), windows.pop() if len(windows) == 1 else -1, device=device)


AttentionInterface.register("kvarn", _attention)  # without a mask function of the same name models build no mask
AttentionInterface.register("kvarn_probe", _attention)
AttentionMaskInterface.register("kvarn_probe", _probe_mask)


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

        rows = rows or [len(tokens) - 1]
        output = self.module(
            input_ids=tensor(tokens)[None],
            position_ids=tensor(positions)[None],
            use_cache=False,
            logits_to_keep=tensor(rows),
            kvarn_hook=hook,
        )
        logits: Tensor = output.logits[0]
        return logits if len(logits) == len(rows) else logits[rows]  # some families return every token's logits

    @torch.inference_mode()
    def forward_rows(self, tokens: Tensor, positions: Tensor, hook: Hook) -> Tensor:
        """Run int32 `[B]` tokens at positions, on the device; logits `[B, vocab]` of all. Reads nothing on the host."""
        output = self.module(
            input_ids=tokens.long()[None], position_ids=positions.long()[None], use_cache=False, kvarn_hook=hook
        )
        logits: Tensor = output.logits[0]
        return logits


def read_config(model_dir: Path, rope_scaling: Mapping[str, Any] | None = None) -> Any:
    """The model's configuration as transformers understands it, with a RoPE override.

    ModelError when transformers does not understand it, or the weights are quantized; UnsupportedModelError when the
    override is not what the model would compute with.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    path = model_dir / "config.json"
    if not path.is_file():
        raise ModelError(f"{model_dir} has no config.json; is this the folder of a model?")
    config = _auto_config(model_dir, f"{path} cannot be used")
    if rope_scaling is not None:
        wanted = apply(json.loads(path.read_text()), rope_scaling, config.to_dict())
        with tempfile.TemporaryDirectory() as folder:  # read as if config.json said it
            (Path(folder) / path.name).write_text(json.dumps(wanted))
            config = _auto_config(Path(folder), f"{config.model_type} does not take this --rope-scaling")
        config.name_or_path = str(model_dir)
        if describe(config.to_dict()) != describe(wanted):
            raise UnsupportedModelError(f"transformers' {config.model_type} does not take this --rope-scaling")
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise UnsupportedModelError(
            f"the weights in {model_dir} are quantized ({method or 'quantization_config in config.json'}), "
            "which is not supported; use the model in float16 or bfloat16"
        )
    return config


def _auto_config(folder: Path, fault: str) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each family checks its fields in its own way
        raise ModelError(f"{fault}: {first_line(error)}") from error


def load_model(model_dir: Path, options: LoadOptions) -> LoadedModel:
    """Load every tensor of a checkpoint, or refuse by name.

    CheckpointError: a tensor that is missing, short, unexpected or of another shape; ModelError: anything else that
    keeps transformers from loading it.
    """
    shards = check_files(model_dir)
    config = read_config(model_dir, options.rope_scaling)
    adapter = None if options.adapter is None else read_adapter(options.adapter)
    device = _device(options.device)
    dtype = _dtype(options.dtype, config, device)
    check_memory(shards, dtype.itemsize, available_bytes(device), device)
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # refused below, with their names
            output_loading_info=True,
        )
        module = module.eval().to(device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"the weights of {model_dir.name} do not fit on {device}: {first_line(error)}") from error
    except Exception as error:  # whatever a family's own code raises
        kind = CheckpointError if isinstance(error, (RuntimeError, SafetensorError)) else ModelError
        raise kind(f"{model_dir.name} cannot be loaded: {first_line(error)}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(x if isinstance(x, str) else " ".join(map(str, x)) for x in info.get(what, ()))
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(
                f"the checkpoint in {model_dir} does not fit its config.json: {what.replace('_', ' ')}: {listed}; "
                "get the model again"
            )
    head = module.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{model_dir.name} has no language-model head; is this a model that writes text?")
    if options.rope_scaling is not None:
        _check_rope(module, config.to_dict())
    if adapter is not None:
        apply_adapter(module, adapter)
    unique = {p.data_ptr(): p.nbytes for p in [*module.parameters(), *module.buffers()]}
    vocab_size = head.weight.shape[0]
    pack_linears(module)
    return LoadedModel(
        module=module,
        config=config.to_dict(),
        dtype=dtype,
        device=device,
        weight_bytes=sum(unique.values()),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids(model_dir, config.to_dict()),
    )


def _check_rope(module: Any, config: Mapping[str, Any]) -> None:
    """UnsupportedModelError unless every rotary table of the model is the one that its configuration asks for."""
    tables = [x for x in module.modules() if isinstance(getattr(x, "inv_freq", None), Tensor)]
    rope = describe(config)
    for table in tables:
        want, factor = frequencies(rope, round(2 * len(table.inv_freq) / rope["partial_rotary_factor"]))
        got = table.inv_freq.double().cpu().numpy()
        if (
            got.shape != want.shape
            or abs(got / want - 1).max() > 1e-4
            or getattr(table, "attention_scaling", 1.0) != factor
        ):
            break
    else:
        if tables:
            return
    raise UnsupportedModelError(f"transformers' {config['model_type']} does not rotate by this --rope-scaling")


def available_bytes(device: str) -> int:
    """Memory that is free on a device."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BackendError(f"device {name!r} cannot be used: {first_line(error)}; try --device cpu") from error
    return name


def _dtype(name: str, config: Any, device: str) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UsageError(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    own = getattr(config, "dtype", None) or torch.float32
    # float16 arithmetic is emulated on most CPUs: slower than float32, and less exact.
    return torch.float32 if own not in DTYPES.values() or (own == torch.float16 and device == "cpu") else own


def self_test(model: LoadedModel, plan: ModelPlan, reference_hook: Hook) -> None:
    """Refuse the model unless every layer reaches the hook and a few tokens give the logits of its own attention.

    They run in one piece and in two, so that a state beside attention, or positions that a family counts by itself,
    show. `reference_hook` answers a call exactly, from position 0. Raises UnsupportedModelError.
    """
    name = str(model.config.get("model_type", "this model"))
    tokens = [i * 7919 % model.vocab_size for i in range(1, 9)]
    seen: dict[int, Attention] = {}

    def spy(call: Attention) -> Tensor:
        past = seen.get(call.layer)
        if past is not None:
            call = replace(
                call,
                query=torch.cat([past.query, call.query]),
                key=torch.cat([past.key, call.key]),
                value=torch.cat([past.value, call.value]),
            )
        seen[call.layer] = call
        new = len(call.query) - (0 if past is None else len(past.query))
        return reference_hook(call)[-new:]

    def run(implementation: str, *pieces: range) -> Tensor:
        seen.clear()
        model.module.set_attn_implementation(implementation)
        return torch.cat([model.forward([tokens[i] for i in p], [*p], [*range(len(p))], spy) for p in pieces])

    whole = range(len(tokens))
    try:
        want = run("eager", whole)
        probed = run("kvarn_probe", whole)
        calls = dict(seen)
        got = run("kvarn", whole[:3], whole[3:])
    except KvarnError:
        raise
    except Exception as error:  # whatever a family's own code raises
        raise UnsupportedModelError(
            f"{name} does not run with attention of our own: {type(error).__name__}: {first_line(error)}"
        ) from error
    missed = [layer.index for layer in plan.layers if layer.index not in calls]
    if missed:
        raise UnsupportedModelError(
            f"{name} answers without reaching our attention in {len(missed)} of {len(plan.layers)} layers"
        )
    for layer in plan.layers:
        check_call(calls[layer.index], layer, plan.max_context, len(tokens), name)
    limit = 1e-3 if model.dtype == torch.float32 else 5e-2
    for logits, where in ((probed, "through our attention"), (got, "when its tokens come in two pieces")):
        distance = float((logits.float() - want.float()).norm() / want.float().norm())
        if not distance < limit:
            raise UnsupportedModelError(f"{name} gives other logits {where} (relative error {distance:.2g})")


def check_call(call: Attention, layer: Layer, max_context: int, num_tokens: int, name: str) -> None:
    """Refuse what a layer asks of attention when it is not what the plan says, by name."""
    where = f"layer {layer.index} of {name}"
    if call.unknown:
        raise UnsupportedModelError(f"{where} passes {', '.join(call.unknown)} to attention, which is not honoured")
    if len(call.query) != num_tokens:
        raise UnsupportedModelError(f"{where} runs attention more than once for a token, which is not supported")
    got = {"key": tuple(call.key.shape[1:]), "value": tuple(call.value.shape[1:])}
    want = (layer.num_kv_heads, layer.head_dim)
    for what, shape in got.items():
        if shape != want:
            raise UnsupportedModelError(
                f"{where} has {what}s of [kv heads, head_dim] {list(shape)}, config.json says {list(want)}"
            )
    if layer.kind == "sealed" and (call.softcap is not None or call.sinks is not None):
        raise UnsupportedModelError(f"{where} uses a soft cap or sinks that config.json hides")
    if call.mask_window == -1:
        raise UnsupportedModelError(f"{where} masks attention by a rule that is neither causal nor a window")
    for window in (call.window, call.mask_window):
        if window and window < max_context and window != layer.window:
            raise UnsupportedModelError(f"{where} has a window of {window} tokens, planned was {layer.window}")
    if layer.window is not None and call.mask_window != layer.window:
        raise UnsupportedModelError(f"{where} does not mask the window of {layer.window} tokens in its config.json")
