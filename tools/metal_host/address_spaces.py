"""A second opinion on address spaces: a kernel's source through clang as C++ for OpenCL, which has the same four."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from metal_host.errors import MetalHostError

HEADER = Path(__file__).with_name("address_spaces.h")
NAMES = ("clang-14", "clang-15", "clang-16", "clang-17", "clang-18", "clang-19", "clang")
_REFERENCE = re.compile(r"const constant (\w+)& (\w+) \[\[buffer")
_HEAD = re.compile(r"\[\[kernel\]\] void (\w+\([^{;]*\)) \{")


def clang() -> str | None:
    """A clang of this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def check(source: str) -> None:
    """Raises MetalHostError with clang's first errors for the exact source of one kernel without template arguments."""
    program = clang()
    if program is None:
        raise MetalHostError("no clang on this machine; install clang")
    # A kernel of OpenCL takes no references: scalars come by a pointer and get their name in the body.
    scalars = _REFERENCE.findall(source)
    source = _REFERENCE.sub(r"const constant \1* \2_pointer [[buffer", source)
    loads = " ".join(f"const {kind} {name} = *{name}_pointer;" for kind, name in scalars)
    source = _HEAD.sub(rf"__kernel void \1 {{ {loads}", source)
    source = source.replace("static constant constexpr const", "static constexpr const")
    source = re.sub(r"#include <metal\w+>", "", source)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.clcpp"
        # Inside the namespace: OpenCL has built-in functions of the same names outside it.
        text = f'#include "{HEADER}"\nnamespace metal {{\n#line 1 "kernel.metal"\n{source}\n}}'
        file.write_text(text)
        command = [program, "-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64", "-fsyntax-only", "-w"]
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise MetalHostError("clang refuses the source: " + "; ".join(lines[:4]))
