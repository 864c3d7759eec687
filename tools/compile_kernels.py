"""Compile every Triton kernel for real targets, without a GPU: registers, shared memory, spills, tensor-core use.

    python tools/compile_kernels.py          the presets and targets that CI checks
    python tools/compile_kernels.py --all    more presets, tile lengths and targets

Leaves with 1 if a kernel spills registers, takes more shared memory than its target has, or fuses operations though it
must be exact. Kernels are found by themselves: every module of kvarn.backends.triton.kernels that has a function
`compile_cases(fmt)`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from pkgutil import iter_modules
from time import perf_counter
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel has nothing to compile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kvarn.backends.triton.kernels as kernels
from kvarn.backends.triton.kernels.compile_case import ARCHITECTURES, SHARED_LIMITS, CompileCase
from kvarn.format import HEAD_DIMS, Preset, TileFormat

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CI_PRESETS = ("kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k3v5_g128", "kvarn_k8v8_g128")
CI_ARCHITECTURES = (86, 90)
ALL_PRESETS = (
    *CI_PRESETS,
    *("kvarn_k2v2_g128", "kvarn_k5v6_g128", "kvarn_k6v3_g128"),
    *("kvarn_k4v2_g64", "kvarn_k2v2_g64", "kvarn_k3v5_g64", "kvarn_k8v8_g64"),
)
TENSOR_CORE = re.compile(r"^\s+(?:@\S+ )?(mma|wgmma\.mma_async|tcgen05\.mma)\.", re.MULTILINE)
FUSED = re.compile(r"\bfma\.")
SPILL = re.compile(r"\b(STL|LDL)\b")  # not the size of the stack: a call may reserve some that nobody uses


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler says of one kernel on one target."""

    name: str
    architecture: int
    registers: int
    spills: int  # instructions that store registers in local memory or load them from there
    shared: int  # bytes
    tensor_core: int  # instructions in the code
    fused: int  # multiply-adds in the code of a kernel that may have none
    seconds: float

    @property
    def faults(self) -> tuple[str, ...]:
        """What must not be."""
        limit = SHARED_LIMITS[self.architecture] * 1024
        faults = []
        if self.spills:
            faults.append("spills")
        if self.fused:
            faults.append(f"{self.fused} fused multiply-adds")
        if self.shared > limit:
            faults.append(f"{self.shared} bytes of shared memory, sm_{self.architecture} has {limit}")
        return tuple(faults)

    @property
    def line(self) -> str:
        """A row of the table."""
        shared = self.shared / 1024
        return (
            f"{self.name:44} sm_{self.architecture:<4} {self.registers:9} {self.spills:8} {shared:11.1f} "
            f"{self.tensor_core:12} {self.seconds:8.1f}" + "".join(f"  FAULT: {fault}" for fault in self.faults)
        )


def run_tool(name: str, *arguments: str) -> str:
    """What one of the tools that come with Triton prints."""
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def assemble(case: CompileCase, architecture: int) -> tuple[Any, str, str]:
    """Compile one case for one target: what Triton made of it, its machine code, the resources that it takes."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    source = ASTSource(case.kernel, signature, dict(case.constexprs), attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = run_tool("cuobjdump", "--dump-resource-usage", cubin.name)
        return compiled, run_tool("nvdisasm", "-c", cubin.name), usage


def compile_case(case: CompileCase, architecture: int) -> Report:
    """Compile one case for one target and read the reports of it."""
    begun = perf_counter()
    compiled, code, usage = assemble(case, architecture)
    seconds = perf_counter() - begun
    found = re.search(r"REG:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers:\n{usage}")
    return Report(
        name=case.name,
        architecture=architecture,
        registers=int(found[1]),
        spills=len(SPILL.findall(code)),
        shared=compiled.metadata.shared,
        tensor_core=len(TENSOR_CORE.findall(compiled.asm["ptx"])),
        fused=len(FUSED.findall(compiled.asm["ptx"])) if case.exact else 0,
        seconds=seconds,
    )


def cases(fmt: TileFormat) -> Iterator[CompileCase]:
    """The cases of all kernel modules for a format."""
    for module in iter_modules(kernels.__path__):
        found = getattr(import_module(f"{kernels.__name__}.{module.name}"), "compile_cases", None)
        if found is not None:
            yield from found(fmt)


@dataclass(frozen=True)
class Job:
    """A case by its place, for kernels do not travel between processes."""

    preset: str
    head_dim: int
    index: int
    architecture: int

    def run(self) -> Report:
        """Compile it."""
        fmt = Preset.parse(self.preset).with_head_dim(self.head_dim)
        return compile_case(list(cases(fmt))[self.index], self.architecture)


def summary(reports: list[Report]) -> str:
    """A table in Markdown: kernels against targets; what the presets have in common, from the least to the most."""
    targets = sorted({report.architecture for report in reports})
    groups: dict[str, dict[int, list[Report]]] = {}
    for report in reports:
        name = re.sub(r" kvarn_\S+", "", report.name)
        groups.setdefault(name, {}).setdefault(report.architecture, []).append(report)

    def span(numbers: list[float]) -> str:
        least, most = min(numbers), max(numbers)
        return f"{least:g}" if least == most else f"{least:g}–{most:g}"

    def cell(found: list[Report]) -> str:
        columns = ([x.registers for x in found], [x.shared / 1024 for x in found], [x.tensor_core for x in found])
        return " / ".join(span([round(float(x), 1) for x in column]) for column in columns)

    lines = [
        "| kernel | " + " | ".join(f"sm_{target}" for target in targets) + " |",
        "| --- " * (len(targets) + 1) + "|",
    ]
    for name, found in sorted(groups.items(), key=lambda x: _natural(x[0])):
        lines.append(f"| {name} | " + " | ".join(cell(found[x]) if x in found else "" for x in targets) + " |")
    return "\n".join(lines)


def _natural(name: str) -> tuple[str, int]:
    """A name's order: its head_dim as a number."""
    words, _, head_dim = name.partition(" D=")
    return words, int(head_dim or 0)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="more presets, every tile length and target")
    parser.add_argument("--preset", action="append", help="this preset instead; may be repeated")
    parser.add_argument("--arch", type=numbers, help="these targets instead, for example 86,90")
    parser.add_argument("--head-dim", type=numbers, default=HEAD_DIMS, help="these head_dims instead")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--table", action="store_true", help="in the end a table in Markdown, presets together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many to compile at a time")
    options = parser.parse_args()
    presets = options.preset or (ALL_PRESETS if options.all else CI_PRESETS)
    architectures = options.arch or (ARCHITECTURES if options.all else CI_ARCHITECTURES)
    print(f"Triton {triton.__version__}")
    print(f"{'kernel':44} target  registers  spilled  shared KiB  tensor core  seconds", flush=True)
    jobs = [
        Job(preset, head_dim, index, architecture)
        for preset in presets
        for head_dim in options.head_dim
        for index, case in enumerate(cases(Preset.parse(preset).with_head_dim(head_dim)))
        if options.only in case.name
        for architecture in sorted(set(architectures) & set(case.architectures))
    ]
    reports = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for report in pool.map(Job.run, jobs):
            print(report.line, flush=True)
            reports.append(report)
    bad = sum(bool(report.faults) for report in reports)
    if options.table:
        print(summary(reports))
    print(f"{bad} with faults" if bad else "no spills, all within their shared memory")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
