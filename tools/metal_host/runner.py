"""A compiled kernel and its run: buffers of bytes in, every schedule, the same bytes out or an error."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metal_host import compiler
from metal_host.errors import MetalHostError
from metal_host.rewrite import HostSource, rewrite

SCHEDULES = ("forward", "reverse", "random")
POISON = 0xFF  # a NaN in every float type, and a large integer
Bytes = NDArray[np.uint8]


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("written", ctypes.c_int32),
        ("defined", ctypes.c_void_p),
    )


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A kernel that is ready to run."""

    source: HostSource
    library: ctypes.CDLL

    def run(
        self,
        buffers: Mapping[str, Bytes],
        *,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        schedule: str = "forward",
        seed: int = 1,
        races: bool = True,
        readable: Mapping[str, Bytes] | None = None,
    ) -> None:
        """Run once over the bytes of every buffer, outputs written in place.

        readable: for some inputs, a 1 for every byte that may be read, 0 for the gaps of a view.
        grid counts threads, in whole threadgroups of whole simdgroups. Raises MetalHostError for a read or write out of
        bounds, an uninitialized threadgroup read, a race (two threads, no barrier between), a divergent collective, and
        threadgroup memory over 32 KB.
        """
        arguments = self.source.arguments
        if missing := [x.name for x in arguments if x.name not in buffers]:
            raise MetalHostError(f"buffers {', '.join(missing)} are missing")
        threads = int(np.prod(threadgroup))
        if threads % 32 or threads > 1024 or any(a % b for a, b in zip(grid, threadgroup, strict=True)):
            raise MetalHostError(
                f"grid {grid} with threadgroup {threadgroup}: the host wants whole threadgroups of a multiple of "
                f"32, at most 1024, threads"
            )
        table = (_Buffer * (1 + max(x.index for x in arguments)))()
        for x in arguments:
            data = buffers[x.name]
            if not data.flags.c_contiguous:
                raise MetalHostError(f"buffer {x.name} is not contiguous")
            mask = (readable or {}).get(x.name)
            defined = None if mask is None else mask.ctypes.data
            table[x.index] = _Buffer(x.name.encode(), data.ctypes.data, data.nbytes, int(x.written), defined)
        sizes = (ctypes.c_uint32 * 6)(*grid, *threadgroup)
        error = ctypes.create_string_buffer(512)
        run: Any = self.library.mh_run
        run.restype = ctypes.c_int
        number = SCHEDULES.index(schedule)
        if run(table, len(table), sizes, number, ctypes.c_uint64(seed), int(races), error, len(error)):
            raise MetalHostError(f"{error.value.decode()}, {schedule} schedule")


def compile_source(source: str, *, contract: bool = True, unroll: bool = False, optimize: str = "-O1") -> Compiled:
    """Compile the exact source of one kernel.

    contract: products and sums may be fused where the source has no `#pragma METAL fp contract(off)`, as MLX has Metal
    do; without it nothing is fused. Contraction needs a CPU with fused multiply-adds (`compiler.can_contract`).
    unroll: unroll loops, so that the compiler sees more of the pairs that a device's would fuse; it takes longer.
    optimize: "-O0" compiles in less than half the time and runs several times slower, fusing nothing.
    """
    host = rewrite(source)
    fused = contract and not host.forbids_contraction and compiler.can_contract()
    text = host.text.replace("clang loop unroll(full)", "GCC unroll 4") if unroll else host.text
    return Compiled(source=host, library=compiler.load(text, contract=fused, optimize=optimize))


def run_schedules(
    compiled: Compiled,
    inputs: Mapping[str, Bytes],
    outputs: Mapping[str, int],
    *,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    schedules: Sequence[str] = SCHEDULES,
    initial: Mapping[str, Bytes] | None = None,
    races: bool = True,
    readable: Mapping[str, Bytes] | None = None,
) -> dict[str, Bytes]:
    """Run under every schedule: the outputs' bytes, which must not depend on it.

    outputs: name -> size in bytes; they start poisoned (0xFF), or as `initial` says.
    """
    first: dict[str, Bytes] | None = None
    for schedule in schedules:
        fresh = {name: np.full(nbytes, POISON, np.uint8) for name, nbytes in outputs.items()}
        for name, data in (initial or {}).items():
            fresh[name][:] = data
        compiled.run(
            {**inputs, **fresh},
            grid=grid,
            threadgroup=threadgroup,
            schedule=schedule,
            seed=len(schedule),
            races=races,
            readable=readable,
        )
        if first is None:
            first = fresh
        for name in outputs:
            if not np.array_equal(first[name], fresh[name]):
                raise MetalHostError(f"output {name} depends on the schedule: {schedules[0]} and {schedule} differ")
    assert first is not None
    return first
