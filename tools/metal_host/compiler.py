"""C++ text -> a loaded library, compiled once per text and kept in a folder by its hash."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from metal_host.errors import MetalHostError

INCLUDE = Path(__file__).parent / "include"
FLAGS = ("-std=c++17", "-fPIC", "-w", "-fsanitize=bounds,shift", "-fno-strict-aliasing", "-fvisibility=hidden")
CONTRACTED = ("-ffp-contract=fast", "-fexpensive-optimizations")  # g++ fuses in a pass that -O1 leaves out
UNCONTRACTED = ("-ffp-contract=off",)


@cache
def cache_folder() -> Path:
    """Where libraries are kept: this user's own folder below the system's temporary one."""
    folder = Path(tempfile.gettempdir()) / f"metal-host-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def compiler() -> str:
    """The C++ compiler; MetalHostError where there is none."""
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return path
    raise MetalHostError("no C++ compiler on this machine; install g++")


def can_contract() -> bool:
    """Whether this CPU has fused multiply-adds, so that contraction can be shown."""
    if platform.machine() in ("aarch64", "arm64"):
        return True
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and " fma " in cpuinfo.read_text()


@cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(INCLUDE.iterdir()))


def load(text: str, *, contract: bool, optimize: str = "-O1") -> ctypes.CDLL:
    """Compile and load; raises MetalHostError with the compiler's first errors."""
    flags: tuple[str, ...] = (*FLAGS, optimize) + (CONTRACTED if contract else UNCONTRACTED)
    if contract and platform.machine() == "x86_64":
        flags += ("-mfma",)
    key = hashlib.sha256(_headers() + " ".join(flags).encode() + text.encode()).hexdigest()[:32]
    library = cache_folder() / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            source, part, whole = (Path(folder) / name for name in ("kernel.cpp", "kernel.o", "kernel.so"))
            source.write_text(text)
            _run([compiler(), *flags, *_includes(flags), "-c", str(source), "-o", str(part)])
            # Linked apart, without -fsanitize: the shim has the handlers itself.
            _run([compiler(), "-shared", str(part), "-o", str(whole)])
            whole.rename(library)
    return ctypes.CDLL(str(library))


@cache
def _includes(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Where the shim is: for g++ first a folder with it compiled beforehand, a fifth of every compilation."""
    plain = ("-I", str(INCLUDE))
    if not Path(compiler()).name.startswith("g++"):
        return plain
    key = hashlib.sha256(_headers() + " ".join(flags).encode()).hexdigest()[:32]
    folder = cache_folder() / f"{key}.include"
    if not (folder / "metal_stdlib.gch").exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            built = Path(scratch) / "metal_stdlib.gch"
            _run([compiler(), *flags, *plain, "-x", "c++-header", str(INCLUDE / "metal_stdlib"), "-o", str(built)])
            built.rename(folder / built.name)
    return ("-I", str(folder), *plain)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise MetalHostError("the source does not compile: " + "; ".join(lines[:4]))
