"""Build the C++ kernels of one tile format with the user's compiler, keep them in the cache folder, load them.

Each format is compiled for itself, so that every width and loop is a constant; it takes a few seconds, once. The
library's name is a hash of everything it depends on: sources, format, compiler and flags, which follow from the
processor. It is written beside its final name and renamed, so two processes that build at once do not disturb each
other. Behind the library stands a digest of its bytes: one that is cut, changed or foreign is built again. What has
not been loaded for two months is removed when another is built.
"""

import ctypes
import functools
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kvarn.folders import cache_folder
from kvarn.format import TileFormat

SOURCES = {"attention.cpp": "-ffp-contract=fast", "seal.cpp": "-ffp-contract=off"}  # sealing is exact to the byte
HEADERS = ("vectors.h", "threads.h")
COMPILERS = ("c++", "g++", "clang++")
DIGEST_BYTES = hashlib.sha256().digest_size
KEPT_DAYS = 60
SECONDS = 120  # a compiler that takes longer is stuck
AVX2 = ("avx2", "fma", "f16c")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


class BuildError(Exception):
    """The kernels cannot be had on this machine; the text says why and what would help."""


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the processor can do, in Linux's words; empty where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def instruction_set(flags: frozenset[str]) -> str:
    """`avx512`, `avx2` or `portable`: what the kernels are built for."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "portable"
    if flags.issuperset((*AVX2, *AVX512)):
        return "avx512"
    return "avx2" if flags.issuperset(AVX2) else "portable"


def find_compiler() -> tuple[str, ...]:
    """The command of a C++ compiler: the system's, else the one of the Python package ziglang; BuildError without."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    raise BuildError("no C++ compiler was found; install g++ or clang, or pip install ziglang")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler {command[0]} did not run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[-1] if lines else f"exit {done.returncode}")
        raise BuildError(f"{command[0]} refused the kernels: {reason}")
    return done.stdout


def flags_of(instructions: str, fmt: TileFormat, *, poison: bool = False) -> list[str]:
    """The compiler's options. `poison`: scratch memory begins as NaN, for tests.

    Not -march=native: gcc then made the same loops slower. No fast-math: sums keep their order.
    """
    features = {"avx512": (*AVX2, *AVX512), "avx2": AVX2, "portable": ()}[instructions]
    values = {
        "KEY_BITS": fmt.key_bits,
        "VALUE_BITS": fmt.value_bits,
        "TILE_TOKENS": fmt.tile_tokens,
        "HEAD_DIM": fmt.head_dim,
    }
    return [
        *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math"),
        *(f"-m{name}" for name in features),
        *(f"-DKVARN_{name}={value}" for name, value in values.items()),
        *(["-DKVARN_POISON"] if poison else []),
    ]


def library(
    fmt: TileFormat, *, folder: Path | None = None, instructions: str | None = None, poison: bool = False
) -> ctypes.CDLL:
    """The kernels of one format, built now if need be. BuildError when that is not possible here."""
    if sys.byteorder != "little":
        raise BuildError("the kernels are written for little-endian processors")
    folder = cache_folder() / "cpu-kernels" if folder is None else folder
    chosen = instruction_set(processor_flags()) if instructions is None else instructions
    compiler = find_compiler()
    flags = flags_of(chosen, fmt, poison=poison)
    here = Path(__file__).parent
    try:
        text = [(here / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    except OSError as error:
        raise BuildError(f"the sources of the kernels are not installed: {error}") from error
    parts = [*text, _version(compiler).encode(), " ".join([*compiler, *flags, *SOURCES.values()]).encode()]
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]
    path = folder / f"{fmt.name}_d{fmt.head_dim}_{chosen}_{key}.so"
    loaded = _load(path)
    if loaded is None:
        _build(path, compiler, flags)
        _forget_old(folder)
        loaded = _load(path)
    if loaded is None:
        raise BuildError(f"{path} was built but does not load; is {folder} mounted noexec?")
    return loaded


def _load(path: Path) -> ctypes.CDLL | None:
    """The library, if it is there and whole; a cut one must not reach the loader, which can crash on it."""
    try:
        raw = path.read_bytes()
        if hashlib.sha256(raw[:-DIGEST_BYTES]).digest() != raw[-DIGEST_BYTES:]:
            return None
        loaded = ctypes.CDLL(str(path))
    except OSError:
        return None
    with suppress(OSError):  # a folder that may only be read
        path.touch()  # in use, see _forget_old
    return loaded


def _forget_old(folder: Path) -> None:
    """Remove libraries that nobody has loaded for KEPT_DAYS: of other versions, compilers, formats."""
    before = time.time() - KEPT_DAYS * 86400
    for path in folder.glob("*.so"):
        with suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()


def _build(path: Path, compiler: Sequence[str], flags: Sequence[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
            work = Path(folder)
            with ThreadPoolExecutor(len(SOURCES)) as pool:
                here = Path(__file__).parent
                commands = [
                    [*compiler, *flags, own, "-c", str(here / name), "-o", str(work / f"{name}.o")]
                    for name, own in SOURCES.items()
                ]
                list(pool.map(_run, commands))
            fresh = work / path.name
            _run([*compiler, "-shared", "-pthread", *(str(work / f"{x}.o") for x in SOURCES), "-o", str(fresh), "-ldl"])
            raw = fresh.read_bytes()
            fresh.write_bytes(raw + hashlib.sha256(raw).digest())
            fresh.replace(path)
    except OSError as error:
        raise BuildError(f"the kernels cannot be written to {path.parent}: {error}") from error
