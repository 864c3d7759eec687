"""Keys are a chain: equal for equal histories, on every machine, and for nothing else."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvarn.format import Preset
from kvarn.keys import Fingerprint, block_key, chain, format_name, layer_names, process_root
from kvarn.model_plan import plan_model

ROOT = process_root("")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_key_is_sha256_over_parent_and_little_endian_ids() -> None:
    want = hashlib.sha256(b"p" * 32 + bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()
    assert block_key(b"p" * 32, [1, 256]) == want


@given(TOKENS, st.integers(1, 8))
def test_a_chain_has_a_key_for_every_full_tile(tokens: list[int], tile: int) -> None:
    keys = chain(ROOT, tokens, tile)
    assert len(keys) == len(tokens) // tile
    assert chain(ROOT, tokens[: len(keys) * tile], tile) == keys


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_two_chains_agree_exactly_as_far_as_their_tiles_do(a: list[int], b: list[int], tile: int) -> None:
    for i, (x, y) in enumerate(zip(chain(ROOT, a, tile), chain(ROOT, b, tile), strict=False), 1):
        assert (x == y) == (a[: i * tile] == b[: i * tile])


def test_another_root_is_another_chain() -> None:
    assert not set(chain(ROOT, range(64), 8)) & set(chain(b"other", range(64), 8))


def fingerprint(**parts: object) -> Fingerprint:
    known = {
        "format": "KVarN-1 kvarn_k4v2_g128",
        "algorithm": 1,
        "layers": ("sealed 3x64",),
        "dtype": "float32",
        "weights": "w",
        "config": {"b": 1, "a": [1, 2]},
        "tokenizer": "t",
        "rope": {"rope_type": "default"},
        "adapter": "",
    }
    return Fingerprint(**(known | parts))  # type: ignore[arg-type]


def test_the_root_is_sha256_over_canonical_json_of_every_part_and_the_tenant() -> None:
    text = (
        '{"adapter":"","algorithm":1,"config":{"a":[1,2],"b":1},"dtype":"float32",'
        '"format":"KVarN-1 kvarn_k4v2_g128","layers":["sealed 3x64"],"rope":{"rope_type":"default"},'
        '"tenant":"x","tokenizer":"t","weights":"w"}'
    )
    assert fingerprint().text("x") == text
    assert fingerprint().root("x") == hashlib.sha256(text.encode()).digest()
    assert fingerprint(config={"a": [1, 2], "b": 1}).root("x") == fingerprint().root("x")


def test_every_part_and_the_tenant_count() -> None:
    roots = {fingerprint().root(), fingerprint().root("a"), process_root(""), process_root("a")}
    for name in fingerprint().__dataclass_fields__:
        roots.add(fingerprint(**{name: ["another"]}).root())
    assert len(roots) == 4 + 9


def test_the_plan_is_in_the_names() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 512,
        "max_position_embeddings": 4096,
    }
    plan = plan_model(config, Preset())
    assert layer_names(plan) == ("exact 2x64 window 512", "sealed 2x64")
    assert format_name(plan) == "KVarN-1 kvarn_k4v2_g128"
    assert format_name(plan_model(config, None)) == "KVarN-1 exact"
