"""Which version of the operations a step runs, and why: the Metal kernels once they passed here, else ops.py.

On Metal the kernels that a model needs are first compared with the oracle, on that device: a few tiles by the byte, and
decode, verify and prefill over a short sequence. Where that fails, one line on standard error says so, and the plain
operations run. KVARN_METAL=off goes back to them whatever the check says.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.core import array

from kvarn.backends.mlx import ops
from kvarn.backends.mlx.kernels import kernels
from kvarn.errors import UsageError
from kvarn.format import TileFormat
from kvarn.model_plan import ModelPlan
from kvarn.selfcheck import Floats, quick_check
from kvarn.tile import Bytes

VARIABLE = "KVARN_METAL"

_log = logging.getLogger("kvarn.mlx")


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of a step, with the signatures of ops.py, and why these."""

    seal: Callable[..., tuple[array, array, array]]
    attend: Callable[..., array]
    why: str


def choose(plan: ModelPlan, dtype: mx.Dtype) -> Operations:
    """The operations for a model's sealed layers on the device that MLX uses now; checks the kernels where it must.

    UsageError where KVARN_METAL is neither empty nor on nor off.
    """
    chosen = _choose(plan, dtype)
    _log.debug("kvarn: seal and attend: %s", chosen.why)
    return chosen


def _choose(plan: ModelPlan, dtype: mx.Dtype) -> Operations:
    switched_off, fmt = _switched_off(), plan.tile_format
    device = mx.default_device().type.name
    if not kernels.available():
        return _plain(f"plain MLX operations on the {device}; the Metal kernels need a Mac's GPU")
    if fmt is None:
        return _plain(f"plain MLX operations on the {device}: no layer holds tiles")
    if switched_off:
        return _plain(f"plain MLX operations on the {device}: {VARIABLE}=off")
    fault = _fault(fmt, plan.num_heads // plan.sealed[0].num_kv_heads, dtype)
    if fault:
        _say(fault)
        return _plain(f"plain MLX operations on the {device}: {fault}")
    why = "Metal kernels, compared with the oracle on this device when the model was loaded"
    return Operations(seal=kernels.seal, attend=kernels.attend, why=why)


def _switched_off() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "on", "off"):
        raise UsageError(f"{VARIABLE} is {value!r}; use off (plain MLX operations on a Mac too) or on, or unset it")
    return value == "off"


def _plain(why: str) -> Operations:
    return Operations(seal=ops.seal, attend=ops.attend, why=why)


@functools.cache
def _fault(fmt: TileFormat, ratio: int, dtype: mx.Dtype) -> str:
    """What is wrong with the kernels of a format on this device, in one clause; empty when nothing is.

    ratio: query heads per kv head, a constant of the kernels; the number of kv heads is none, so two are enough.
    """
    try:
        quick_check(OverNumpy(kernels.seal, kernels.attend, dtype), fmt, heads=2 * ratio, kv_heads=2)
    except AssertionError as error:
        detail = str(error)
    except Exception as error:  # whatever MLX raises on a machine that we have not seen
        detail = f"{type(error).__name__}: {str(error).strip() or 'no text'}".splitlines()[0]
    else:
        return ""
    return f"the Metal kernels of {fmt.name} at head_dim {fmt.head_dim} failed their check ({detail})"


@functools.cache
def _say(fault: str) -> None:
    _log.warning("kvarn: attention runs on plain MLX operations, which is slow: %s; please report it", fault)


@dataclass(frozen=True)
class OverNumpy:
    """Operations with the signatures of ops.py over NumPy arrays; see kvarn.selfcheck.SealAndAttend.

    dtype: of queries and exact keys and values, as a model's. Tiles are scattered over a pool of garbage.
    """

    sealing: Callable[..., tuple[array, array, array]]
    attention: Callable[..., array]
    dtype: mx.Dtype = mx.float32

    def seal(self, keys: Floats, values: Floats, fmt: TileFormat) -> tuple[Bytes, Bytes, Bytes]:
        tiles, flags, status = self.sealing(mx.array(keys), mx.array(values), fmt)
        return np.array(tiles), np.array(flags), np.array(status)

    def attend(
        self, query: Floats, keys: Floats, values: Floats, tiles: Bytes, flags: Bytes, start: int, fmt: TileFormat
    ) -> Any:
        g, count = fmt.tile_tokens, len(tiles)
        both = mx.array(np.stack([keys, values])).swapaxes(1, 2).astype(self.dtype)  # [2, Hk, T, D]
        sink, window = both[:, :, :g], both[:, :, start // g * g :]
        blocks = np.arange(count)[::-1] * 2 + 1
        # As many flags as a real pool has at least: fewer would be other sources (kernels.FEWEST_ELEMENTS).
        pool = np.full((max(2 * count + 1, kernels.FEWEST_ELEMENTS), *tiles.shape[1:]), 0xFF, np.uint8)
        marks = np.full(pool.shape[:2], 0xFF, np.uint8)
        pool[blocks], marks[blocks] = tiles, flags
        table = mx.array(blocks.astype(np.int32))
        q = mx.array(query).astype(self.dtype)
        scale = fmt.head_dim**-0.5
        return np.array(self.attention(q, sink, window, mx.array(pool), mx.array(marks), table, start, scale, fmt))
