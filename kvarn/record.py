"""One record as a safetensors file: build, parse and peek; every byte of the file is checked.

A file is the 8-byte length of its header, the header, and the payload. The tensors are, in this order, `k.<layer>` and
`v.<layer>` [Hk, G, D] for every exact layer, `tiles` U8 [L, Hk, tile_nbytes] and `flags` U8 [L, Hk]. There is one file
for one content: the header is written here, byte for byte, and one that reads the same but is written in another way is
refused. So no byte can flip unseen, and both backends write the same file.
"""

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvarn.backend import Record
from kvarn.errors import RecordError
from kvarn.keys import block_key

VERSION = "1"
MAX_HEADER = 1 << 20  # a thousand exact layers take a tenth of it; nothing larger is read into memory
DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
_FIELDS = ("checksum", "dtype", "fingerprint", "format", "key", "parent", "tokens", "version")
_LAYER = re.compile(r"k\.(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True, kw_only=True)
class BlockMeta:
    """What a block is: its key, the key (or root) before it, its token ids, and what it was computed with."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    fingerprint: bytes
    format: str  # for example "KVarN-1 kvarn_k4v2_g128"

    def __post_init__(self) -> None:
        for name in ("key", "parent", "fingerprint"):
            if len(getattr(self, name)) != 32:
                raise RecordError(f"a block's {name} has {len(getattr(self, name))} bytes, not 32")
        if not self.tokens or not all(0 <= token < 1 << 32 for token in self.tokens):
            raise RecordError("a block's tokens are empty, or not unsigned 32-bit numbers")
        if not (self.format and self.format.isascii() and self.format.isprintable()):
            raise RecordError(f"a block's format {self.format!r} is not printable ASCII text")


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the header; `nbytes` follows from its dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class _Header:
    """All that a header says; `payload` is the bytes that follow it."""

    meta: BlockMeta
    dtype: str
    tensors: tuple[_Tensor, ...]
    checksum: str

    @property
    def payload(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def build(meta: BlockMeta, record: Record) -> bytes:
    """The file of a record. RecordError when the key is not that of the tokens, or an array has no place in a file."""
    _check_key(meta)
    tensors, arrays = _layout(meta, record)
    payload = [np.ascontiguousarray(array).tobytes() for array in arrays]
    header = _encode(meta, record.dtype, tensors, _checksum(meta, record.dtype, tensors, payload))
    if len(header) > MAX_HEADER:
        raise RecordError(
            f"a record of {len(tensors)} tensors needs a header of {len(header)} bytes, over {MAX_HEADER}"
        )
    return b"".join([struct.pack("<Q", len(header)), header, *payload])


def parse(data: bytes) -> tuple[BlockMeta, Record]:
    """The block and the record of a file, in arrays of their own. RecordError for what is short, foreign or flipped."""
    header, start = _read_header(data[: 8 + MAX_HEADER], len(data))
    found = _checksum(header.meta, header.dtype, header.tensors, [memoryview(data)[start:]])
    if found != header.checksum:
        raise RecordError(f"the checksum of the record is {found}, its header says {header.checksum}: it is damaged")
    buffer = np.frombuffer(data, np.uint8)[start:].copy()  # a view of `bytes` would be read-only
    tiles = flags = None
    exact: dict[int, NDArray[np.uint8]] = {}
    at = 0
    for tensor in header.tensors:
        part = buffer[at : at + tensor.nbytes]
        at += tensor.nbytes
        if tensor.name == "tiles":
            tiles = part.reshape(tensor.shape)
        elif tensor.name == "flags":
            flags = part.reshape(tensor.shape)
        elif tensor.name.startswith("k."):  # its values follow at once
            pair = buffer[at - tensor.nbytes : at + tensor.nbytes]
            exact[int(tensor.name[2:])] = pair.reshape(2, *tensor.shape[:2], -1)
    return header.meta, Record(dtype=header.dtype, tiles=tiles, flags=flags, exact=exact)


def peek(path: Path) -> BlockMeta:
    """The block of a file by its header and size; the payload is not read. RecordError, or the system's OSError."""
    with path.open("rb") as file:
        start = file.read(8)
        size = file.seek(0, 2)
        file.seek(8)
        data = start + file.read(min(MAX_HEADER, int.from_bytes(start, "little")))
    return _read_header(data, size)[0].meta


def _layout(meta: BlockMeta, record: Record) -> tuple[list[_Tensor], list[NDArray[np.uint8]]]:
    """The tensors of a record and their bytes, in file order."""
    if record.dtype not in DTYPES:
        raise RecordError(f"a record's dtype {record.dtype!r} is none of {', '.join(DTYPES)}")
    dtype, itemsize = DTYPES[record.dtype]
    for array in (record.tiles, record.flags, *record.exact.values()):
        if array is not None and array.dtype != np.uint8:
            raise RecordError(f"a record holds {array.dtype} where bytes are expected")
    tensors, arrays = [], []
    for layer, array in sorted(record.exact.items()):
        if not 0 <= layer < 1_000_000 or array.ndim != 4 or array.shape[0] != 2 or array.shape[3] % itemsize:
            raise RecordError(f"exact layer {layer} of a record has the shape {list(array.shape)}")
        shape = (*array.shape[1:3], array.shape[3] // itemsize)
        for name, half in zip("kv", array, strict=True):
            tensors.append(_Tensor(f"{name}.{layer}", dtype, shape, half.size))
            arrays.append(half)
    for name, sealed in (("tiles", record.tiles), ("flags", record.flags)):
        if sealed is not None:
            tensors.append(_Tensor(name, "U8", sealed.shape, sealed.size))
            arrays.append(sealed)
    _check_tensors(meta, record.dtype, tensors)
    return tensors, arrays


def _encode(meta: BlockMeta, dtype: str, tensors: Sequence[_Tensor], checksum: str) -> bytes:
    """The one header of this content, padded with spaces so that the payload starts at a multiple of 8."""
    fields = {
        "checksum": checksum,
        "dtype": dtype,
        "fingerprint": meta.fingerprint.hex(),
        "format": meta.format,
        "key": meta.key.hex(),
        "parent": meta.parent.hex(),
        "tokens": ",".join(map(str, meta.tokens)),
        "version": VERSION,
    }
    header: dict[str, Any] = {"__metadata__": fields}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _checksum(meta: BlockMeta, dtype: str, tensors: Sequence[_Tensor], payload: Iterable[bytes | memoryview]) -> str:
    """xxh3-128 over the header with an empty checksum, then the payload."""
    digest = xxhash.xxh3_128(_encode(meta, dtype, tensors, ""))
    for part in payload:
        digest.update(part)
    return digest.hexdigest()


def _read_header(data: bytes, size: int) -> tuple[_Header, int]:
    """The checked header of a file of `size` bytes that begins with `data`, and where its payload begins."""
    if len(data) < 8:
        raise RecordError(f"the record is cut short: {size} bytes, too few for a header")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        raise RecordError(f"the file is not a record: its header would have {length} bytes, over {MAX_HEADER}")
    raw = data[8 : 8 + length]
    if len(raw) < length:
        raise RecordError(f"the record is cut short: {size} bytes, but its header alone has {length}")
    try:
        header = _decode(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the file is not a record: its header cannot be read ({error})") from error
    if raw != _encode(header.meta, header.dtype, header.tensors, header.checksum):
        raise RecordError("the header of the record is not as this version writes it: it is damaged or foreign")
    if size != 8 + length + header.payload:
        raise RecordError(f"the record has {size} bytes, its header says {8 + length + header.payload}")
    return header, 8 + length


def _decode(header: Any) -> _Header:
    """What a header's JSON says. RecordError, or ValueError for a field that is not a number or not hexadecimal."""
    fields = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(fields, dict) or not all(isinstance(text, str) for text in fields.values()):
        raise RecordError("the file is not a record: it has no metadata of KVarN")
    if fields.get("version") != VERSION:
        raise RecordError(f"the record has version {fields.get('version')!r}, this KVarN reads {VERSION!r}")
    if set(fields) != set(_FIELDS):
        raise RecordError(f"the record's metadata holds {', '.join(sorted(fields))}, expected {', '.join(_FIELDS)}")
    meta = BlockMeta(
        key=bytes.fromhex(fields["key"]),
        parent=bytes.fromhex(fields["parent"]),
        tokens=tuple(int(token) for token in fields["tokens"].split(",")),
        fingerprint=bytes.fromhex(fields["fingerprint"]),
        format=fields["format"],
    )
    _check_key(meta)
    tensors = [_decode_tensor(name, entry) for name, entry in header.items()]
    _check_tensors(meta, fields["dtype"], tensors)
    return _Header(meta, fields["dtype"], tuple(tensors), fields["checksum"])


def _decode_tensor(name: str, entry: Any) -> _Tensor:
    """One tensor's entry in a header; its offsets are compared when the header is written anew."""
    sizes = {"U8": 1} | dict(DTYPES.values())
    shape = entry.get("shape") if isinstance(entry, Mapping) else None
    if not isinstance(shape, list) or not all(type(number) is int for number in shape):
        raise RecordError(f"the record's tensor {name!r} has no shape")
    if entry.get("dtype") not in list(sizes):
        raise RecordError(f"the record's tensor {name!r} has the dtype {entry.get('dtype')!r}")
    nbytes = sizes[entry["dtype"]]
    for number in shape:
        nbytes *= number
    return _Tensor(name, entry["dtype"], tuple(shape), nbytes)


def _check_key(meta: BlockMeta) -> None:
    if meta.key != block_key(meta.parent, meta.tokens):
        raise RecordError("the record's key is not the key of its parent and its tokens")


def _check_tensors(meta: BlockMeta, dtype: str, tensors: Sequence[_Tensor]) -> None:
    """RecordError unless names, order, dtypes and shapes are those of a record of this dtype."""
    if dtype not in DTYPES:
        raise RecordError(f"the record's dtype {dtype!r} is none of {', '.join(DTYPES)}")
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    layers = sorted(int(match[1]) for match in map(_LAYER.fullmatch, shapes) if match)
    names = [f"{half}.{layer}" for layer in layers for half in "kv"]
    names += ["tiles", "flags"] if "tiles" in shapes else []
    if not names or [tensor.name for tensor in tensors] != names:
        raise RecordError(
            f"the record's tensors are {', '.join(shapes) or 'none'}, expected {', '.join(names) or 'some'}"
        )
    for tensor in tensors:
        want = "U8" if tensor.name in ("tiles", "flags") else DTYPES[dtype][0]
        if tensor.dtype != want or min(tensor.shape, default=0) <= 0:
            raise RecordError(f"the record's tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}, not {want}")
    for layer in layers:
        k, v = shapes[f"k.{layer}"], shapes[f"v.{layer}"]
        if k != v or len(k) != 3 or k[1] != len(meta.tokens):
            raise RecordError(
                f"exact layer {layer} of the record has keys {list(k)}, values {list(v)} and {len(meta.tokens)} tokens"
            )
    if "tiles" in shapes and (len(shapes["tiles"]) != 3 or shapes["flags"] != shapes["tiles"][:2]):
        raise RecordError(f"the record's tiles are {list(shapes['tiles'])} and its flags {list(shapes['flags'])}")
