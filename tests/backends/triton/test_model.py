"""Model families from transformers: each answers as its own forward does, or is refused by name; damaged checkpoints.

FAMILIES is the source of the table in docs/torch-families.md; a test holds the two together.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_contract import TENSOR, CheckpointContract, copy, save_in_shards
from small_models import Fed, distance, edit, feed, run
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kvarn.backend import LoadOptions
from kvarn.backends.triton import backend as torch_backend
from kvarn.backends.triton.backend import TorchBackend
from kvarn.errors import (
    BackendError,
    CheckpointError,
    ModelError,
    UnsupportedModelError,
    UsageError,
)
from kvarn.format import Preset

EXACT = 2e-5  # relative error of the logits under `exact`, all in float32, against the model's own eager forward
SEALED = 0.01  # the same under kvarn_k8v8_g64; a mixture of experts may route a token elsewhere
KVARN, WIDE = Preset(), Preset(key_bits=8, value_bits=8, tile_tokens=64)
NUM_TOKENS = 300
DOC = Path(__file__).resolve().parents[3] / "docs" / "torch-families.md"

ALL = "all layers sealed"
SLIDING = "sliding window of 100 tokens"
NOT_HANDED_ON = "does not hand our step on to its attention"
NOT_REACHED = "answers without reaching our attention"
STATE = "keeps a recurrent state"
MLA = "uses multi-head latent attention (MLA)"
ALIBI = "uses ALiBi position biases"


@dataclass(frozen=True)
class Family:
    """One model type with some settings, and what becomes of it.

    kvarn and exact: ALL, "yes", or, with a colon, how far and why: the words after it stand in the plan's description
    or in the refusal. tolerance: of the logits under kvarn_k8v8_g64.
    """

    model_type: str
    kvarn: str = ALL
    exact: str = "yes"
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    tolerance: float = SEALED

    def __str__(self) -> str:
        return f"{self.model_type} {self.note}".strip()


def sealed(*model_types: str, tolerance: float = SEALED) -> list[Family]:
    return [Family(name, tolerance=tolerance) for name in model_types]


def refused(model_type: str, why: str, note: str = "", **config: Any) -> Family:
    return Family(model_type, f"refused: {why}", f"refused: {why}", note, config)


def exact_only(model_type: str, why: str, note: str = "", **config: Any) -> Family:
    return Family(model_type, f"refused: {why}", "yes", note, config)


def partly(model_type: str, why: str, note: str = "", tolerance: float = SEALED, **config: Any) -> Family:
    return Family(model_type, f"partly sealed: {why}", "yes", note, config, tolerance)


WINDOW: dict[str, Any] = {"sliding_window": 100}
FAMILIES = [
    # dense, full attention
    *sealed("llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "phi", "phi3", "starcoder2", "olmo", "olmo2"),
    *sealed("cohere", "smollm3", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "codegen", "opt", "biogpt", "ctrl"),
    *sealed("glm", "glm4", "helium", "ernie4_5", "exaone", "seed_oss", "hunyuan_v1_dense", "arcee", "apertus"),
    *sealed("nanochat", "internlm3", "persimmon", "bitnet", "jais2"),
    Family("granite", config={"attention_multiplier": 0.1}),
    *(
        Family("llama", note=f"with {rope['rope_type']} RoPE", config={"rope_parameters": {"rope_theta": 1e4, **rope}})
        for rope in (
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256},
        )
    ),
    # mixtures of experts
    *sealed("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "ernie4_5_moe", "minimax_m2", tolerance=0.15),
    *sealed("hunyuan_v1_moe", "phimoe", "flex_olmo", "dots1", tolerance=0.15),
    Family("granitemoe", config={"attention_multiplier": 0.1}, tolerance=0.15),
    # some layers with a window
    partly("gemma3_text", SLIDING, **WINDOW),
    partly("cohere2", SLIDING, **WINDOW),
    partly("exaone4", SLIDING, **WINDOW),
    partly("olmo3", SLIDING, **WINDOW),
    partly("cwm", SLIDING, **WINDOW),
    partly("qwen2", SLIDING, "with use_sliding_window", use_sliding_window=True, max_window_layers=2, **WINDOW),
    partly("qwen3", SLIDING, "with use_sliding_window", use_sliding_window=True, max_window_layers=2, **WINDOW),
    partly("gemma4_text", SLIDING, "with head_dim 128 in full attention", tolerance=0.05, **WINDOW),
    # nothing that a tile can hold
    exact_only("mistral", SLIDING, "with sliding_window", **WINDOW),
    exact_only("phi3", SLIDING, "with sliding_window", **WINDOW),
    exact_only("starcoder2", SLIDING, "with sliding_window", **WINDOW),
    exact_only("mixtral", SLIDING, "with sliding_window", **WINDOW),
    exact_only("gemma2", f"{SLIDING}, soft cap of 50.0 on the attention scores", **WINDOW),
    exact_only("gpt_oss", f"{SLIDING}, learned attention sinks", **WINDOW),
    exact_only("phi", "head_dim 80 is not one of 64, 128, 256, 512", "with head_dim 80", hidden_size=160),
    exact_only("granite_swa", "uses a soft cap or sinks that config.json hides", **WINDOW),
    # refused
    refused("phi3", "rope type 'longrope' depends on the length", "with longrope", rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
        "original_max_position_embeddings": 512, "partial_rotary_factor": 1.0}),
    refused("llama", "rope type 'dynamic' depends on the length", "with dynamic RoPE", rope_parameters={
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    *(refused(name, MLA) for name in ("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite")),
    *(refused(name, ALIBI) for name in ("bloom", "mpt")),
    refused("falcon", ALIBI, "with alibi", alibi=True),
    refused("stablelm", NOT_HANDED_ON),
    refused("nemotron", NOT_HANDED_ON),
    *(refused(name, NOT_REACHED) for name in ("falcon", "gpt_neo", "xglm", "gpt_neox_japanese", "openai-gpt")),
    *(refused(name, STATE) for name in ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "rwkv", "recurrent_gemma")),
    *(refused(name, STATE) for name in ("jamba", "bamba", "lfm2", "minimax", "qwen3_next", "qwen3_5_text")),
    refused("granitemoehybrid", STATE),
    refused("llama4_text", "layer type 'chunked_attention' is not supported"),
    refused("diffllama", "runs attention more than once for a token", num_key_value_heads=2),
    refused("doge", "passes attention_mask to attention"),
    refused("jetmoe", "has keys of [kv heads, head_dim] [2, 64], config.json says [1, 64]"),
    Family("moshi", f"refused: {SLIDING}", "refused: does not mask the window of 100 tokens", config=WINDOW),
    refused("gemma3n_text", "shares keys and values between layers"),
    refused("bert", "masks attention by a rule that is neither causal nor a window"),
    refused("t5", "encoder-decoder models are not supported"),
]  # fmt: skip

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "attention_hidden_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 1),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "d_ff", "ffn_hidden_size", "mlp_dim"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), 1024),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1),
    **{"vocab_size": 256, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32},
    **{"head_dim": 64, "kv_channels": 64, "v_head_dim": 64, "num_experts_per_tok": 2, "sliding_window": None},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# Where SMALL does not fit what a family checks.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 64, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_key_value_heads": 2},
    "deepseek_v3": {"num_key_value_heads": 2},
    "dots1": {"layer_types": ["full_attention"] * 4},
    "exaone4": {"sliding_window_pattern": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16},
    "gemma3_text": {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5, "sliding_window": 100,
        "intermediate_size": [128] * 10, "activation_sparsity_pattern": [0.0] * 10},
    "gemma4_text": {"global_head_dim": 128, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4_moe_lite": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 100},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 64, "n_groups": 1},
    "minicpm3": {"num_key_value_heads": 2},
    "moshi": {"sliding_window": 100, "ffn_dim": 256},
    "recurrent_gemma": {"attention_window_size": 100},
    "t5": {"d_kv": 64},
}  # fmt: skip


def build_config(family: Family) -> Any:
    cls = CONFIG_MAPPING[family.model_type]
    known = {f.name for f in dataclasses.fields(cls)} | set(cls.attribute_map)
    mapped = {cls.attribute_map.get(k, k): v for k, v in SMALL.items() if k in known}
    small = {k: v for k, v in mapped.items() if k in known}
    return cls(**{**small, **SPECIAL.get(family.model_type, {}), **family.config})


def build(family: Family, folder: Path) -> Any:
    """A model with random weights from a fixed seed, saved to `folder`."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    config = build_config(family)
    torch.manual_seed(0)
    if config.is_encoder_decoder:
        config.save_pretrained(folder)
        return None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02) if p.ndim < 2 else p.normal_(0, p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def load(folder: Path, preset: Preset | None, dtype: str = "float32") -> TorchBackend:
    return torch_backend.load(folder, preset, LoadOptions(dtype=dtype, device="cpu"))


@cache
def prompt(seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 250, NUM_TOKENS).tolist())


def assert_same_in_one_step(backend: TorchBackend, tolerance: float) -> None:
    """A prompt beside another sequence's later chunk, last logits only: what each gives alone."""
    backend.allocate(10, 10)
    alone, other = Fed(backend, prompt()), Fed(backend, prompt(1), first=5)
    want = [run(backend, alone.span(130))[0], run(backend, alone.span(60))[0], run(backend, other.span(90))[0]]
    backend.allocate(10, 10)
    one, two = Fed(backend, prompt()), Fed(backend, prompt(1), first=5)
    (first,) = run(backend, one.span(130, "last"))
    second, third = run(backend, one.span(60, "last"), two.span(90, "last"))
    for got, whole in zip((first, second, third), want, strict=True):
        assert got.shape == (1, whole.shape[1])
        assert distance(got[0], whole[-1]) < tolerance


def assert_refused(folder: Path, preset: Preset | None, why: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder, preset)
    text = str(caught.value)
    assert why in text, text
    assert "\n" not in text
    assert len(text) < 300


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_family_answers_as_its_own_forward_does_or_is_refused_by_name(family: Family, tmp_path: Path) -> None:
    model = build(family, tmp_path)
    kind, _, why = family.kvarn.partition(": ")
    if family.exact.startswith("refused"):
        assert_refused(tmp_path, None, family.exact.partition(": ")[2])
        assert_refused(tmp_path, KVARN, why)
        return

    with torch.inference_mode():
        want = model(torch.tensor([prompt()]), use_cache=False).logits[0].numpy()
    exact = load(tmp_path, None)
    for chunk in (100, 128, 129, NUM_TOKENS):
        error = distance(feed(exact, prompt(), chunk), want)
        assert error < EXACT, f"{family} under exact in chunks of {chunk}: {error:.2g}"
    assert_same_in_one_step(exact, EXACT)
    if kind == "refused":
        assert_refused(tmp_path, KVARN, why)
        return

    plan = load(tmp_path, KVARN).info.plan
    assert plan.describe().startswith(f"{len(plan.sealed)} of {len(plan.layers)} layers sealed")
    assert (len(plan.exact) == 0) == (family.kvarn == ALL)
    assert plan.describe().endswith(why or "layers sealed")
    assert plan.sealed
    wide = exact.share(WIDE)
    for chunk in (100, NUM_TOKENS):
        error = distance(feed(wide, prompt(), chunk), want)
        assert error < family.tolerance, f"{family} under {WIDE.name} in chunks of {chunk}: {error:.2g}"
        assert error > EXACT, "nothing was read from sealed tiles"
    assert_same_in_one_step(wide, family.tolerance)


# --- the table for the user


def table() -> str:
    """The rows of docs/torch-families.md; families that end alike share one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES:
        name = f"`{family.model_type}` {family.note}".strip()
        rows.setdefault((family.kvarn, family.exact), []).append(name)
    lines = ["| families (`model_type`) | `--kv-cache-dtype kvarn` | `--kv-cache-dtype exact` |", "| --- | --- | --- |"]
    for (kvarn, exact), names in rows.items():
        lines.append(f"| {', '.join(names)} | {kvarn} | {'the same' if exact == kvarn else exact} |")
    return "\n".join(lines)


def test_the_users_table_is_what_was_tested() -> None:
    doc = DOC.read_text()
    assert table() in doc, f"{DOC} should hold:\n{table()}"
    assert f"within {EXACT:g} (float32" in doc
    for tolerance in {family.tolerance for family in FAMILIES}:
        assert f"within\n  {tolerance:g}" in doc or f"within {tolerance:g}" in doc


# --- checkpoints


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in one file."""
    folder = tmp_path_factory.mktemp("llama")
    build(Family("llama"), folder)
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, llama_dir: Path) -> Path:
    """The same llama in several files with an index."""
    return save_in_shards(llama_dir, tmp_path_factory.mktemp("shards"))


class TestCheckpoints(CheckpointContract):
    def load(self, folder: Path, preset: Preset | None) -> TorchBackend:
        return load(folder, preset)


assert_not_loaded = TestCheckpoints().assert_not_loaded


def test_an_index_that_forgets_a_tensor_is_refused_with_its_name(shards: Path, tmp_path: Path) -> None:
    index = copy(shards, tmp_path) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"][TENSOR]
    content["weight_map"] = {k: v for k, v in content["weight_map"].items() if v != shard}
    index.write_text(json.dumps(content))
    assert_not_loaded(tmp_path, CheckpointError, "missing keys")


def test_an_unknown_activation_is_a_model_error(llama_dir: Path, tmp_path: Path) -> None:
    assert_not_loaded(edit(copy(llama_dir, tmp_path), hidden_act="no-such-function"), ModelError)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "compressed-tensors", "unheard-of"])
def test_a_quantized_checkpoint_is_refused_by_its_method(llama_dir: Path, tmp_path: Path, method: str) -> None:
    folder = edit(copy(llama_dir, tmp_path), quantization_config={"quant_method": method, "bits": 4})
    assert_not_loaded(folder, UnsupportedModelError, "are quantized", method)


@pytest.mark.parametrize(
    ("dtype", "saved", "want"),
    [
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "float32", "float16"),
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float32"),  # emulated on a CPU
        ("auto", None, "float32"),
    ],
)
def test_the_dtype_is_what_was_asked_for_or_the_checkpoints(
    llama_dir: Path, tmp_path: Path, dtype: str, saved: str | None, want: str
) -> None:
    edit(copy(llama_dir, tmp_path), dtype=saved, torch_dtype=saved)
    backend = load(tmp_path, Preset(tile_tokens=64), dtype)
    assert backend.info.dtype == want
    assert {str(p.dtype).removeprefix("torch.") for p in backend.model.module.parameters()} == {want}
    logits = feed(backend, prompt(), 100)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()


def test_an_unknown_dtype_or_device_is_refused_with_what_there_is(llama_dir: Path) -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int8'; use auto, float32, float16, bfloat16"):
        torch_backend.load(llama_dir, KVARN, LoadOptions(dtype="int8", device="cpu"))
    for device in ("cuda:99", "no-such-device", "mps"):
        with pytest.raises(BackendError, match=f"device '{device}' cannot be used: .*; try --device cpu"):
            torch_backend.load(llama_dir, KVARN, LoadOptions(device=device))
