"""The contract of a backend: it owns the tensors, the core owns all decisions.

Calls go one way, core to backend, and carry host data only. Two implementations: `kvarn.backends.triton` (torch) and
`kvarn.backends.mlx`.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvarn.errors import BackendError, RecordError, UsageError
from kvarn.format import Preset
from kvarn.model_plan import ModelPlan
from kvarn.step import StepPlan, StepResult

BACKENDS = {"mlx": "mlx", "triton": "torch"}  # name -> the framework that it needs


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What was loaded."""

    plan: ModelPlan
    vocab_size: int
    dtype: str  # float32, float16 or bfloat16
    device: str
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    rope: Mapping[str, Any] = field(default_factory=dict)  # the RoPE in use, as kvarn.rope_scaling.describe says it

    @property
    def exact_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers in the model's dtype."""
        itemsize = 4 if self.dtype == "float32" else 2
        return sum(2 * layer.num_kv_heads * layer.head_dim * itemsize for layer in self.plan.layers)


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """Bytes of one block (sealed tiles, flags, and the exact layers' pages) and of one exact slot."""

    block_bytes: int
    slot_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What `allocate` really took, in bytes, as the framework counts it."""

    blocks: int
    slots: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """Host bytes of one block, or of one sink.

    A block: `tiles uint8 [L, Hk, tile_nbytes]` and `flags uint8 [L, Hk]` of the sealed layers, and in `exact` the keys
    and values of the layers that are exact for good. A sink: `tiles` and `flags` are None, and `exact` holds every
    layer. `exact[layer]` is `uint8 [2, Hk, G, D * itemsize]`: keys, then values, raw little-endian, in `dtype`.
    """

    dtype: str
    tiles: NDArray[np.uint8] | None
    flags: NDArray[np.uint8] | None
    exact: Mapping[int, NDArray[np.uint8]]

    def check(self, *, info: ModelInfo, sink: bool) -> None:
        """Raise RecordError unless every shape is the one that this model's plan asks for."""
        plan, fmt = info.plan, info.plan.tile_format
        itemsize = 4 if info.dtype == "float32" else 2
        if self.dtype != info.dtype:
            raise RecordError(f"the record's dtype is {self.dtype}, the model's {info.dtype}")
        for array in (self.tiles, self.flags, *self.exact.values()):
            if array is not None and array.dtype != np.uint8:
                raise RecordError(f"the record holds {array.dtype} where bytes are expected")
        layers = plan.layers if sink or fmt is None else plan.exact
        want = {x.index: (2, x.num_kv_heads, plan.tile_tokens, x.head_dim * itemsize) for x in layers}
        got = {index: array.shape for index, array in self.exact.items()}
        if got != want:
            raise RecordError(f"the record's exact layers are {got}, expected {want}")
        if sink or fmt is None:
            if self.tiles is not None or self.flags is not None:
                raise RecordError("the record of a sink holds tiles")
            return
        shape = (len(plan.sealed), plan.sealed[0].num_kv_heads)
        if self.tiles is None or self.flags is None:
            raise RecordError("the record of a block holds no tiles")
        if self.tiles.shape != (*shape, fmt.tile_nbytes) or self.flags.shape != shape:
            raise RecordError(
                f"the record's tiles are {list(self.tiles.shape)} and its flags {list(self.flags.shape)}, "
                f"expected {[*shape, fmt.tile_nbytes]} and {list(shape)}"
            )


class Backend(Protocol):
    """One loaded model with its two pools."""

    info: ModelInfo
    pool_size: PoolSize

    def share(self, preset: Preset | None) -> "Backend":
        """Another backend over the same weights with another cache dtype and pools of its own."""

    def available_bytes(self) -> int:
        """Memory of the device that `allocate` may still take."""

    def peak_bytes(self) -> int:
        """The most memory held so far: as the framework counts it, or the process's where that counts none."""

    def allocate(self, num_blocks: int, num_slots: int) -> MemoryReport:
        """Make both pools; CapacityError with both numbers when they do not fit."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step: append, seal, attend in every layer, then logits or sampled tokens."""

    def export_block(self, block: int) -> Record:
        """The host bytes of a sealed block."""

    def export_sink(self, slot: int) -> Record:
        """The host bytes of a full sink."""

    def adopt_block(self, record: Record, block: int) -> None:
        """Write a record into a block; RecordError when its shapes are not this model's."""

    def adopt_sink(self, record: Record, slot: int) -> None:
        """Write a record into a slot; RecordError when its shapes are not this model's."""

    def copy_exact(self, source: int, target: int) -> None:
        """Copy a slot, all layers; a fork copies its tail before it writes."""

    def route(self) -> Mapping[str, str]:
        """Operation -> which implementation runs, and why."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load a model. dtype and device `auto` are the backend's choice.

    adapter: the folder of a LoRA adapter (`kvarn.adapter`). rope_scaling: an override (`kvarn.rope_scaling.parse`).
    """

    dtype: str = "auto"
    device: str = "auto"
    adapter: Path | None = None
    rope_scaling: Mapping[str, Any] | None = None


def available() -> list[str]:
    """The backends whose framework is installed here, the preferred one first."""
    return [name for name, module in BACKENDS.items() if importlib.util.find_spec(module) is not None]


def choose(name: str, *, apple_silicon: bool) -> str:
    """`auto` or a name -> the backend's name; UsageError for an unknown name, BackendError when it is missing here."""
    if name == "auto":
        name = "mlx" if apple_silicon else "triton"
    if name not in BACKENDS:
        raise UsageError(f"unknown backend {name!r}; use auto, {' or '.join(sorted(BACKENDS))}")
    if name not in available():
        raise BackendError(
            f"backend {name} needs {BACKENDS[name]}, which is not installed; pip install {BACKENDS[name]}"
        )
    return name


def load(name: str, model_dir: Path, preset: Preset | None, options: LoadOptions) -> Backend:
    """Load a model folder with a backend by name; imports the backend's framework here and not before."""
    module: Any = importlib.import_module(f"kvarn.backends.{name}.backend")
    loader: Callable[[Path, Preset | None, LoadOptions], Backend] = module.load
    return loader(model_dir, preset, options)
