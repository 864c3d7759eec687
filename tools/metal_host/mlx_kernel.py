"""A look-alike of mx.fast.metal_kernel that runs on this CPU the exact source that MLX would compile on a Mac.

MLX itself writes the source (signature, template, address spaces): the call is exported with mx.export_function and the
source is read out of the file. So a mistake in names, types or template arguments shows here as it would on a Mac.
"""

import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from metal_host.errors import MetalHostError
from metal_host.runner import SCHEDULES, Bytes, Compiled, compile_source, run_schedules

_real_kernel = mx.fast.metal_kernel


def exported_source(call: Callable[..., list[mx.array]], inputs: Sequence[mx.array]) -> str:
    """The Metal source inside a function that calls one metal_kernel, as MLX would compile it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "call.mlxfn"
        mx.export_function(str(path), lambda *args: call(list(args)), *inputs)
        data = path.read_bytes()
    mark = b"\x0c" + bytes(7) + b"CustomKernel"
    at = data.find(mark)
    if at < 0:
        raise MetalHostError("MLX exported no custom kernel; this version of MLX writes another file than 0.32")
    at += len(mark)
    for _ in range(2):  # the kernel's name, then its source
        (length,) = struct.unpack_from("<Q", data, at)
        text = data[at + 8 : at + 8 + length]
        at += 8 + length
    return text.decode()


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    *,
    schedules: Sequence[str] = SCHEDULES,
    contract: bool = True,
    unroll: bool = False,
    optimize: str = "-O1",
    races: bool = True,
    launches: list[str] | None = None,
) -> Callable[..., list[mx.array]]:
    """As mx.fast.metal_kernel; the rest says how the host runs it. launches: gets the source of every launch."""
    real: Any = _real_kernel(name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs)
    compiled: dict[Any, tuple[str, Compiled]] = {}

    def run(
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        mx.eval(*arrays)
        if ensure_row_contiguous:
            arrays = [mx.contiguous(x) for x in arrays]
            mx.eval(*arrays)
        launch: dict[str, Any] = {"output_shapes": output_shapes, "output_dtypes": output_dtypes, "grid": grid}
        launch |= {"threadgroup": threadgroup, "init_value": init_value}
        # MLX wants no empty template list.
        launch |= {"template": template} if template else {}
        # The source depends on types, ranks, and on which inputs have fewer than 8 elements.
        key = (
            tuple((str(x.dtype), x.ndim, x.size < 8) for x in arrays),
            tuple(map(str, output_dtypes)),
            str(template),
        )
        if key not in compiled:
            text = exported_source(lambda args: real(inputs=args, stream=mx.gpu, **launch), arrays)
            compiled[key] = text, compile_source(text, contract=contract, unroll=unroll, optimize=optimize)
        text, kernel = compiled[key]
        if launches is not None:
            launches.append(text)
        buffers: dict[str, Bytes] = {}
        readable: dict[str, Bytes] = {}
        for label, x in zip(input_names, arrays, strict=True):
            buffers[label], strides, mask = _spread(x)
            if mask is not None:
                readable[label] = mask
            buffers[f"{label}_shape"] = _raw(np.array(x.shape, np.int32))
            buffers[f"{label}_strides"] = _raw(np.array(strides, np.int64))
            buffers[f"{label}_ndim"] = _raw(np.array([x.ndim], np.int32))
        sizes = {
            label: int(np.prod(shape)) * dtype.size
            for label, shape, dtype in zip(output_names, output_shapes, output_dtypes, strict=True)
        }
        initial: dict[str, Bytes] = {}
        if init_value is not None:
            for label, shape, dtype in zip(output_names, output_shapes, output_dtypes, strict=True):
                initial[label] = _spread(mx.full(tuple(shape), init_value, dtype))[0]
        raw = run_schedules(
            kernel,
            buffers,
            sizes,
            grid=grid,
            threadgroup=threadgroup,
            schedules=schedules,
            initial=initial,
            races=races,
            readable=readable,
        )
        return [
            mx.array(raw[label]).view(dtype).reshape(*shape)
            for label, shape, dtype in zip(output_names, output_shapes, output_dtypes, strict=True)
        ]

    return run


def _raw(x: Any) -> Bytes:
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)


def _spread(x: mx.array) -> tuple[Bytes, list[int], Bytes | None]:
    """The bytes that an array spans, its strides in elements, and for a view with gaps which bytes belong to it."""
    if x.dtype == mx.bfloat16:
        x = x.view(mx.uint16)
    mx.eval(x)
    size = x.dtype.size
    view = np.array(x, copy=False)
    if x.size == 0 or x.ndim == 0 or view.flags.c_contiguous or any(s < 0 for s in view.strides):
        dense = np.ascontiguousarray(view).reshape(x.shape)
        return _raw(dense), [s // size for s in dense.strides], None
    span = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + size
    data, mask = np.full(span, 0xFF, np.uint8), np.zeros(span, np.uint8)
    places = (
        np.lib.stride_tricks.as_strided(y[:size].view(view.dtype), view.shape, view.strides) for y in (data, mask)
    )
    next(places)[...] = view
    next(places).view(np.uint8 if size == 1 else f"u{size}")[...] = int.from_bytes(b"\x01" * size, "little")
    return data, [s // size for s in view.strides], mask
