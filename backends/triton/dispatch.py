"""Which version of the operations runs on a device, and why: Triton kernels, C++ on a CPU, or plain operations."""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.backends.triton import ops
from kvarn.backends.triton.cpu import kernels as cpu_kernels
from kvarn.backends.triton.cpu.build import BuildError, instruction_set, processor_flags
from kvarn.errors import UsageError
from kvarn.format import TileFormat

_log = logging.getLogger("kvarn.triton")
_TRITON = {"cuda"}  # kinds of devices; tests add the CPU, where Triton's interpreter runs the kernels
SWITCH = "KVARN_TRITON"  # "off" turns the Triton kernels off


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of a step, with the signatures of ops.py, and why these.

    triton: they are the Triton kernels, which a step may call in their own way (rows.py, operations.py).
    """

    seal: Callable[..., tuple[Tensor, Tensor, Tensor]]
    decode: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    why: str
    triton: bool = False


def choose(
    fmt: TileFormat | None,
    device: str,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Operations:
    """The operations for a tile format (None: exact pages alone) on a device.

    On a CPU, builds the C++ kernels where they are not there yet. On CUDA, compiles the Triton kernels for these heads
    and this dtype and checks them against the reference, once. Where either cannot be had, one line on standard error
    says why, once, and the plain operations run.
    """
    kind = torch.device(device).type
    if fmt is not None and kind in _TRITON:
        hk = kv_heads or 1
        return _for_gpu(fmt, device, heads or hk, hk, dtype)
    return _for_cpu(fmt) if kind == "cpu" else _plain(f"plain torch operations on {device}")


@functools.cache
def _for_cpu(fmt: TileFormat | None) -> Operations:
    try:
        cpu_kernels.prepare(fmt)
    except BuildError as error:
        _say(f"attention runs on plain torch operations, which is slow: {error}")
        return _plain(f"plain torch operations on the CPU: {error}")
    why = f"C++ on the CPU ({instruction_set(processor_flags())})"
    return Operations(seal=cpu_kernels.seal, decode=cpu_kernels.decode, attend=cpu_kernels.attend, why=why)


@functools.cache
def _for_gpu(fmt: TileFormat, device: str, heads: int, kv_heads: int, dtype: torch.dtype) -> Operations:
    fault = _unusable(device)
    if fault is None:
        from kvarn.backends.triton.kernels import operations
        from kvarn.backends.triton.kernels.probe import probe

        fault = probe(fmt, heads, kv_heads, dtype, device)
    if fault is not None:
        if os.environ.get(SWITCH) is None:  # else the user asked for it
            _say(f"attention runs on plain torch operations, which is slow: {fault}")
        return _plain(f"plain torch operations on {device}: {fault}")
    why = f"Triton kernels on {device}, checked against the reference at start"
    _log.debug("kvarn: %s: %s", fmt.name, why)
    return Operations(seal=operations.seal, decode=operations.decode, attend=operations.attend, why=why, triton=True)


def _unusable(device: str) -> str | None:
    """Why the Triton kernels cannot run on a device, if they cannot."""
    switch = os.environ.get(SWITCH)
    if switch == "off":
        return f"the Triton kernels are turned off ({SWITCH}=off)"
    if switch is not None:
        raise UsageError(f"{SWITCH}={switch!r} is not known; use {SWITCH}=off, or leave it out")
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if torch.device(device).type == "cuda":
        if torch.version.hip is not None:
            return "the Triton kernels were written for NVIDIA GPUs"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"the Triton kernels want a GPU of compute capability 8.0 or newer, this one has {major}.{minor}"
    return None


def _plain(why: str) -> Operations:
    return Operations(seal=ops.seal, decode=ops.decode, attend=ops.attend, why=why)


@functools.cache
def _say(reason: str) -> None:
    _log.warning("kvarn: %s", reason)
