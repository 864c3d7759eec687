"""Presets, fields and sizes of the tile format."""

from itertools import product

import pytest

from kvarn.errors import FormatError, UsageError
from kvarn.format import BIT_WIDTHS, HEAD_DIMS, TILE_TOKENS, Preset, SealStatus, TileFormat

ALL = [
    TileFormat(key_bits=kb, value_bits=vb, tile_tokens=g, head_dim=d)
    for kb, vb, g, d in product(BIT_WIDTHS, BIT_WIDTHS, TILE_TOKENS, HEAD_DIMS)
]
BAD_NAMES = [
    "",
    "Kvarn",
    "kvarn ",
    " kvarn",
    "kvarn_k4v2",
    "kvarn_k4_v2_g128",
    "kvarn_k4v2_g128 ",
    "kvarn_k4v2_g128\n",
    "kvarn_k4v2_g128_",
    "xkvarn_k4v2_g128",
    "KVARN_K4V2_G128",
    "kvarn_k4v2_g0",
    "kvarn_k4v2_g32",
    "kvarn_k4v2_g256",
    "kvarn_k1v2_g128",
    "kvarn_k7v2_g128",
    "kvarn_k4v7_g128",
    "kvarn_k4v16_g128",
    "kvarn_k0v2_g128",
    "kvarn_k-4v2_g128",
    "kvarn_k4.0v2_g128",
    "kvarn_k04v2_g128",
    "kvarn_k4v2_g0128",
    "kvarn_k٤v2_g128",
    "kvarn_k4v" + "9" * 5000 + "_g128",
    "fp8",
    "int4",
]


def test_kvarn_means_k4v2_g128() -> None:
    assert Preset.parse("kvarn") == Preset.parse("kvarn_k4v2_g128") == Preset()
    assert Preset().name == "kvarn_k4v2_g128"


def test_every_preset_name_survives_parsing() -> None:
    for fmt in ALL:
        assert Preset.parse(fmt.name) == fmt.preset
        assert fmt.preset.with_head_dim(fmt.head_dim) == fmt


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name[:24]))
def test_a_bad_preset_name_is_a_usage_error(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        Preset.parse(name)
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(FormatError, match=r"'q4_0'; use kvarn .*exact.*2, 3, 4, 5, 6, 8.*64, 128"):
        Preset.parse("q4_0")


@pytest.mark.parametrize("head_dim", [0, 1, 32, 63, 65, 80, 96, 112, 127, 192, 576, 1024, -64])
def test_a_head_dim_that_the_format_cannot_hold_is_refused_by_name(head_dim: int) -> None:
    with pytest.raises(FormatError, match=rf"head_dim {head_dim} is not one of .*--kv-cache-dtype exact"):
        Preset().with_head_dim(head_dim)


def test_bad_widths_and_tile_lengths_are_refused_by_value() -> None:
    with pytest.raises(FormatError, match="key width of 7"):
        Preset(key_bits=7)
    with pytest.raises(FormatError, match="value width of 1"):
        Preset(value_bits=1)
    with pytest.raises(FormatError, match="tile length 96"):
        Preset(tile_tokens=96)


def test_fields_are_contiguous_aligned_and_in_order() -> None:
    names = ["k_codes", "k_scale", "k_zero", "k_token", "v_codes", "v_scale", "v_zero", "v_channel"]
    for fmt in ALL:
        assert list(fmt.fields) == names
        end = 0
        for field in fmt.fields.values():
            assert field.offset == end
            assert field.offset % int(field.dtype[-1]) == 0
            end += field.nbytes
        assert end == fmt.tile_nbytes


def test_sizes_follow_the_formula() -> None:
    for fmt in ALL:
        d, g, bits = fmt.head_dim, fmt.tile_tokens, fmt.key_bits + fmt.value_bits
        assert fmt.tile_nbytes * 8 == g * (d * bits + 8 * 6) + 8 * 6 * d
        assert fmt.bits_per_value == fmt.tile_nbytes * 8 / (2 * d * g)


@pytest.mark.parametrize(
    ("name", "head_dim", "nbytes"),
    [
        ("kvarn_k4v2_g128", 128, 108),
        ("kvarn_k4v4_g128", 128, 140),
        ("kvarn_k8v4_g128", 128, 204),
        ("kvarn_k4v2_g128", 64, 57),
    ],
)
def test_bytes_per_token_are_the_promised_ones(name: str, head_dim: int, nbytes: int) -> None:
    fmt = Preset.parse(name).with_head_dim(head_dim)
    assert fmt.tile_nbytes == nbytes * fmt.tile_tokens


def test_every_status_has_a_text() -> None:
    texts = [status.reason for status in SealStatus]
    assert len(set(texts)) == len(texts) == 4
