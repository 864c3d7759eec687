"""The tile format: presets, fields, offsets and byte counts. Nothing else computes a size or an offset.

docs/format.md is the text; this file is its arithmetic on shapes. Letters: D head_dim, G tile tokens.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod
from types import MappingProxyType

from kvarn.errors import FormatError

FORMAT_VERSION = 1
HEAD_DIMS = (64, 128, 256, 512)
TILE_TOKENS = (64, 128)
BIT_WIDTHS = (2, 3, 4, 5, 6, 8)
DEFAULT_PRESET = "kvarn_k4v2_g128"
FLAG_KEYS_ROTATED = 1

_PRESET = re.compile(r"kvarn_k(\d)v(\d)_g(\d{2,3})", re.ASCII)


class SealStatus(IntEnum):
    """What sealing one tile of one kv head came to; backends report it as a status word."""

    OK = 0
    NON_FINITE = 1
    KEYS_OVERFLOW = 2
    VALUES_OVERFLOW = 3

    @property
    def reason(self) -> str:
        """The text for the user."""
        return _REASONS[self]


_REASONS = {
    SealStatus.OK: "sealed",
    SealStatus.NON_FINITE: "the keys or values hold an infinity or a NaN",
    SealStatus.KEYS_OVERFLOW: "the keys need a constant beyond float16's 65504",
    SealStatus.VALUES_OVERFLOW: "the values need a constant beyond float16's 65504",
}


@dataclass(frozen=True)
class Field:
    """One field of a tile: where it starts, its shape per tile and kv head, and its little-endian dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Bit widths and tile length, without a head_dim: what `--kv-cache-dtype` names."""

    key_bits: int = 4
    value_bits: int = 2
    tile_tokens: int = 128

    def __post_init__(self) -> None:
        for what, bits in (("key", self.key_bits), ("value", self.value_bits)):
            if bits not in BIT_WIDTHS:
                raise FormatError(f"{what} width of {bits} bits is not one of {_list(BIT_WIDTHS)}")
        if self.tile_tokens not in TILE_TOKENS:
            raise FormatError(f"tile length {self.tile_tokens} is not one of {_list(TILE_TOKENS)}")

    @classmethod
    def parse(cls, name: str) -> "Preset":
        """`kvarn` or `kvarn_k{kb}v{vb}_g{G}` -> Preset; raises FormatError with the nearest valid names."""
        match = _PRESET.fullmatch(DEFAULT_PRESET if name == "kvarn" else name)
        if match is None:
            raise FormatError(
                f"unknown KV cache dtype {name!r}; use kvarn (= {DEFAULT_PRESET}), exact, or "
                f"kvarn_k<bits>v<bits>_g<tile> with bits of {_list(BIT_WIDTHS)} and tile of {_list(TILE_TOKENS)}"
            )
        key_bits, value_bits, tile_tokens = map(int, match.groups())
        return cls(key_bits=key_bits, value_bits=value_bits, tile_tokens=tile_tokens)

    @property
    def name(self) -> str:
        """The canonical name."""
        return f"kvarn_k{self.key_bits}v{self.value_bits}_g{self.tile_tokens}"

    def with_head_dim(self, head_dim: int) -> "TileFormat":
        """The full format for one head_dim; raises FormatError where it cannot hold that head_dim."""
        return TileFormat(
            key_bits=self.key_bits, value_bits=self.value_bits, tile_tokens=self.tile_tokens, head_dim=head_dim
        )


@dataclass(frozen=True, kw_only=True)
class TileFormat(Preset):
    """A preset for one head_dim: the layout of a tile's bytes."""

    head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim not in HEAD_DIMS:
            raise FormatError(
                f"head_dim {self.head_dim} is not one of {_list(HEAD_DIMS)}; use --kv-cache-dtype exact for this model"
            )

    @property
    def preset(self) -> Preset:
        """The format without its head_dim."""
        return Preset(key_bits=self.key_bits, value_bits=self.value_bits, tile_tokens=self.tile_tokens)

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """Name -> Field in the order of the bytes."""
        d, g = self.head_dim, self.tile_tokens
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "k_codes": ((d, g * self.key_bits // 32), "<u4"),
            "k_scale": ((d,), "<f2"),
            "k_zero": ((d,), "<f2"),
            "k_token": ((g,), "<f2"),
            "v_codes": ((g, d * self.value_bits // 32), "<u4"),
            "v_scale": ((g,), "<f2"),
            "v_zero": ((g,), "<f2"),
            "v_channel": ((d,), "<f2"),
        }
        fields, offset = {}, 0
        for name, (shape, dtype) in shapes.items():
            nbytes = prod(shape) * int(dtype[-1])
            fields[name] = Field(offset, shape, dtype, nbytes)
            offset += nbytes
        return MappingProxyType(fields)

    @cached_property
    def tile_nbytes(self) -> int:
        """Bytes of one tile of one kv head, keys and values together; its flag byte not counted."""
        return sum(field.nbytes for field in self.fields.values())

    @property
    def bits_per_value(self) -> float:
        """Bits per cached number (keys and values alike), constants included, the flag byte not."""
        return self.tile_nbytes * 8 / (2 * self.head_dim * self.tile_tokens)


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
