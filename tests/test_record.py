"""A record's file: what comes back is what went in, and no byte of it can change unseen."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load

from kvarn.backend import Record
from kvarn.errors import RecordError
from kvarn.keys import block_key
from kvarn.record import BlockMeta, _checksum, _encode, _Tensor, build, parse, peek

ROOT = hashlib.sha256(b"a fingerprint").digest()
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def meta_of(tokens: tuple[int, ...], parent: bytes = ROOT) -> BlockMeta:
    return BlockMeta(
        key=block_key(parent, tokens), parent=parent, tokens=tokens, fingerprint=ROOT, format="KVarN-1 kvarn_k4v2_g128"
    )


def random_bytes(shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def record_of(
    *,
    dtype: str = "float32",
    sealed: int = 2,
    exact: tuple[int, ...] = (),
    heads: int = 2,
    tokens: int = 4,
    seed: int = 0,
) -> Record:
    shape = (2, heads, tokens, 3 * ITEMSIZE[dtype])
    return Record(
        dtype=dtype,
        tiles=random_bytes((sealed, heads, 21), seed) if sealed else None,
        flags=random_bytes((sealed, heads), seed + 1) if sealed else None,
        exact={layer: random_bytes(shape, seed + 2 + layer) for layer in exact},
    )


def assert_same(got: Record, want: Record) -> None:
    assert got.dtype == want.dtype
    for name in ("tiles", "flags"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(a, b, err_msg=name)
            assert a.dtype == np.uint8
    assert list(got.exact) == sorted(want.exact)
    for layer, array in want.exact.items():
        np.testing.assert_array_equal(got.exact[layer], array, err_msg=f"layer {layer}")


META = meta_of((7, 0, 49151, 2**32 - 1))
MIXED = record_of(dtype="bfloat16", exact=(10, 3))
DATA = build(META, MIXED)
START = 8 + int.from_bytes(DATA[:8], "little")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(ITEMSIZE)),
    st.integers(0, 3),
    st.sets(st.integers(0, 999), max_size=3),
    st.integers(1, 3),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9),
    st.integers(0, 2**32),
)
def test_what_comes_back_is_what_went_in(
    dtype: str, sealed: int, exact: set[int], heads: int, tokens: list[int], seed: int
) -> None:
    if not sealed and not exact:
        exact = {0}
    record = record_of(dtype=dtype, sealed=sealed, exact=tuple(exact), heads=heads, tokens=len(tokens), seed=seed)
    data = build(meta_of(tuple(tokens)), record)
    meta, got = parse(data)
    assert meta == meta_of(tuple(tokens))
    assert_same(got, record)
    assert build(meta, got) == data


def test_a_parsed_record_can_be_written_to_and_is_no_view_of_the_file() -> None:
    _, record = parse(DATA)
    assert record.tiles is not None
    for array in (record.tiles, record.exact[3]):
        array[...] = 0  # a framework takes no read-only array
    assert_same(parse(DATA)[1], MIXED)


def test_the_same_content_is_the_same_bytes() -> None:
    reversed_layers = Record(
        dtype=MIXED.dtype, tiles=MIXED.tiles, flags=MIXED.flags, exact=dict(reversed(MIXED.exact.items()))
    )
    assert build(META, reversed_layers) == DATA
    assert MIXED.tiles is not None
    strided = np.repeat(MIXED.tiles, 2, axis=-1)[..., ::2]
    assert build(META, Record(dtype="bfloat16", tiles=strided, flags=MIXED.flags, exact=MIXED.exact)) == DATA
    assert hashlib.sha256(DATA).hexdigest() == "a53eccabb34e4498fc15ad7ba3114268e8f7ccec105cf62b1165c636e0e14b8b"


def test_every_byte_of_the_header_counts(tmp_path: Path) -> None:
    file = tmp_path / "flipped"
    for at in range(START):
        for bit in (0, 1, 3, 5, 7):
            flipped = bytearray(DATA)
            flipped[at] ^= 1 << bit
            with pytest.raises(RecordError):
                parse(bytes(flipped))
    for word in (b'"tokens":"7', b'"key":"', b'"parent":"', b'"shape":[', b'"data_offsets":[', b'"version":"'):
        flipped = bytearray(DATA)
        flipped[DATA.index(word) + len(word) + 1] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(RecordError):
            peek(file)


def test_other_white_space_and_another_order_are_refused() -> None:
    header = DATA[8:START].rstrip()
    value = json.loads(header)
    for other in (
        header + b"\n" * (START - 8 - len(header)),
        json.dumps(value).encode(),
        json.dumps(dict(reversed(value.items())), separators=(",", ":")).encode(),
        header.replace(b'"version":"1"', b'"version":"1","version":"1"'),
        header.replace(b'"tokens":"7,', b'"tokens":"+7,'),
    ):
        padded = other + b" " * (-len(other) % 8)
        with pytest.raises(RecordError):
            parse(len(padded).to_bytes(8, "little") + padded + DATA[START:])


def test_every_byte_of_the_payload_counts_the_flags_too() -> None:
    assert MIXED.flags is not None
    flags = MIXED.flags.size
    for at in (*range(START, len(DATA) - flags, 11), *range(len(DATA) - flags, len(DATA))):
        flipped = bytearray(DATA)
        flipped[at] ^= 1
        with pytest.raises(RecordError, match="checksum"):
            parse(bytes(flipped))


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, START - 1, START, START + 1, len(DATA) - 1])
def test_a_short_file_says_so(cut: int, tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(DATA[:cut])
    with pytest.raises(RecordError, match=r"cut short|the record has"):
        parse(DATA[:cut])
    with pytest.raises(RecordError, match=r"cut short|the record has"):
        peek(file)


@pytest.mark.parametrize("more", [b"\0", b" " * 8, DATA])
def test_more_bytes_are_refused(more: bytes, tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(DATA + more)
    with pytest.raises(RecordError, match="its header says"):
        parse(DATA + more)
    with pytest.raises(RecordError, match="its header says"):
        peek(tmp_path / "long")


@pytest.mark.parametrize("header", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"__metadata__":{}}'])
def test_a_foreign_file_is_refused(header: bytes) -> None:
    with pytest.raises(RecordError, match=r"not a record|version"):
        parse(len(header).to_bytes(8, "little") + header + b"payload")


@given(st.binary(max_size=300))
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        parse(data)
    with pytest.raises(RecordError):
        parse(min(len(data), 2**20).to_bytes(8, "little") + data)


def test_a_file_of_another_version_names_both() -> None:
    header = DATA[8:START].replace(b'"version":"1"', b'"version":"2"')
    with pytest.raises(RecordError, match="version '2', this KVarN reads '1'"):
        parse(DATA[:8] + header + DATA[START:])


def test_another_models_shapes_in_a_right_header_are_told_by_the_record_itself() -> None:
    """A file whose checksum is right, because its writer made it so, must still be of one piece."""
    tiles = random_bytes((2, 2, 21), 0)
    flags = random_bytes((2, 2), 0)
    page = random_bytes((2, 2, 4, 12), 0)
    for record, match in (
        (Record(dtype="float32", tiles=tiles, flags=None, exact={}), "tensors are"),
        (Record(dtype="float32", tiles=None, flags=flags, exact={0: page}), "tensors are"),
        (Record(dtype="float32", tiles=None, flags=None, exact={}), "tensors are none"),
        (Record(dtype="float32", tiles=tiles, flags=flags[:1], exact={}), "flags"),
        (Record(dtype="float32", tiles=tiles[:, :, :0], flags=flags, exact={}), "tiles"),
        (Record(dtype="float32", tiles=None, flags=None, exact={0: page[:, :, :3]}), "4 tokens"),
        (Record(dtype="float32", tiles=None, flags=None, exact={0: page[:1]}), "shape"),
        (Record(dtype="float32", tiles=None, flags=None, exact={0: page[..., :11]}), "shape"),
        (Record(dtype="float32", tiles=None, flags=None, exact={-1: page}), "layer -1"),
        (Record(dtype="int8", tiles=tiles, flags=flags, exact={}), "int8"),
        (Record(dtype="float32", tiles=tiles.astype(np.int16), flags=flags, exact={}), "int16"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RecordError, match=match):
            build(META, record)


@pytest.mark.parametrize("shape", [(2, 4, 2), (2, 8, 3), (24,)])
def test_keys_and_values_of_unlike_shapes_are_refused_even_with_a_right_checksum(shape: tuple[int, ...]) -> None:
    size = 4 * int(np.prod(shape))
    tensors = [_Tensor("k.0", "F32", (2, 4, 3), 96), _Tensor("v.0", "F32", shape, size)]
    payload = bytes(96 + size)
    header = _encode(META, "float32", tensors, _checksum(META, "float32", tensors, [payload]))
    with pytest.raises(RecordError, match="values"):
        parse(len(header).to_bytes(8, "little") + header + payload)


def test_the_key_must_be_that_of_the_tokens() -> None:
    other = BlockMeta(key=ROOT, parent=ROOT, tokens=META.tokens, fingerprint=ROOT, format="f")
    with pytest.raises(RecordError, match="key"):
        build(other, MIXED)


@pytest.mark.parametrize(
    "change",
    [{"key": b"short"}, {"parent": b""}, {"tokens": ()}, {"tokens": (-1,)}, {"tokens": (2**32,)}, {"format": "ü"}],
)
def test_a_meta_that_no_file_can_hold_is_refused(change: dict[str, object]) -> None:
    fields = {"key": META.key, "parent": ROOT, "tokens": META.tokens, "fingerprint": ROOT, "format": "f"} | change
    with pytest.raises(RecordError, match=next(iter(change))):
        BlockMeta(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_the_safetensors_library_opens_it(dtype: str, tmp_path: Path) -> None:
    record = record_of(dtype=dtype, exact=(0, 12))
    file = tmp_path / "record.safetensors"
    file.write_bytes(build(META, record))
    with safetensors.safe_open(file, "numpy") as opened:  # type: ignore[no-untyped-call]
        assert opened.metadata()["tokens"] == "7,0,49151,4294967295"
        assert opened.metadata()["key"] == META.key.hex()
        assert set(opened.keys()) == {"k.0", "v.0", "k.12", "v.12", "tiles", "flags"}
        np.testing.assert_array_equal(opened.get_tensor("flags"), record.flags)
        assert opened.get_slice("v.12").get_shape() == [2, 4, 3]
    if dtype == "float32":
        np.testing.assert_array_equal(load(file.read_bytes())["v.12"].view(np.uint8), record.exact[12][1])


def test_peek_reads_the_header_only(tmp_path: Path) -> None:
    file = tmp_path / "record"
    flipped = bytearray(DATA)
    flipped[-1] ^= 1
    file.write_bytes(flipped)
    assert peek(file) == META
    with pytest.raises(FileNotFoundError):
        peek(tmp_path / "none")
