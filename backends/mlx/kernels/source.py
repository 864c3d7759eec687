"""Metal sources by name: a file of this folder with the constants of one format, split for mx.fast.metal_kernel.

A `.metal` file holds functions, then the line `// --- body`, then the kernel's body. `#include "tile.metal"` is where
the constants and the shared functions go; a pragma above it therefore covers everything.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from kvarn.format import FLAG_KEYS_ROTATED, TileFormat

FOLDER = Path(__file__).parent
NO_CONTRACTION = "#pragma METAL fp contract(off)"
_INCLUDE = '#include "tile.metal"'
_BODY = "// --- body\n"


@cache
def read(name: str) -> str:
    """The text of one file."""
    return (FOLDER / f"{name}.metal").read_text(encoding="utf-8")


def head_dim_constants(head_dim: int) -> dict[str, str]:
    """What the rotation needs."""
    return {"HEAD_DIM": str(head_dim), "ROTATE_SCALE": f"{np.float32(1 / np.sqrt(head_dim)):.9g}f"}


def constants(fmt: TileFormat) -> dict[str, str]:
    """Every constant of a format, by the names that the kernels use."""
    sizes = {
        "TILE_TOKENS": fmt.tile_tokens,
        "KEY_BITS": fmt.key_bits,
        "VALUE_BITS": fmt.value_bits,
        "TILE_NBYTES": fmt.tile_nbytes,
        "FLAG_KEYS_ROTATED": FLAG_KEYS_ROTATED,
    }
    sizes |= {name.upper(): field.offset for name, field in fmt.fields.items()}
    return head_dim_constants(fmt.head_dim) | {name: str(value) for name, value in sizes.items()}


def compose(name: str, defines: Mapping[str, str]) -> tuple[str, str]:
    """Header and body of one kernel, as mx.fast.metal_kernel takes them."""
    functions, body = read(name).split(_BODY)
    lines = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    return functions.replace(_INCLUDE, lines + read("tile")), body
