"""Model families of mlx-lm: each answers as transformers' own forward does, or is refused by name.

FAMILIES is the source of the table in docs/mlx-families.md; a test holds the two together.
"""

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file
from small_models import THETA, Fed, build, distance, feed, prompt, run

from kvarn.backend import LoadOptions
from kvarn.backends.mlx import backend as mlx_backend
from kvarn.backends.mlx.backend import MlxBackend
from kvarn.errors import KvarnError
from kvarn.format import Preset

# Relative error of the logits, all in float32, by what they are compared with.
OWN = 1e-5  # `exact` against mlx-lm's own attention
THEIRS = 5e-4  # `exact` against transformers' eager forward; mlx-lm computes GELU in other ways
SEALED = 0.01  # kvarn_k8v8_g64 against `exact`; a mixture of experts may route a token elsewhere
KVARN, WIDE = Preset(), Preset(key_bits=8, value_bits=8, tile_tokens=64)
LENGTH = 210
DOC = Path(__file__).resolve().parents[3] / "docs" / "mlx-families.md"

ALL = "all layers sealed"
SLIDING = "sliding window of 100 tokens"
STATE = "keeps a recurrent state"
MLA = "uses multi-head latent attention (MLA)"


@dataclass(frozen=True)
class Family:
    """One model type with some settings, and what becomes of it.

    kvarn and exact: ALL, "yes", or, with a colon, how far and why: the words after it stand in the plan's description
    or in the refusal. extra: fields of config.json that transformers does not write and files of this family have.
    """

    model_type: str
    kvarn: str = ALL
    exact: str = "yes"
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    tolerance: float = SEALED
    together: bool = True  # several sequences of a step run in one pass
    own: bool = True  # mlx-lm itself knows the windows of config.json
    prefix: str = ""  # of the tensors' names, which files of this family do not have

    def __str__(self) -> str:
        return f"{self.model_type} {self.note}".strip()


def sealed(*model_types: str, **settings: Any) -> list[Family]:
    return [Family(name, **settings) for name in model_types]


def refused(model_type: str, why: str, note: str = "", **config: Any) -> Family:
    return Family(model_type, f"refused: {why}", f"refused: {why}", note, config)


def exact_only(model_type: str, why: str, note: str = "", **config: Any) -> Family:
    return Family(model_type, f"refused: {why}", "yes", note, config, own=False)


def partly(
    model_type: str, why: str, note: str = "", extra: dict[str, Any] | None = None, own: bool = True, **config: Any
) -> Family:
    return Family(model_type, f"partly sealed: {why}", "yes", note, config, extra or {}, own=own)


HALF = THETA | {"partial_rotary_factor": 0.5}
SWA = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = [
    # dense, full attention
    *sealed("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "starcoder2", "olmo2", "cohere", "smollm3"),
    *sealed("helium", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "internlm3", "exaone"),
    *(Family(name, config={"rope_parameters": HALF}) for name in ("glm4", "phi", "stablelm", "nemotron")),
    Family("granite", config={"attention_multiplier": 0.1}),
    Family("ministral3", config={"rope_parameters": THETA | {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}}),
    Family("apertus", extra={"mlp_bias": False, "post_norm": False, "qk_norm": True}),
    Family("gptj", config={"n_inner": 512}),
    Family("gpt2", config={"n_inner": 512}, extra={"n_ctx": 1024}, prefix="transformer."),
    Family("gpt_neox", config={"intermediate_size": 512}),
    Family("gpt_bigcode", together=False),
    *(Family("llama", note=f"with {kind} RoPE", config={"rope_parameters": THETA | {"rope_type": kind, "factor": 4.0,
        "original_max_position_embeddings": 256, "low_freq_factor": 1.0, "high_freq_factor": 4.0}})
        for kind in ("llama3", "linear")),
    Family("qwen3", note="with yarn RoPE", config={"rope_parameters": THETA | {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 256}}),
    # mixtures of experts
    *sealed("mixtral", "qwen2_moe", "olmoe", tolerance=0.15),
    Family("qwen3_moe", extra={"head_dim": 64}, tolerance=0.15),
    Family("granitemoe", config={"attention_multiplier": 0.1}, tolerance=0.15),
    Family("glm4_moe", extra={"head_dim": 64}, tolerance=0.15),
    Family("phimoe", config={"attention_bias": True, "lm_head_bias": True}, tolerance=0.15),
    Family("dots1", config={"layer_types": ["full_attention"] * 2}, extra={"head_dim": 64}, tolerance=0.15),
    # some layers with a window
    partly("gemma3_text", SLIDING, sliding_window=100, layer_types=SWA["layer_types"], rope_parameters={
        "sliding_attention": THETA, "full_attention": THETA | {"rope_theta": 1e6}}),
    partly("cohere2", SLIDING, **SWA),
    partly("olmo3", SLIDING, **SWA),
    partly("exaone4", SLIDING, extra={"sliding_window_pattern": "LG", "head_dim": 64}, **SWA),
    partly("qwen2", SLIDING, "with use_sliding_window", own=False, use_sliding_window=True, max_window_layers=1,
        sliding_window=100),
    # nothing that a tile can hold
    exact_only("mistral", SLIDING, "with sliding_window", sliding_window=100),
    exact_only("phi3", SLIDING, "with sliding_window", sliding_window=100),
    exact_only("starcoder2", SLIDING, "with sliding_window", sliding_window=100),
    exact_only("phi", "head_dim 80 is not one of 64, 128, 256, 512", "with head_dim 80", hidden_size=160,
        rope_parameters=HALF),
    # refused
    Family("gemma2", f"refused: {SLIDING}, soft cap of 50.0 on the attention scores",
        "refused: it computes attention itself from what its cache gives", config={"sliding_window": 100}),
    Family("gpt_oss", f"refused: {SLIDING}, learned attention sinks",
        "refused: Quantized SDPA does not support attention sinks", config=SWA),
    refused("olmo", "mlx-lm lacks a package for it"),
    refused("glm", "does not rotate the 0.5 of the channels that it should", rope_parameters=HALF),
    refused("phi3", "rope type 'longrope' depends on the length", "with longrope", rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
        "original_max_position_embeddings": 512, "partial_rotary_factor": 1.0}),
    refused("llama", "rope type 'dynamic' depends on the length", "with dynamic RoPE", rope_parameters={
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    *(refused(name, MLA, num_key_value_heads=2) for name in ("deepseek_v2", "deepseek_v3", "minicpm3")),
    *(refused(name, STATE) for name in ("mamba", "jamba", "minimax", "qwen3_next")),
    refused("recurrent_gemma", STATE, attention_window_size=100),
    refused("mamba2", STATE, num_heads=4, n_groups=1),
    refused("lfm2", STATE, layer_types=["conv", "full_attention"]),
    refused("llama4_text", "layer type 'chunked_attention' is not supported"),
]  # fmt: skip


def load(folder: Path, preset: Preset | None) -> MlxBackend:
    return mlx_backend.load(folder, preset, LoadOptions(dtype="float32", device="cpu"))


def save_mlx_weights(folder: Path) -> None:
    """Random weights under mlx-lm's own names."""
    config = json.loads((folder / "config.json").read_text())
    parts = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    module = parts.Model(parts.ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(module.parameters())))


def assert_refused(folder: Path, preset: Preset | None, why: str) -> None:
    with pytest.raises(KvarnError) as caught:
        load(folder, preset)
    text = str(caught.value)
    assert why in text, text
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_family_answers_as_transformers_does_or_is_refused_by_name(family: Family, tmp_path: Path) -> None:
    model = build(tmp_path, family.model_type, family.extra, **family.config)
    if family.model_type == "gpt_oss":  # transformers and mlx-lm spell its experts in two ways
        save_mlx_weights(tmp_path)
    kind, _, why = family.kvarn.partition(": ")
    if family.exact.startswith("refused"):
        assert_refused(tmp_path, None, family.exact.partition(": ")[2])
        assert_refused(tmp_path, KVARN, why)
        return

    tokens = prompt(LENGTH)
    with torch.inference_mode():
        want = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    if family.prefix:
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        save_file({name.removeprefix(family.prefix): x for name, x in tensors.items()}, file, {"format": "pt"})
    exact = load(tmp_path, None)
    assert exact.model.batched == family.together
    got = feed(exact, tokens, 120)
    error = distance(got, want)
    assert error < THEIRS, f"{family} under exact, against transformers: {error:.2g}"
    if family.own:
        error = distance(got, np.array(exact.model.own_logits([*tokens])))
        assert error < OWN, f"{family} under exact, against mlx-lm: {error:.2g}"
    if kind == "refused":
        assert_refused(tmp_path, KVARN, why)
        return

    plan = exact.share(KVARN).info.plan
    assert (len(plan.exact) == 0) == (family.kvarn == ALL)
    assert plan.describe().endswith(why or "layers sealed")
    wide = exact.share(WIDE)
    whole = feed(wide, tokens, 120)
    error = distance(whole, got)
    assert error < family.tolerance, f"{family} under {WIDE.name}: {error:.2g}"
    assert error > OWN, "nothing was read from sealed tiles"
    # Beside another sequence's first chunk, last logits only.
    wide.allocate(12, 12)
    one, two = Fed(wide, tokens), Fed(wide, tokens, first=6)
    run(wide, one.span(150, "none"))
    first, second = run(wide, one.span(60, "last"), two.span(70, "last"))
    tolerance = family.tolerance / 10
    assert distance(first[0], whole[209]) < tolerance
    assert distance(second[0], whole[69]) < tolerance


# --- the table for the user


def table() -> str:
    """The rows of docs/mlx-families.md; families that end alike share one."""
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
    for words in (f"within {THEIRS:g} of", f"within {OWN:g} of", f"of {LENGTH} tokens"):
        assert words in doc.replace("\n  ", " "), words
    for tolerance in {family.tolerance for family in FAMILIES}:
        assert f"within {tolerance:g}" in doc.replace("\n  ", " ")
    alone = ", ".join(f"`{family}`" for family in FAMILIES if not family.together)
    assert f"Run one sequence after another: {alone}." in doc
