"""Tile bytes <-> field arrays: views and bit streams, no arithmetic on values."""

from dataclasses import dataclass, fields
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvarn.errors import FormatError
from kvarn.format import TileFormat

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Halves = NDArray[np.float16]


@dataclass(frozen=True)
class TileFields:
    """The fields of tiles, each `[..., *field shape]`; views where they come from `split`."""

    k_codes: Words
    k_scale: Halves
    k_zero: Halves
    k_token: Halves
    v_codes: Words
    v_scale: Halves
    v_zero: Halves
    v_channel: Halves


def pack_codes(codes: Bytes, bits: int) -> Words:
    """Codes `uint8 [..., n]` -> words `uint32 [..., n*bits/32]`: one little-endian bit stream per row.

    Element c starts at bit c*bits, low bits first. `n * bits` must be a multiple of 32.
    """
    ones = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    row = codes.shape[-1] * bits
    stream = np.packbits(ones.reshape(*codes.shape[:-1], row), axis=-1, bitorder="little")
    return stream.view("<u4")


def unpack_codes(words: Words, bits: int) -> Bytes:
    """The inverse of `pack_codes`: words `uint32 [..., n*bits/32]` -> codes `uint8 [..., n]`."""
    stream = np.ascontiguousarray(words).view(np.uint8)
    count = words.shape[-1] * 32 // bits
    ones = np.unpackbits(stream, axis=-1, bitorder="little").reshape(*words.shape[:-1], count, bits)
    return np.packbits(ones, axis=-1, bitorder="little")[..., 0]


def join(parts: TileFields, fmt: TileFormat) -> Bytes:
    """Fields -> tile bytes `uint8 [..., tile_nbytes]`; FormatError when a field has another shape or dtype."""
    streams = []
    for field in fields(parts):
        array, spec = getattr(parts, field.name), fmt.fields[field.name]
        lead = array.shape[: array.ndim - len(spec.shape)]
        if array.shape[len(lead) :] != spec.shape or array.dtype != np.dtype(spec.dtype):
            raise FormatError(
                f"{field.name} is {array.dtype} {list(array.shape)}, expected {spec.dtype} {list(spec.shape)}"
            )
        streams.append(np.ascontiguousarray(array).reshape(*lead, prod(spec.shape)).view(np.uint8))
    return np.concatenate(streams, axis=-1)


def split(tiles: Bytes, fmt: TileFormat) -> TileFields:
    """Tile bytes `uint8 [..., tile_nbytes]` -> views of its fields; FormatError on any other length or dtype."""
    if tiles.dtype != np.uint8 or tiles.ndim == 0 or tiles.shape[-1] != fmt.tile_nbytes:
        raise FormatError(
            f"a {fmt.name} tile of head_dim {fmt.head_dim} is uint8 [{fmt.tile_nbytes}], "
            f"not {tiles.dtype} {list(tiles.shape)}"
        )
    lead = tiles.shape[:-1]
    views = {
        name: tiles[..., spec.offset : spec.offset + spec.nbytes].view(spec.dtype).reshape(*lead, *spec.shape)
        for name, spec in fmt.fields.items()
    }
    return TileFields(**views)
