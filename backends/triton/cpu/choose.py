"""Which version of the operations runs on a device, and why: C++ kernels on a CPU that can have them, else ops.py."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvarn.backends.triton import ops
from kvarn.backends.triton.cpu import kernels
from kvarn.backends.triton.cpu.build import BuildError, instruction_set, processor_flags
from kvarn.format import TileFormat

_log = logging.getLogger("kvarn.cpu")


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of a step, with the signatures of ops.py, and why these."""

    seal: Callable[..., tuple[Tensor, Tensor, Tensor]]
    decode: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    why: str


def choose(fmt: TileFormat | None, device: str) -> Operations:
    """The operations for a tile format (None: exact pages alone). Builds the kernels where they are not there yet.

    Where they cannot be built, one line on standard error says why, once, and the plain operations run.
    """
    if torch.device(device).type != "cpu":
        return _plain(f"plain torch operations on {device}")
    return _for_cpu(fmt)


@functools.cache
def _for_cpu(fmt: TileFormat | None) -> Operations:
    try:
        kernels.prepare(fmt)
    except BuildError as error:
        _say(str(error))
        return _plain(f"plain torch operations on the CPU: {error}")
    why = f"C++ on the CPU ({instruction_set(processor_flags())})"
    return Operations(seal=kernels.seal, decode=kernels.decode, attend=kernels.attend, why=why)


def _plain(why: str) -> Operations:
    return Operations(seal=ops.seal, decode=ops.decode, attend=ops.attend, why=why)


@functools.cache
def _say(reason: str) -> None:
    _log.warning("kvarn: attention runs on plain torch operations, which is slow: %s", reason)
