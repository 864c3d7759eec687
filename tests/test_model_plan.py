"""Per layer sealed, exact or refused: every rule, and that no layer goes without a kind and a reason."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.errors import UnsupportedModelError
from kvarn.format import HEAD_DIMS, Preset
from kvarn.model_plan import Layer, ModelPlan, check_plan, plan_model

KVARN = Preset()
EXACT = None
BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 4096,
}
SLIDING = "sliding_attention"
FULL = "full_attention"


def plan(preset: Preset | None = KVARN, **changes: Any) -> ModelPlan:
    """The plan of a llama-like model with some fields changed; None removes one."""
    config = {**BASE, **changes}
    return plan_model({k: v for k, v in config.items() if v is not None}, preset)


def refusal(preset: Preset | None = EXACT, **changes: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        plan(preset, **changes)
    text = str(caught.value)
    assert "\n" not in text
    return text


def kinds(made: ModelPlan) -> str:
    """One letter per layer: s(ealed), e(xact), w(indowed and exact)."""
    return "".join("w" if layer.window else layer.kind[0] for layer in made.layers)


# --- what is sealed, and what the plan then says


def test_full_attention_is_sealed() -> None:
    made = plan()
    assert kinds(made) == "ssssss"
    assert made.describe() == "6 of 6 layers sealed"
    assert {(x.num_kv_heads, x.head_dim, x.reason) for x in made.layers} == {(2, 64, "full attention")}
    assert (made.num_heads, made.max_context, made.name, made.tile_tokens) == (8, 4096, "kvarn_k4v2_g128", 128)
    assert made.tile_format == KVARN.with_head_dim(64)
    assert made.sealed == made.layers
    assert made.exact == ()


def test_exact_leaves_every_layer_exact_because_it_was_asked_for() -> None:
    made = plan(EXACT)
    assert kinds(made) == "eeeeee"
    assert made.describe() == "0 of 6 layers sealed (exact was asked for)"
    assert (made.name, made.tile_tokens, made.tile_format) == ("exact", 128, None)
    assert {layer.reason for layer in made.layers} == {"asked for"}


def test_tile_length_is_the_presets() -> None:
    assert plan(Preset(tile_tokens=64)).tile_tokens == 64


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_of_the_format_is_sealed(head_dim: int) -> None:
    assert plan(head_dim=head_dim).sealed[0].head_dim == head_dim


def test_another_head_dim_cannot_be_sealed_and_is_refused_with_the_way_out() -> None:
    text = refusal(KVARN, head_dim=80)
    assert text == (
        "no layer of this model can hold kvarn_k4v2_g128 tiles: head_dim 80 is not one of 64, 128, 256, 512; "
        "use --kv-cache-dtype exact"
    )
    assert kinds(plan(EXACT, head_dim=80)) == "eeeeee"


def test_head_dim_is_derived_where_config_json_has_none() -> None:
    assert plan(hidden_size=1024).layers[0].head_dim == 128
    assert plan(head_dim=256).layers[0].head_dim == 256


# --- windows


def test_sliding_layers_stay_exact_and_are_listed_with_their_window() -> None:
    made = plan(layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL, FULL], sliding_window=512)
    assert kinds(made) == "wwswss"
    assert [layer.window for layer in made.layers] == [512, 512, None, 512, None, None]
    assert made.describe() == "3 of 6 layers sealed; layers 0-1, 3 exact: sliding window of 512 tokens"


def test_one_exact_layer_is_described_in_the_singular() -> None:
    made = plan(layer_types=[FULL] * 5 + [SLIDING], sliding_window=512)
    assert made.describe() == "5 of 6 layers sealed; layer 5 exact: sliding window of 512 tokens"


def test_a_window_as_long_as_the_context_is_full_attention() -> None:
    made = plan(layer_types=[SLIDING] * 6, sliding_window=4096)
    assert kinds(made) == "ssssss"
    assert kinds(plan(layer_types=[SLIDING] * 6, sliding_window=4095, preset=EXACT)) == "wwwwww"


def test_windows_are_planned_under_exact_too() -> None:
    assert kinds(plan(EXACT, layer_types=[SLIDING, FULL] * 3, sliding_window=100)) == "wewewe"


def test_a_sliding_layer_without_a_window_is_refused() -> None:
    text = refusal(layer_types=[FULL, SLIDING] * 3)
    assert text == "this model is not supported: layers 1, 3, 5: a sliding-attention layer without a sliding_window"


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, "ssssss"),
        ({"sliding_window": 0}, "ssssss"),
        ({"sliding_window": 100}, "wwwwww"),  # mistral, phi3, starcoder2: every layer
        ({"sliding_window": 100, "use_sliding_window": False}, "ssssss"),
        ({"sliding_window": 100, "model_type": "qwen2"}, "ssssss"),  # off unless use_sliding_window says so
        ({"sliding_window": 100, "model_type": "qwen2", "use_sliding_window": True}, "wwwwww"),
        (
            {"sliding_window": 100, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
            "ssssww",
        ),
        ({"sliding_window": 100, "sliding_window_pattern": 3}, "wwswws"),
        ({"sliding_window": 100, "model_type": "gemma2"}, "wswsws"),
        ({"sliding_window": 100, "model_type": "gemma3_text"}, "wwwwws"),
        ({"sliding_window": 100, "model_type": "gemma3_text", "sliding_window_pattern": 2}, "wswsws"),
        ({"sliding_window": 100, "model_type": "cohere2"}, "wwwsww"),
    ],
)
def test_files_without_layer_types_are_read_as_their_family_means_them(changes: dict[str, Any], want: str) -> None:
    made = plan(EXACT, **changes)
    assert kinds(made).replace("e", "s") == want
    if "s" in want:
        assert kinds(plan(KVARN, **changes)) == want


def test_layer_types_beat_the_older_fields() -> None:
    made = plan(layer_types=[FULL] * 6, sliding_window=100, sliding_window_pattern=2, use_sliding_window=True)
    assert kinds(made) == "ssssss"


# --- what attention needs beyond the plain thing


def test_a_soft_cap_keeps_layers_exact() -> None:
    text = refusal(KVARN, attn_logit_softcapping=50.0)
    assert "soft cap of 50.0 on the attention scores; use --kv-cache-dtype exact" in text
    assert kinds(plan(EXACT, attn_logit_softcapping=50.0)) == "eeeeee"


def test_every_reason_why_nothing_can_be_sealed_is_said_once() -> None:
    text = refusal(KVARN, attn_logit_softcapping=50.0, layer_types=[SLIDING, FULL] * 3, sliding_window=100)
    assert ": sliding window of 100 tokens, soft cap of 50.0 on the attention scores; use" in text


def test_learned_sinks_keep_layers_exact() -> None:
    types = [SLIDING, FULL] * 3
    text = refusal(KVARN, model_type="gpt_oss", layer_types=[FULL] * 6)
    assert "learned attention sinks" in text
    assert kinds(plan(EXACT, model_type="gpt_oss", layer_types=types, sliding_window=128)) == "wewewe"


# --- refusals


@pytest.mark.parametrize("preset", [KVARN, EXACT])
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder models are not supported"),
        ({"model_type": "mamba"}, "mamba keeps a recurrent state"),
        ({"model_type": "falcon_h1"}, "falcon_h1 keeps a recurrent state"),
        ({"model_type": "rwkv", "num_attention_heads": None}, "rwkv keeps a recurrent state"),
        ({"model_type": "bloom"}, "bloom uses ALiBi"),
        ({"model_type": "mpt"}, "mpt uses ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "falcon uses ALiBi"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "deepseek_v3 uses multi-head latent attention"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 2}, "gemma3n_text shares keys and values"),
        ({"layer_types": [FULL, "linear_attention"] * 3}, "layers 1, 3, 5: linear_attention keeps a recurrent state"),
        ({"layer_types": ["conv"] + [FULL] * 5}, "layer 0: conv keeps a recurrent state"),
        ({"layer_types": ["chunked_attention"] * 6}, "layers 0-5: layer type 'chunked_attention' is not supported"),
        ({"layer_types": [FULL] * 5}, "no layer type for each of its 6 layers"),
        ({"layer_types": "full_attention"}, "no layer type for each of its 6 layers"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "config.json has no num_hidden_layers"),
        ({"num_hidden_layers": "6"}, "config.json has no num_hidden_layers"),
        ({"num_hidden_layers": True}, "config.json has no num_hidden_layers"),
        ({"num_attention_heads": None}, "config.json has no num_attention_heads"),
        ({"num_attention_heads": [8, 4]}, "config.json has no num_attention_heads"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"head_dim": -64}, "a head_dim of -64"),
        ({"max_position_embeddings": -1}, "a context of -1 tokens"),
        ({"layer_types": [SLIDING] * 6, "sliding_window": 0}, "without a sliding_window"),
        ({"sliding_window": -100}, "layers 0-5: a sliding-attention layer without a sliding_window"),
        ({"num_key_value_heads": 3}, "8 heads for 3 kv heads"),
        ({"num_key_value_heads": 0}, "8 heads for 0 kv heads"),
        ({"num_key_value_heads": -8}, "8 heads for -8 kv heads"),
    ],
)
def test_what_is_not_computed_rightly_is_refused_by_name(
    preset: Preset | None, changes: dict[str, Any], part: str
) -> None:
    assert part in refusal(preset, **changes)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_a_rope_that_depends_on_the_length_is_refused(where: str, kind: str) -> None:
    for rope in ({"rope_type": kind}, {"type": kind}, {FULL: {"rope_type": kind}, SLIDING: {"rope_type": "default"}}):
        changes: dict[str, Any] = {where: rope}
        text = refusal(**changes)
        assert f"rope type '{kind}' depends on the length of the sequence" in text
        assert "override rope_scaling" in text


def test_a_rope_that_depends_on_the_length_is_found_in_either_field() -> None:
    refusal(rope_scaling={"rope_type": "linear"}, rope_parameters={"rope_type": "dynamic"})
    refusal(rope_scaling={"rope_type": "dynamic"}, rope_parameters={"rope_type": "default"})


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3", None])
def test_a_fixed_rope_is_kept(kind: str | None) -> None:
    assert kinds(plan(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})) == "ssssss"
    assert kinds(plan(rope_scaling={"type": kind})) == "ssssss"


# --- where families write things


def test_gpt2s_names_are_understood() -> None:
    made = plan_model({"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 256, "n_positions": 1024}, KVARN)
    assert [(x.num_kv_heads, x.head_dim) for x in made.layers] == [(4, 64)] * 3
    assert (made.num_heads, made.max_context) == (4, 1024)


def test_other_names_are_understood() -> None:
    mpt_like = {"n_layers": 2, "n_heads": 4, "d_model": 256, "n_ctx": 99}
    made = plan_model(mpt_like, KVARN)
    assert (len(made.layers), made.num_heads, made.max_context) == (2, 4, 99)
    neo_like = {"num_layers": 2, "num_heads": 4, "hidden_size": 256, "max_sequence_length": 77}
    assert plan_model(neo_like, KVARN).max_context == 77


def test_kv_heads_default_to_all_heads_or_to_one_under_multi_query() -> None:
    assert plan(num_key_value_heads=None).layers[0].num_kv_heads == 8
    assert plan(num_key_value_heads=None, multi_query=True).layers[0].num_kv_heads == 1
    assert plan(num_key_value_heads=None, num_kv_heads=4, multi_query=True).layers[0].num_kv_heads == 4
    assert plan(num_key_value_heads=None, n_head_kv=2).layers[0].num_kv_heads == 2


def test_a_context_that_config_json_does_not_say_is_2048() -> None:
    assert plan(max_position_embeddings=None).max_context == 2048


def test_a_nested_text_config_is_entered() -> None:
    nested = {"model_type": "gemma3", "num_hidden_layers": 99, "text_config": {**BASE, "num_hidden_layers": 2}}
    assert len(plan_model(nested, KVARN).layers) == 2
    with pytest.raises(UnsupportedModelError, match="keeps a recurrent state"):
        plan_model({"text_config": {**BASE, "model_type": "mamba"}}, KVARN)


def test_layers_may_have_head_dims_and_kv_heads_of_their_own() -> None:
    own = {"05": {"head_dim": 128, "num_key_value_heads": 1}, "2": {"head_dim": 128, "num_key_value_heads": 1}}
    types = [SLIDING, SLIDING, FULL] * 2
    made = plan(per_layer_config=own, layer_types=types, sliding_window=100)
    assert [(x.num_kv_heads, x.head_dim) for x in made.layers] == [(2, 64), (2, 64), (1, 128)] * 2
    assert kinds(made) == "wwswws"
    assert kinds(plan(per_layer_config={"5": {"head_dim": 128}})) == "ssssse"
    assert kinds(plan(per_layer_config={"last": {"head_dim": 128}, "3": None})) == "ssssss"
    assert "head_dim of -1" in refusal(per_layer_config={"3": {"head_dim": -1}})


# --- check_plan


def layer(index: int, kind: Any = "sealed", kv_heads: int = 2, head_dim: int = 64, window: int | None = None) -> Layer:
    return Layer(index=index, kind=kind, reason="why", num_kv_heads=kv_heads, head_dim=head_dim, window=window)


def made_of(*layers: Layer, preset: Preset | None = KVARN) -> ModelPlan:
    return ModelPlan(layers=layers, preset=preset, num_heads=8, max_context=4096)


def test_sealed_layers_are_all_of_the_commonest_shape() -> None:
    made = check_plan(
        made_of(layer(0), layer(1, head_dim=128), layer(2), layer(3, kv_heads=4), layer(4, "exact", 1, 80))
    )
    assert kinds(made) == "sesee"
    assert made.layers[1].head_dim == 128
    assert made.describe() == (
        "2 of 5 layers sealed; layers 1, 3 exact: its kv heads or head_dim differ from those of the sealed layers; "
        "layer 4 exact: why"
    )


def test_a_plan_of_one_shape_is_left_as_it_is() -> None:
    made = made_of(layer(0), layer(1), layer(2, "exact", 1, 80, window=7))
    assert check_plan(made) is made


def test_one_refused_layer_refuses_the_model_and_ranges_are_joined() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^this model is not supported: layers 0, 2-4: why$"):
        check_plan(made_of(layer(0, "refused"), layer(1), *(layer(i, "refused") for i in (2, 3, 4))))


def test_no_sealed_layer_is_refused_under_a_preset_only() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer of this model can hold kvarn_k4v2_g128 tiles: why"):
        check_plan(made_of(layer(0, "exact")))
    assert check_plan(made_of(layer(0, "exact"), preset=None)).sealed == ()


# --- whatever config.json says


scalars = st.none() | st.booleans() | st.integers(-3, 5000) | st.sampled_from(["", "llama", "gemma2", "qwen2", "mamba"])
configs = st.fixed_dictionaries(
    {},
    optional={
        "per_layer_config": st.dictionaries(
            st.sampled_from(["1", "03", "x"]), st.fixed_dictionaries({"head_dim": scalars})
        ),
        **dict.fromkeys((*BASE, "head_dim", "sliding_window", "sliding_window_pattern", "multi_query"), scalars),
        "use_sliding_window": st.booleans(),
        "max_window_layers": scalars,
        "attn_logit_softcapping": st.none() | st.floats(1, 100),
        "layer_types": st.none() | st.lists(st.sampled_from([FULL, SLIDING, "conv", "new"]), max_size=8),
        "rope_scaling": st.none() | st.dictionaries(st.sampled_from(["type", "rope_type"]), st.just("linear")),
    },
).map(lambda changes: {**BASE, **changes, "num_hidden_layers": min(_layers(changes), 8)})


def _layers(changes: dict[str, Any]) -> int:
    value = changes.get("num_hidden_layers", 6)
    return value if isinstance(value, int) else 6


@settings(deadline=None)
@given(configs, st.sampled_from([KVARN, EXACT, Preset(tile_tokens=64)]))
def test_every_layer_has_a_kind_and_a_reason_or_the_model_is_refused(
    config: dict[str, Any], preset: Preset | None
) -> None:
    try:
        made = plan_model(config, preset)
    except UnsupportedModelError:
        return
    assert [x.index for x in made.layers] == list(range(config["num_hidden_layers"]))
    assert all(x.kind in ("sealed", "exact") and x.reason for x in made.layers)
    assert len(made.sealed) + len(made.exact) == len(made.layers)
    assert len({(x.num_kv_heads, x.head_dim) for x in made.sealed}) <= 1
    assert all(x.window is None for x in made.sealed)
    assert (made.tile_format is None) == (preset is None)
    assert str(len(made.layers)) in made.describe()
