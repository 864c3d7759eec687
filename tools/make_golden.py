"""Write the golden vectors of tile format 1: tests/golden/format1.json and a few whole tiles beside it.

Run by hand, never by a test: `python tools/make_golden.py`. The files pin the format. A change of their bytes is a new
format version with new files, not a new run of this tool; it refuses to overwrite an existing file without `--force`.

`--search` looks for new seeds on which wrong readings (golden_mutants.py) show, and prints them; the ones that it
found are written out in VECTORS below.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden_mutants
import numpy as np
from numpy.typing import NDArray

from kvarn import reference
from kvarn.errors import SealError
from kvarn.format import FORMAT_VERSION, Preset, SealStatus, TileFormat

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
Floats = NDArray[np.float32]
Exact = NDArray[np.float64]
Edit = tuple[str | int, ...]


# The inputs. docs/format.md, "Golden vectors", is the text of this section.


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """The first `count` outputs of splitmix64 from state `seed`."""
    steps = np.arange(1, count + 1, dtype=np.uint64)
    z = np.uint64(seed) + steps * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hadamard(x: Exact) -> Exact:
    """The unnormalized Walsh-Hadamard transform of the last axis, Sylvester order; exact for small integers."""
    index = np.arange(x.shape[-1])
    signs = 1.0 - 2.0 * (np.bitwise_count(index[:, None] & index[None, :]) & 1)
    product: Exact = x @ signs
    return product


def _base(kind: str, seed: int, tokens: int, head_dim: int) -> Exact:
    z = splitmix64(seed, tokens * head_dim).reshape(tokens, head_dim)
    if kind == "bell":
        fields = [(z >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4)]
        total: Exact = np.sum([f.astype(np.float64) for f in fields], axis=0)
        return (total - 131070.0) * 2.0**-15
    if kind == "heavy":
        small = (z % np.uint64(255)).astype(np.float64) - 127
        return small * 2.0 ** ((z >> np.uint64(32)) % np.uint64(5)).astype(np.float64) * 2.0**-7
    if kind == "sign":
        return 1.0 - 2.0 * (z >> np.uint64(63)).astype(np.float64)
    if kind.startswith("small"):
        bound = int(kind.removeprefix("small"))
        return (z % np.uint64(2 * bound + 1)).astype(np.float64) - bound
    if kind in ("eigen", "mirror"):
        small = (z % np.uint64(15)).astype(np.float64) - 7
        width = head_dim.bit_length() - 1
        order = [int(f"{c:0{width}b}"[::-1], 2) if kind == "mirror" else c for c in range(head_dim)]
        return float(np.sqrt(head_dim)) * small + hadamard(small)[:, order]
    raise ValueError(f"unknown kind {kind!r}")


def _edit(x: Exact, edit: Edit) -> Exact:
    name = edit[0]
    n = [int(i) for i in edit[1:]]
    amount = n[-2] * 2.0 ** n[-1] if len(n) > 1 else 0.0
    match name:
        case "scale":
            return x * amount
        case "scale_channel":
            x[:, n[0]] *= amount
        case "scale_token":
            x[n[0]] *= amount
        case "bias":
            return x + amount
        case "bias_channel":
            x[:, n[0]] += amount
        case "bias_channels":
            x += _base("bell", n[0], 1, x.shape[1]) * amount
        case "set":
            x[:] = amount
        case "set_channel":
            x[:, n[0]] = amount
        case "set_token":
            x[n[0]] = amount
        case "set_one":
            x[n[0], n[1]] = amount
        case "transform":
            return hadamard(x)
        case "negative_zeros":
            x[x == 0] = -0.0
        case "infinity":
            x[n[0], n[1]] = np.inf
        case "nan":
            x[n[0], n[1]] = np.nan
        case _:
            raise ValueError(f"unknown edit {name!r}")
    return x


@dataclass(frozen=True)
class Input:
    """How one array of a vector is made: a kind, a seed, and edits in order."""

    kind: str
    seed: int
    edits: tuple[Edit, ...] = ()

    def array(self, fmt: TileFormat) -> Floats:
        """The array, float32 `[G, D]`; exact, or ValueError."""
        x = _base(self.kind, self.seed, fmt.tile_tokens, fmt.head_dim)
        for edit in self.edits:
            x = _edit(x, edit)
        single = x.astype(np.float32)
        if not np.array_equal(single.astype(np.float64), x, equal_nan=True):
            raise ValueError(f"{self} is not exact in float32")
        return single


@dataclass(frozen=True)
class Vector:
    """One golden vector."""

    name: str
    preset: str
    head_dim: int
    keys: Input
    values: Input

    @property
    def fmt(self) -> TileFormat:
        """The tile format of the vector."""
        return Preset.parse(self.preset).with_head_dim(self.head_dim)


# What is pinned.


def sha256(x: NDArray[Any]) -> str:
    """Of the little-endian bytes in C order; a NaN in the input is the quiet one, 7fc00000."""
    return hashlib.sha256(np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<")).tobytes()).hexdigest()


def _word(x: np.float32) -> str:
    return f"{int(np.float32(x).view(np.uint32)):08x}" if np.isfinite(x) else "non-finite"


def _pins(q: reference.Quantized) -> dict[str, str]:
    """The hashes of one candidate's intermediates; -0 counts as +0 (a minimum may pick either)."""
    arrays = {"col": q.col, "row": q.row, "lo": q.lo, "s": q.s}
    return {"g": _word(q.g)} | {name: sha256(x + np.float32(0)) for name, x in arrays.items()}


@np.errstate(all="ignore")
def describe(vector: Vector) -> dict[str, Any]:
    """Everything that the golden file says of one vector, computed by the oracle."""
    fmt = vector.fmt
    keys, values = vector.keys.array(fmt), vector.values.array(fmt)
    inputs = {"keys": vector.keys, "values": vector.values}
    out: dict[str, Any] = {"name": vector.name, "preset": vector.preset, "head_dim": vector.head_dim}
    out |= {
        name: {"kind": x.kind, "seed": x.seed, "edits": [list(e) for e in x.edits], "sha256": sha256(x.array(fmt))}
        for name, x in inputs.items()
    }
    try:
        tile, flags = reference.seal(keys, values, fmt)
    except SealError as error:
        return out | {"status": next(s.name for s in SealStatus if s.reason == error.reason)}
    choice = reference.choose_keys(keys, fmt)
    read_keys, read_values = reference.unseal(tile, flags, fmt)
    return out | {
        "status": SealStatus.OK.name,
        "tile": sha256(tile),
        "flags": flags,
        "keys_rotated": _pins(choice.rotated) | {"error": _word(choice.rotated_error)},
        "keys_plain": _pins(choice.plain) | {"error": _word(choice.plain_error)},
        "values_rotated": _pins(reference.quantize(reference.rotate(values), fmt.value_bits, values=True)),
        "unsealed": {"keys": sha256(read_keys), "values": sha256(read_values)},
    }


# The vectors. Seeds of "search …" vectors come from `--search` and from hand-made scans like it.


def _bell(seed: int, *edits: Edit) -> Input:
    return Input("bell", seed, edits)


def _heavy(seed: int, *edits: Edit) -> Input:
    return Input("heavy", seed, edits)


def _small(seed: int, *edits: Edit) -> Input:
    return Input("small7", seed, edits)


def _biased(seed: int) -> Input:
    return Input("bell", seed, (("bias_channels", seed + 10**5, 2, 0),))


def _value(seed: int) -> Input:
    return Input("bell", seed + 10**6)


def _heavy_value(seed: int) -> Input:
    return Input("heavy", seed + 10**6)


def _mirror(seed: int) -> Input:
    return Input("mirror", seed)


_TRANSFORMED: tuple[Edit, ...] = (("transform",), ("scale", 1, -3))
_K4V2, _K4V4, _K2V2, _K8V8 = "kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k2v2_g128", "kvarn_k8v8_g128"
_K4V2S, _K4V4S, _K2V2S, _K8V8S = "kvarn_k4v2_g64", "kvarn_k4v4_g64", "kvarn_k2v2_g64", "kvarn_k8v8_g64"
WHOLE = ("plain k4v2 g64 d64", "rotated k4v2 g128 d128", "rotated k2v2 g64 d64", "mixed k3v5 g64 d64", "zeros")

VECTORS = (
    # Every width, both tile lengths, every head_dim, both choices.
    Vector("plain k4v2 g128 d128", _K4V2, 128, _biased(1), _bell(2)),
    Vector("rotated k4v2 g128 d128", _K4V2, 128, _heavy(3), _bell(4)),
    Vector("plain k4v2 g128 d64", _K4V2, 64, _biased(5), _heavy(6)),
    Vector("rotated k4v2 g128 d64", _K4V2, 64, _heavy(7), _bell(8)),
    Vector("rotated k4v2 g128 d256", _K4V2, 256, _heavy(9), _bell(10)),
    Vector("rotated k4v2 g128 d512", _K4V2, 512, _heavy(11), _heavy(12)),
    Vector("plain k4v2 g64 d64", _K4V2S, 64, _biased(13), _bell(14)),
    Vector("plain k4v2 g64 d512", _K4V2S, 512, _biased(15), _bell(16)),
    Vector("rotated k4v4 g128 d128", _K4V4, 128, _heavy(17), _bell(18)),
    Vector("plain k4v4 g128 d64", _K4V4, 64, _biased(19), _bell(20)),
    Vector("rotated k4v4 g64 d256", _K4V4S, 256, _heavy(21), _heavy(22)),
    Vector("plain k2v2 g128 d128", _K2V2, 128, _biased(23), _bell(24)),
    Vector("rotated k2v2 g128 d128", _K2V2, 128, _heavy(25), _heavy(26)),
    Vector("rotated k2v2 g64 d64", _K2V2S, 64, _heavy(27), _bell(28)),
    Vector("rotated k2v2 g64 d256", _K2V2S, 256, _heavy(29), _bell(30)),
    Vector("rotated k8v8 g128 d128", _K8V8, 128, _heavy(31), _bell(32)),
    Vector("plain k8v8 g128 d64", _K8V8, 64, _biased(33), _heavy(34)),
    Vector("rotated k8v8 g64 d256", _K8V8S, 256, _heavy(35), _bell(36)),
    Vector("rotated k8v4 g128 d128", "kvarn_k8v4_g128", 128, _heavy(37), _bell(38)),
    Vector("mixed k3v5 g64 d64", "kvarn_k3v5_g64", 64, _heavy(39), _bell(40)),
    Vector("mixed k5v3 g128 d128", "kvarn_k5v3_g128", 128, _biased(41), _heavy(42)),
    Vector("mixed k6v6 g64 d128", "kvarn_k6v6_g64", 128, _heavy(43), _bell(44)),
    Vector("mixed k3v6 g128 d256", "kvarn_k3v6_g128", 256, _biased(45), _bell(46)),
    Vector("mixed k6v3 g64 d64", "kvarn_k6v3_g64", 64, _biased(47), _bell(48)),
    Vector("mixed k5v8 g64 d512", "kvarn_k5v8_g64", 512, _heavy(49), _heavy(50)),
    Vector("mixed k2v5 g128 d64", "kvarn_k2v5_g128", 64, _biased(51), _bell(52)),
    # Structured tiles.
    Vector("zeros", _K4V2S, 64, _bell(1, ("set", 0, 0)), _bell(1, ("set", 0, 0))),
    Vector("constants", _K4V2, 128, _bell(1, ("set", 3, -1)), _bell(1, ("set", -5, -3))),
    Vector("constants k2v2", _K2V2S, 64, _bell(1, ("set", -3, -1)), _bell(1, ("set", 5, -3))),
    Vector("dead channels", _K4V2, 128, _bell(61, *(("set_channel", c, 0, 0) for c in (0, 5, 127))),
           _bell(62, *(("set_channel", c, 0, 0) for c in (0, 64)))),
    Vector("dead tokens", _K4V4, 64, _biased(63), _bell(64, ("set_token", 0, 0, 0), ("set_token", 77, 0, 0))),
    Vector("dead tokens of keys", _K2V2S, 128, _bell(65, ("set_token", 63, 0, 0)), _bell(66)),
    Vector("constant channel and token", _K2V2S, 64, _bell(67, ("set_channel", 3, 7, 0)),
           _bell(68, ("set_token", 9, 7, 0))),
    Vector("one channel of keys 1000 times", _K4V2, 128, _small(69, ("scale_channel", 40, 1000, 0)), _bell(70)),
    Vector("one channel of values 1000 times", _K4V2, 128, _bell(71), _small(72, ("scale_channel", 40, 1000, 0))),
    Vector("one token 1000 times", _K4V4S, 64, _small(73, ("scale_token", 0, 1000, 0)),
           _small(74, ("scale_token", 63, 1000, 0))),
    Vector("tiny", _K4V2S, 64, _small(75, ("scale", 1, -60)), _small(76, ("scale", 1, -60))),
    Vector("tiny keys alone", _K4V4, 64, _small(77, ("scale", 1, -60)), _bell(78)),
    Vector("small but alive", _K4V4, 128, _heavy(79, ("scale", 1, -36)), _bell(80, ("scale", 1, -36))),
    Vector("large", _K4V2, 128, _bell(81, ("scale", 1, 14)), _bell(82, ("scale", 1, 14))),
    Vector("large constant biases", _K4V2, 128, _small(83, ("bias", 1, 14)), _small(84, ("bias", -1, 11))),
    Vector("large constant biases k8v8", _K8V8S, 64, _small(85, ("bias", -1, 14)), _small(86, ("bias", 1, 11))),
    Vector("dead by the rotated candidate", _K4V4S, 128, Input("sign", 1, (("scale", 1, -40),)), _bell(88)),
    Vector("dead by the plain candidate d64", _K4V2S, 64, Input("small1", 11, (("scale", 5094835, -62),)), _bell(90)),
    Vector("dead by the plain candidate d128", _K4V2S, 128, Input("small1", 56, (("scale", 5105883, -62),)),
           _bell(90)),
    Vector("near the limit, both candidates", _K4V2S, 64, _small(91, ("scale", 10500, 0)), _small(92)),
    Vector("near the limit, plain only", _K4V2S, 64, _small(93, ("scale_channel", 3, 8, 0), ("scale", 6500, 0)),
           _small(94)),
    Vector("near the limit, rotated only", _K4V2S, 64,
           _small(95, ("scale_channel", 3, 8, 0), *_TRANSFORMED, ("scale", 6500, 0)), _small(96)),
    Vector("near the limit, values", _K4V2S, 64, _bell(97), _small(98, ("scale", 10500, 0))),
    Vector("float16 subnormals", _K4V4S, 64, _small(99, ("scale", 1, -12)), _small(100, ("scale_token", 5, 1, -12))),
    Vector("signed zeros", _K4V4S, 64,
           Input("small1", 101, (("set_channel", 0, 0, 0), ("scale", -1, 0), ("negative_zeros",))),
           Input("small1", 102, (("set_token", 3, 0, 0), ("negative_zeros",)))),
    Vector("constants that round to -0", _K4V4S, 64, _biased(103),
           _bell(104, ("scale_token", 7, 1, -40), ("scale_token", 8, 1, -40))),
    Vector("constants of keys that round to -0", _K4V4S, 64,
           Input("bell", 105, (("bias_channels", 106, 2, 0), ("scale_channel", 7, 1, -40))), _bell(107)),
    Vector("spikes after the rotation", _K2V2, 128, _heavy(108),
           _bell(109, ("set_token", 5, 2, 0), ("set_token", 90, -3, 0))),
    # Tied candidates: eigenvectors of the rotation tie exactly, mirrored ones but for the order of the sums.
    Vector("exact tie k4v4", _K4V4S, 64, Input("eigen", 2), _bell(111)),
    Vector("exact tie k2v2 d256", _K2V2S, 256, Input("eigen", 3), _bell(112)),
    # Searched out.
    Vector("search k4v2 1", _K4V2, 128, _biased(95), _value(33)),
    Vector("search k4v2 2", _K4V2, 128, _biased(109), _value(32)),
    Vector("search k4v2 3", _K4V2, 128, _heavy(9), _value(7)),
    Vector("search k4v4 1", _K4V4, 128, _bell(38), _value(88)),
    Vector("search k4v4 2", _K4V4, 128, _bell(18), _value(161)),
    Vector("search k4v4 3", _K4V4, 128, _heavy(30), _heavy_value(187)),
    Vector("search k4v4 4", _K4V4, 128, _heavy(9), _heavy_value(164)),
    Vector("search k4v4 5", _K4V4, 128, _heavy(36), _heavy_value(8)),
    Vector("search k2v2 1", _K2V2S, 128, _bell(124), _value(181)),
    Vector("search k2v2 2", _K2V2S, 128, _bell(20), _value(124)),
    Vector("search k2v2 3", _K2V2S, 128, _heavy(88), _value(166)),
    Vector("search k2v2 4", _K2V2S, 128, _heavy(97), _heavy_value(114)),
    Vector("search k2v2 5", _K2V2S, 128, _heavy(23), _heavy_value(158)),
    Vector("search k2v2 6", _K2V2S, 128, _heavy(46), _heavy_value(125)),
    Vector("search k8v8 1", _K8V8S, 128, _bell(13), _value(23)),
    Vector("search k8v8 2", _K8V8S, 128, _bell(76), _value(79)),
    Vector("search k8v8 3", _K8V8S, 128, _heavy(167), _value(9)),
    Vector("search k8v8 4", _K8V8S, 128, _heavy(148), _value(10)),
    Vector("search k8v8 5", _K8V8S, 128, _heavy(13), _heavy_value(12)),
    Vector("search k8v8 6", _K8V8S, 128, _heavy(76), _heavy_value(4)),
    Vector("search k8v8 7", _K8V8S, 128, _heavy(88), _heavy_value(135)),
    Vector("search k8v4 mirror 1", "kvarn_k8v4_g64", 64, _mirror(162), Input("small1", 10**6 + 60)),
    Vector("search k8v4 mirror 2", "kvarn_k8v4_g64", 64, _mirror(89), Input("small1", 10**6 + 35)),
    Vector("search k8v4 mirror 3", "kvarn_k8v4_g64", 64, _mirror(7), Input("small1", 10**6 + 176, _TRANSFORMED)),
    Vector("search k8v4 mirror 4", "kvarn_k8v4_g64", 64, _mirror(11), Input("small1", 10**6 + 13, _TRANSFORMED)),
    Vector("search k8v4 mirror 5", "kvarn_k8v4_g64", 64, _mirror(14), Input("small1", 10**6 + 63, _TRANSFORMED)),
    Vector("search k4v2 mirror 1", _K4V2S, 64, _mirror(20), Input("small1", 10**6 + 152)),
    Vector("search k4v2 mirror 2", _K4V2S, 64, _mirror(3), Input("small1", 10**6 + 35)),
    # Refused.
    Vector("infinity in the keys", _K4V2S, 64, _bell(1, ("infinity", 5, 6)), _bell(2)),
    Vector("minus infinity in the values", _K4V2S, 64, _bell(1), _bell(2, ("infinity", 63, 63), ("scale", -1, 0))),
    Vector("nan in the keys", _K4V4, 128, _bell(1, ("nan", 0, 0)), _bell(2)),
    Vector("nan in the values", _K2V2S, 64, _bell(1), _bell(2, ("nan", 63, 0))),
    Vector("keys beyond the limit", _K4V2S, 64, _small(91, ("scale", 15000, 0)), _small(92)),
    Vector("keys far beyond the limit", _K4V4, 128, _small(91, ("scale", 1, 120)), _small(92)),
    Vector("one token of the keys beyond the limit", _K4V4S, 128, _small(91, ("scale_token", 63, 1, 15)), _small(92)),
    Vector("values beyond the limit", _K4V2S, 64, _small(91), _small(92, ("scale", 15000, 0))),
    Vector("one rotated channel of the values beyond the limit", _K4V2, 128, _small(91), _bell(92, ("set", 3, 12))),
    Vector("keys and values beyond the limit", _K4V2S, 64, _small(91, ("scale", 1, 16)), _small(92, ("scale", 1, 16))),
)  # fmt: skip


def parts_that_differ(fmt: TileFormat, one: golden_mutants.Sealed, other: golden_mutants.Sealed) -> list[str]:
    """Which of status, flags, keys (their fields) and values differ; keys sealed in another basis count as flags."""
    if one.status != other.status:
        return ["status"]
    if one.tile is None or other.tile is None:
        return []
    edge = fmt.fields["v_codes"].offset
    parts = ["flags"] if one.flags != other.flags else []
    if not parts and not np.array_equal(one.tile[:edge], other.tile[:edge]):
        parts.append("keys")
    return parts + ([] if np.array_equal(one.tile[edge:], other.tile[edge:]) else ["values"])


def guards(vectors: tuple[Vector, ...]) -> dict[str, dict[str, str]]:
    """Wrong reading -> part -> a vector on which that reading changes that part: searched ones and small ones first."""
    found: dict[str, dict[str, str]] = {wrong: {} for wrong in golden_mutants.WRONG_READINGS}
    for vector in sorted(vectors, key=lambda v: (not v.name.startswith("search"), v.fmt.tile_nbytes)):
        fmt = vector.fmt
        keys, values = vector.keys.array(fmt), vector.values.array(fmt)
        right = golden_mutants.seal(keys, values, fmt)
        for wrong, parts in found.items():
            for part in parts_that_differ(fmt, right, golden_mutants.seal(keys, values, fmt, wrong)):
                parts.setdefault(part, vector.name)
    return found


def search(seeds: range) -> Iterator[tuple[Vector, str, str]]:
    """Vectors of random tiles with the wrong readings, and the parts, that show on them."""
    kinds = ("bell", "heavy", "small1")
    for seed in seeds:
        for preset in (_K4V2S, _K4V4S, _K2V2S, _K8V8S):
            kind = kinds[seed % len(kinds)]
            vector = Vector("search", preset, 128, Input(kind, seed), Input(kind, seed + 10**6))
            fmt = vector.fmt
            keys, values = vector.keys.array(fmt), vector.values.array(fmt)
            right = golden_mutants.seal(keys, values, fmt)
            for wrong in golden_mutants.WRONG_READINGS:
                for part in parts_that_differ(fmt, right, golden_mutants.seal(keys, values, fmt, wrong)):
                    yield vector, wrong, part


def tile_path(name: str) -> Path:
    """Where the whole tile of a vector lies."""
    return GOLDEN / (name.replace(" ", "-") + ".bin")


def main() -> None:
    """Write the files, or search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="overwrite existing golden files")
    parser.add_argument("--search", type=int, metavar="SEEDS", help="print the wrong readings that show on new tiles")
    args = parser.parse_args()
    if args.search:
        for vector, wrong, part in search(range(1, args.search + 1)):
            print(f"{wrong:24} {part:7} {vector.preset} {vector.keys} {vector.values}")
        return
    index = GOLDEN / f"format{FORMAT_VERSION}.json"
    existing = [path.name for path in (index, *map(tile_path, WHOLE)) if path.exists()]
    if existing and not args.force:
        sys.exit(f"{', '.join(existing)} exist; a change of bytes is a new format version (--force overwrites them)")
    found = guards(VECTORS)
    unguarded = [wrong for wrong, parts in found.items() if not parts]
    if unguarded:
        sys.exit(f"no vector shows {', '.join(unguarded)}")
    whole = {name: tile_path(name).name for name in WHOLE}
    vectors = [describe(vector) for vector in VECTORS]
    text = {"format": FORMAT_VERSION, "whole_tiles": whole, "guards": found, "vectors": vectors}
    index.write_text(json.dumps(text, indent=1) + "\n")
    for vector in VECTORS:
        if vector.name in WHOLE:
            fmt = vector.fmt
            tile, _ = reference.seal(vector.keys.array(fmt), vector.values.array(fmt), fmt)
            tile_path(vector.name).write_bytes(tile.tobytes())
    print(f"{len(vectors)} vectors, {len(whole)} whole tiles in {GOLDEN}")


if __name__ == "__main__":
    main()
