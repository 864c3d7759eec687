"""The forms of a RoPE override, the config.json that it gives, and the description of the RoPE in use."""

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.errors import UnsupportedModelError, UsageError
from kvarn.model_plan import plan_model
from kvarn.rope_scaling import apply, describe, frequencies, parse

OLD: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "rope_theta": 50_000.0,
    "rope_scaling": None,
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 128},
}
NEW: dict[str, Any] = {x: OLD[x] for x in OLD if not x.startswith("rope")} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}
}


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("linear:4", {"rope_type": "linear", "factor": 4.0}),
        (" yarn:2.5 ", {"rope_type": "yarn", "factor": 2.5}),
        ("yarn:4:32768", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
        ("llama3:8", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("none", {"rope_type": "default"}),
        ('{"type": "yarn", "factor": 4, "beta_fast": 16}', {"rope_type": "yarn", "factor": 4, "beta_fast": 16}),
        ('{"rope_type": "default", "rope_theta": 1e6}', {"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_every_form_is_read(text: str, override: dict[str, Any]) -> None:
    assert parse(text) == override
    assert parse(json.dumps(override)) == override


@pytest.mark.parametrize(
    "text",
    [
        *("", "yarn", "yarn:", "yarn:x", "yarn:4:", "yarn:4:1.5", "yarn:4:8192:1", "linear:4:8192", "linear:0.5"),
        *("none:4", "ntk:4", "linear:nan", "linear:inf", "linear:1e9", "yarn:4:0", "yarn:4:-1"),
        *("[1]", "{", "{}", '{"rope_type": "yarn"}', '{"rope_type": ["yarn"], "factor": 4}', '{"factor": 4}'),
        *('{"rope_type": "linear", "factor": "4"}', '{"rope_type": "linear", "factor": true}'),
        *('{"rope_type": "linear", "factor": 4, "beta_fast": 3}', '{"rope_type": "yarn", "factor": 4, "truncate": 1}'),
        *('{"rope_type": "linear", "factor": 4, "rope_theta": 0}', '{"rope_type": "yarn", "factor": 4, "x": 1}'),
        *(json.dumps({"rope_type": "linear", "factor": 10**400}), '{"rope_type": "linear", "factor": NaN}'),
        '{"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}',
    ],
)
def test_anything_else_is_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(UsageError, match=r"use .|it takes .") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_a_table_that_depends_on_the_length_is_refused_with_the_reason(kind: str) -> None:
    for text in (kind, f"{kind}:4", json.dumps({"rope_type": kind, "factor": 4.0})):
        with pytest.raises(UsageError, match=f"{kind}.*change sealed keys; use linear:FACTOR"):
            parse(text)


@given(st.text(max_size=30))
def test_no_text_gives_anything_but_a_mapping_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse(text)["rope_type"] in ("default", "linear", "yarn", "llama3")


@pytest.mark.parametrize("config", [OLD, NEW], ids=["old fields", "new fields"])
@pytest.mark.parametrize(
    ("text", "context", "more"),
    [
        ("linear:4", 32768, {}),
        ("yarn:4", 32768, {"original_max_position_embeddings": 8192}),
        ("llama3:8", 65536, {"original_max_position_embeddings": 8192, "low_freq_factor": 1, "high_freq_factor": 4}),
        ("none", 8192, {}),
    ],
)
def test_both_spellings_get_the_scaling_and_the_longer_context_and_keep_theta(
    config: dict[str, Any], text: str, context: int, more: dict[str, Any]
) -> None:
    before = json.dumps(config)
    got = apply(config, parse(text))
    assert json.dumps(config) == before
    assert got["max_position_embeddings"] == plan_model(got, None).max_context == context
    assert got["rope_theta"] == got["rope_parameters"]["rope_theta"] == 50_000.0
    assert more.items() <= got["rope_parameters"].items()
    if text == "none":
        assert got["rope_scaling"] is None
    else:
        assert got["rope_scaling"]["type"] == got["rope_scaling"]["rope_type"] == text.split(":")[0]
        assert got["rope_scaling"].items() >= got["rope_parameters"].items()
    assert {name: x for name, x in got.items() if "rope" not in name and "max_" not in name} == {
        name: x for name, x in config.items() if "rope" not in name and "max_" not in name
    }
    assert apply(OLD, parse(text)).keys() == apply(NEW, parse(text)).keys()
    assert describe(apply(OLD, parse(text))) == describe(apply(NEW, parse(text)))


def test_a_context_that_is_named_counts_and_never_shortens() -> None:
    qwen = OLD | {"max_position_embeddings": 40960}
    assert apply(qwen, parse("yarn:4:32768"))["max_position_embeddings"] == 131072
    assert apply(qwen, parse("yarn:2:8192"))["max_position_embeddings"] == 40960
    assert apply(qwen, parse("yarn:2:8192"))["rope_parameters"]["original_max_position_embeddings"] == 8192


def test_a_scaling_that_is_there_is_replaced_and_its_original_context_counts() -> None:
    scaled = apply(OLD, parse("yarn:4"))
    for text in ("linear:2", "yarn:8", "llama3:8", "none"):
        assert describe(apply(scaled, parse(text))) == describe(apply(OLD, parse(text)))
        assert (
            apply(scaled, parse(text))["max_position_embeddings"]
            == (apply(OLD, parse(text))["max_position_embeddings"])
        )


def test_defaults_fill_what_config_json_leaves_out() -> None:
    bare = {name: x for name, x in OLD.items() if not name.startswith(("rope", "max_"))}
    with pytest.raises(UnsupportedModelError, match=r"llama has no RoPE in its config\.json"):
        apply(bare, parse("linear:2"))
    got = apply(bare, parse("linear:2"), NEW)
    assert got["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0}
    assert got["max_position_embeddings"] == 16384


def test_a_nested_text_config_is_entered() -> None:
    got = apply({"model_type": "outer", "text_config": NEW}, parse("linear:2"))
    assert got["text_config"] == apply(NEW, parse("linear:2"))
    assert describe(got) == describe(got["text_config"])
    assert "rope_scaling" not in got


def test_theta_can_be_set_under_every_name_and_the_share_of_rotated_channels_stays() -> None:
    neox = {"model_type": "gpt_neox", "max_position_embeddings": 2048, "rotary_emb_base": 10_000, "rotary_pct": 0.25}
    got = apply(neox, {"rope_type": "default", "rope_theta": 5e5})
    assert got["rotary_emb_base"] == got["rope_theta"] == got["rope_parameters"]["rope_theta"] == 5e5
    assert got["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert describe(got)["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "gpt2", "n_positions": 1024}, "gpt2 has no RoPE"),
        (
            NEW | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
            "RoPE for each type of layer",
        ),
        (OLD | {"rope_local_base_freq": 1e4}, "RoPE for each type of layer"),
        (OLD | {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, "several axes"),
        ({"model_type": "x", "rope_theta": 1e4}, "no max_position_embeddings"),
    ],
)
def test_a_model_whose_rope_cannot_be_overridden_is_refused_by_name(config: dict[str, Any], part: str) -> None:
    with pytest.raises(UnsupportedModelError, match=part):
        apply(config, parse("linear:2"))


def test_apply_checks_an_override_of_any_origin() -> None:
    with pytest.raises(UsageError, match="needs a factor"):
        apply(OLD, {"rope_type": "yarn"})


def test_a_description_does_not_depend_on_the_spelling_and_differs_where_the_table_does() -> None:
    assert describe(OLD) == describe(NEW) == describe(OLD | {"rope_parameters": NEW["rope_parameters"]})
    assert describe(OLD) == {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 1.0}
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8192}
    full = yarn | {"beta_fast": 32, "beta_slow": 1.0, "attention_factor": 0.1 * math.log(4) + 1, "truncate": True}
    assert describe(OLD | {"rope_scaling": yarn}) == describe(OLD | {"rope_scaling": full})
    seen = [describe(OLD), describe(OLD | {"rope_theta": 1e4}), describe(OLD | {"partial_rotary_factor": 0.5})]
    for changed in ({}, {"factor": 2}, {"beta_fast": 16}, {"attention_factor": 1.0}, {"truncate": False}):
        seen.append(describe(OLD | {"rope_scaling": yarn | changed}))
    seen.append(describe(OLD | {"rope_scaling": yarn | {"original_max_position_embeddings": 4096}}))
    assert len({json.dumps(x, sort_keys=True) for x in seen}) == len(seen)
    assert describe({"model_type": "gpt2"}) == {"rope_type": "none"}
    nested = describe(NEW | {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}})
    assert nested["layers"]["full_attention"]["rope_theta"] == 1e6


def test_mscale_counts_as_transformers_counts_it() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
    for more, want in (
        ({}, 0.1 * math.log(8) + 1),
        ({"mscale": 0.7}, 0.1 * math.log(8) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
        ({"attention_factor": 1.5, "mscale": 3}, 1.5),
    ):
        assert describe(OLD | {"rope_scaling": yarn | more})["attention_factor"] == pytest.approx(want, rel=1e-12)


def test_frequencies_of_each_type() -> None:
    """Transformers' own tables are compared in the backends' tests; here are the ends of each."""
    plain, one = frequencies(describe(OLD), 64)
    assert one == 1.0
    assert plain[0] == 1.0
    assert plain[-1] == pytest.approx(50_000 ** (-62 / 64))
    np.testing.assert_allclose(frequencies(describe(apply(OLD, parse("linear:4"))), 64)[0], plain / 4)
    for text in ("yarn:4", "llama3:4"):
        table, factor = frequencies(describe(apply(OLD, parse(text))), 64)
        assert table[0] == plain[0]  # fast pairs stay, slow ones are stretched
        assert table[-1] == pytest.approx(plain[-1] / 4)
        assert (factor > 1) == (text == "yarn:4")
    assert len(frequencies(describe(OLD | {"partial_rotary_factor": 0.5}), 64)[0]) == 16
    with pytest.raises(UnsupportedModelError, match="'longrope' cannot be checked"):
        frequencies(describe(OLD | {"rope_scaling": {"type": "longrope", "factor": 4.0}}), 64)
