"""One kernel as it is launched, described so that it can be compiled for a target without a GPU.

Every kernel module lists its own in `compile_cases(fmt)`; tools/compile_kernels.py compiles them and reads the report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = (80, 86, 90, 100, 120)
SHARED_LIMITS = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}  # KiB that one program may take


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One launch of one kernel: what triton.compile needs, and on which architectures it is launched this way."""

    name: str  # names the variant, for the table: "seal D=128"
    kernel: Any  # the function under @triton.jit
    signature: Mapping[str, str]  # argument -> "*fp32", "*u8", "i32", "fp32", ...; constexprs may be left out
    constexprs: Mapping[str, Any]  # argument -> value
    num_warps: int
    num_stages: int = 1
    aligned: tuple[str, ...] = ()  # pointers and integers that are multiples of 16 at every launch
    options: Mapping[str, Any] = field(default_factory=dict)  # more compiler options: {"enable_fp_fusion": False}
    exact: bool = False  # whether its float operations may not be fused: a fused multiply-add is then a fault
    architectures: tuple[int, ...] = ARCHITECTURES
