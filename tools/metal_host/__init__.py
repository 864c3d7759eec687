"""Runs Metal kernels on a CPU, so that they can be tested without a Mac.

A kernel's source is compiled as C++ under a small shim (`include/`) and run threadgroup by threadgroup, one fiber per
thread. It sees more than a device: reads and writes out of bounds, uninitialized threadgroup memory, races between
threads without a barrier, collectives in divergent code, results that depend on the order of the threads. docs/metal.md
says what it cannot see.

    from metal_host import compile_source
    from metal_host.mlx_kernel import metal_kernel  # stands in for mx.fast.metal_kernel; needs MLX
"""

from metal_host.errors import MetalHostError
from metal_host.runner import Compiled, compile_source, run_schedules

__all__ = ["Compiled", "MetalHostError", "compile_source", "run_schedules"]
