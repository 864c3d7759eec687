"""Adapter folders: what each says, the digest of its meaning, and every refusal by name."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_folders import SCALE, matrices, write, write_mlx_lm, write_peft

from kvarn.adapter import adapter_digest, place, read_adapter
from kvarn.errors import KvarnError, ModelError, UnsupportedModelError

Q0, Q1, V0 = (f"model.layers.{x}_proj" for x in ("0.self_attn.q", "1.self_attn.q", "0.self_attn.v"))
SHAPES = {Q0: (16, 8), Q1: (16, 8)}
PEFT_FILE, MLX_FILE = "adapter_model.safetensors", "adapters.safetensors"


def test_both_kinds_say_the_same(tmp_path: Path) -> None:
    given = matrices(SHAPES, rank=4)
    peft = read_adapter(write_peft(tmp_path / "peft", given))
    mlx_lm = read_adapter(write_mlx_lm(tmp_path / "mlx", given, 2))
    assert (peft.kind, peft.file.name, mlx_lm.kind, mlx_lm.file.name) == ("peft", PEFT_FILE, "mlx-lm", MLX_FILE)
    for adapter in (peft, mlx_lm):
        assert [x.module for x in adapter.targets] == [Q0, Q1]
        for x in adapter.targets:
            assert (x.scale, x.rank, x.inputs, x.outputs) == (SCALE, 4, 8, 16)
            assert x.transposed == (adapter is mlx_lm)
    assert peft.targets[0].a == f"base_model.model.{Q0}.lora_A.weight"
    assert mlx_lm.targets[0].b == f"{Q0}.lora_b"


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 6}, (1.5, 1.5)),
        ({"lora_alpha": 6, "use_rslora": True}, (3.0, 3.0)),
        ({"lora_alpha": 6, "alpha_pattern": {"layers.1.self_attn.q_proj": 8}}, (1.5, 2.0)),
        ({"lora_alpha": 6, "alpha_pattern": {r"model\.layers\.[01]\..*": 8, "q_proj": 1}}, (2.0, 2.0)),
        ({"lora_alpha": 6, "alpha_pattern": {"proj": 8, "1.self_attn": 8}}, (1.5, 1.5)),  # parts of names match nothing
        ({"r": 99, "lora_alpha": 6, "rank_pattern": {"q_proj": 4}}, (1.5, 1.5)),
        ({"r": 99, "lora_alpha": 6, "rank_pattern": {"q_proj": 4}, "use_rslora": True}, (3.0, 3.0)),
        ({"lora_alpha": 4.5, "init_lora_weights": "gaussian"}, (4.5 / 4, 4.5 / 4)),
    ],
)
def test_the_scale_of_peft(tmp_path: Path, config: dict[str, Any], scales: tuple[float, float]) -> None:
    adapter = read_adapter(write_peft(tmp_path, matrices(SHAPES, rank=4), **config))
    assert tuple(x.scale for x in adapter.targets) == scales


def test_names_without_pefts_prefix_are_read_too(tmp_path: Path) -> None:
    (a, b) = matrices({Q0: (16, 8)})[Q0]
    write_peft(tmp_path, {Q0: (a, b)})
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    write(tmp_path, config, PEFT_FILE, {f"{Q0}.lora_A.weight": a, f"{Q0}.lora_B.weight": b})
    assert [x.module for x in read_adapter(tmp_path).targets] == [Q0]


# --- the digest


@pytest.mark.parametrize("kind", ["peft", "mlx-lm"])
def test_the_digest_is_of_the_content(tmp_path: Path, kind: str) -> None:
    folder, given = tmp_path / "one", matrices(SHAPES)
    peft = kind == "peft"
    write_peft(folder, given) if peft else write_mlx_lm(folder, given, 2)
    digest = adapter_digest(folder)
    assert len(digest) == 64
    assert int(digest, 16)
    shutil.copytree(folder, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "README.md").write_text("a note")
    assert adapter_digest(tmp_path / "elsewhere") == digest

    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"base_model_name_or_path" if peft else "learning_rate": 1}, indent=7))
    assert adapter_digest(folder) == digest  # what changes no result
    scale = {"lora_alpha": 3} if peft else {"lora_parameters": config["lora_parameters"] | {"scale": 3.0}}
    path.write_text(json.dumps(config | scale))
    assert adapter_digest(folder) != digest
    path.write_text(json.dumps(config))

    file = folder / (PEFT_FILE if peft else MLX_FILE)
    raw, seen = file.read_bytes(), {digest}
    start = 8 + int.from_bytes(raw[:8], "little")
    for at in range(start, len(raw), 97):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        seen.add(adapter_digest(folder))
    assert len(seen) == 1 + len(range(start, len(raw), 97))


# --- refusals


def refused(folder: Path, kind: type[KvarnError], *parts: str) -> None:
    for call in (read_adapter, adapter_digest):
        with pytest.raises(kind) as caught:
            call(folder)
        text = str(caught.value)
        assert "\n" not in text
        assert len(text) < 400
        for part in parts:
            assert part in text, text


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"use_dora": True}, "uses DoRA"),
        ({"peft_type": "IA3"}, "of peft type IA3"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"]'),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices = [1, 2]"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
        ({"lora_bias": True}, "lora_bias = true"),
        ({"use_qalora": True}, "use_qalora"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"something_of_next_year": {"x": 1}}, "something_of_next_year"),
        *(({"init_lora_weights": x}, repr(x)) for x in ("pissa", "pissa_niter_4", "olora", "corda", "loftq")),
    ],
)
def test_what_plain_lora_is_not_is_refused_by_name(tmp_path: Path, config: dict[str, Any], part: str) -> None:
    refused(write_peft(tmp_path, matrices(SHAPES), **config), UnsupportedModelError, part, "; ")


def test_options_that_are_off_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """peft writes every field that it knows."""
    off = dict.fromkeys(
        ("modules_to_save", "trainable_token_indices", "layer_replication", "megatron_config", "target_parameters")
    )
    adapter = write_peft(
        tmp_path, matrices(SHAPES), **off, lora_bias=False, use_qalora=False, loftq_config={}, qalora_group_size=16,
        megatron_core="megatron.core", peft_version="0.19.1", init_lora_weights=True, alora_invocation_tokens=None,
    )  # fmt: skip
    assert len(read_adapter(adapter).targets) == 2


@pytest.mark.parametrize(
    ("config", "kind", "part"),
    [
        ({"fine_tune_type": "dora"}, UnsupportedModelError, "DoRA (fine_tune_type)"),
        ({"fine_tune_type": "full"}, UnsupportedModelError, "a full fine-tune"),
        ({"fine_tune_type": "other"}, UnsupportedModelError, "'other'"),
        ({"lora_parameters": {"rank": 4}}, ModelError, "no lora_parameters with a scale"),
        ({"lora_parameters": {"rank": 4, "scale": "20"}}, ModelError, "no lora_parameters with a scale"),
        ({"lora_parameters": None}, ModelError, "no lora_parameters with a scale"),
        ({"lora_parameters": {"rank": 8, "scale": 1.0}}, ModelError, "rank 8, its tensor"),
        ({"num_layers": None}, ModelError, "no num_layers"),
    ],
)
def test_what_mlx_lm_writes_otherwise_is_refused(
    tmp_path: Path, config: dict[str, Any], kind: type[KvarnError], part: str
) -> None:
    refused(write_mlx_lm(tmp_path, matrices(SHAPES), **{"num_layers": 2, **config}), kind, part)


def test_folders_that_are_no_adapter_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, ModelError, "has no adapter_config.json")
    refused(tmp_path / "nowhere", ModelError, "has no adapter_config.json")
    config = tmp_path / "adapter_config.json"
    for text, part in (("{", "cannot be read"), ("[]", "no JSON object"), ("{}", "neither a peft_type nor")):
        config.write_text(text)
        refused(tmp_path, ModelError, part)
    config.write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    refused(tmp_path, ModelError, f"has no {PEFT_FILE}; save")
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    refused(tmp_path, ModelError, "pickled weights are not loaded")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"r": 8}, f"rank 8 for {Q0}, its tensor has 4"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 2"),
        ({"r": None}, "r = None"),
        ({"lora_alpha": "16"}, "lora_alpha = 16"),
        ({"lora_alpha": math.nan}, "lora_alpha = nan"),
        ({"lora_alpha": 10**99}, "lora_alpha = 1000"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"alpha_pattern": [1]}, "not a mapping"),
        ({"target_modules": ["q_proj", "o_proj"]}, "no tensors for it"),
    ],
)
def test_a_config_that_does_not_fit_its_tensors_is_refused(tmp_path: Path, config: dict[str, Any], part: str) -> None:
    refused(write_peft(tmp_path, matrices(SHAPES, rank=4), **config), ModelError, part)


def test_tensors_that_are_not_pairs_of_matrices_are_refused(tmp_path: Path) -> None:
    write_peft(tmp_path, matrices(SHAPES, rank=4))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    a, b = matrices({Q0: (16, 8)}, rank=4)[Q0]
    name = f"base_model.model.{Q0}"
    for tensors, kind, parts in (
        ({}, ModelError, ["nothing would be applied"]),
        ({f"{name}.lora_A.weight": a}, ModelError, [f"lacks {Q0}.lora_B.weight"]),
        ({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b[:, :3]}, ModelError, ["[4, 8]", "[16, 3]"]),
        ({f"{name}.lora_A.weight": a[None], f"{name}.lora_B.weight": b[None]}, UnsupportedModelError, ["[1, 4, 8]"]),
        ({f"{name}.lora_magnitude_vector": a}, UnsupportedModelError, ["lora_magnitude_vector"]),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": a}, UnsupportedModelError, ["lora_embedding_A"]),
        ({"base_model.model.lm_head.weight": a}, UnsupportedModelError, ["lm_head.weight"]),
    ):
        refused(write(tmp_path, config, PEFT_FILE, tensors), kind, *parts)
    write(tmp_path, config, PEFT_FILE, {f"{name}.lora_A.weight": a.astype(np.int32), f"{name}.lora_B.weight": b})
    refused(tmp_path, UnsupportedModelError, "in I32")


def test_a_damaged_tensor_file_is_refused(tmp_path: Path) -> None:
    file = write_peft(tmp_path, matrices(SHAPES)) / PEFT_FILE
    raw = file.read_bytes()
    for broken in (b"", raw[:7], raw[:30], raw[:-1], raw + b"x", b"\xff" * 8 + raw[8:], raw[:8] + b"[" + raw[9:]):
        file.write_bytes(broken)
        refused(tmp_path, ModelError, "is damaged", "get the adapter again")
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length].decode()
    first = min(json.loads(text).items(), key=lambda item: item[1].get("data_offsets", [9]))[1]
    for old, new in (
        (json.dumps(first["shape"], separators=(",", ":")), "[1,1]"),
        ('"data_offsets":[0,', '"data_offsets":[1,'),
        ('"shape"', '"shade"'),
        ('"dtype":"F32"', '"dtype":"F16"'),
    ):
        header = text.replace(old, new).ljust(length)
        assert header.strip() != text.strip()
        file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + raw[8 + length :])
        refused(tmp_path, ModelError, "is damaged")


# --- the model's own modules


def test_names_are_found_as_they_stand_or_from_the_layers_number_on(tmp_path: Path) -> None:
    adapter = read_adapter(write_peft(tmp_path, matrices(SHAPES)))
    for model in (Q0, Q1), (Q0.replace("model.layers", "language_model.model.h"), Q1.replace("model.layers", "x.h")):
        placed = place(adapter, dict.fromkeys(model, (16, 8)), [*model, "model", "lm_head"])
        assert [(target.module, name) for target, name in placed] == list(zip(SHAPES, model, strict=True))
    two = [f"{tower}.layers.{x.removeprefix('model.layers.')}" for tower in ("text", "vision") for x in SHAPES]
    with pytest.raises(ModelError, match=r"0\.self_attn\.q_proj, which this model does not have"):
        place(adapter, dict.fromkeys(two, (16, 8)), two)


def test_one_module_is_not_changed_twice(tmp_path: Path) -> None:
    given = matrices({Q0: (16, 8), Q0.replace("model.", "other."): (16, 8)})
    adapter = read_adapter(write_peft(tmp_path, given))
    with pytest.raises(ModelError, match="twice"):
        place(adapter, {Q0: (16, 8)}, [Q0])


@pytest.mark.parametrize(
    ("config", "complete"),
    [
        ({}, False),
        ({"layers_to_transform": [0]}, True),
        ({"layers_to_transform": 0}, True),
        ({"layers_to_transform": [0, 1]}, False),
        ({"exclude_modules": "layers.1"}, True),
        ({"target_modules": r".*0\.self_attn\.q_proj"}, True),
    ],
)
def test_every_module_that_the_config_names_must_have_tensors(
    tmp_path: Path, config: dict[str, Any], complete: bool
) -> None:
    adapter = read_adapter(write_peft(tmp_path, matrices({Q0: (16, 8)}), **config))
    linears = dict.fromkeys((Q0, Q1, V0), (16, 8))
    if complete:
        assert len(place(adapter, linears, linears)) == 1
    else:
        with pytest.raises(ModelError, match=r"no tensors for model\.layers\.1\.self_attn\.q_proj"):
            place(adapter, linears, linears)


@pytest.mark.parametrize(
    ("given", "num_layers", "keys", "part"),
    [
        ((Q0, Q1), 2, None, None),
        ((Q0, Q1), 16, None, None),
        ((Q0, Q1), -1, None, None),
        ((Q1,), 1, ["self_attn.q_proj"], None),
        ((Q1,), 2, None, "no tensors for layer 0"),
        ((Q1,), -1, None, "no tensors for layer 0"),
        ((Q0,), 1, None, "no tensors for layer 1"),
        ((Q0, Q1), 2, ["self_attn.q_proj", "self_attn.v_proj"], "no tensors for model.layers.0.self_attn.v_proj"),
    ],
)
def test_every_layer_that_mlx_lm_counts_must_have_tensors(
    tmp_path: Path, given: tuple[str, ...], num_layers: int, keys: list[str] | None, part: str | None
) -> None:
    parameters = {"rank": 4, "scale": 1.0, **({"keys": keys} if keys else {})}
    folder = write_mlx_lm(tmp_path, matrices(dict.fromkeys(given, (16, 8))), num_layers, lora_parameters=parameters)
    adapter, linears = read_adapter(folder), dict.fromkeys((Q0, Q1, V0), (16, 8))
    if part is None:
        assert {name for _, name in place(adapter, linears, linears)} == set(given)
    else:
        with pytest.raises(ModelError, match=part):
            place(adapter, linears, linears)
