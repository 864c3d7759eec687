"""Building kernels: cached by what they depend on, rebuilt when damaged, refused with a reason.

The compiler here is a script that hands out a library of its own and keeps a log, but for the first test.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvarn.backends.triton.cpu import build
from kvarn.backends.triton.cpu.build import BuildError, instruction_set, library
from kvarn.format import Preset

FMT = Preset().with_head_dim(64)

SCRIPT = """#!{python} -IS
import os, shutil, sys, time
args = sys.argv[1:]
if args == ["--version"]:
    print("pretend 1")
    sys.exit()
with open("{log}", "a") as log:
    print(" ".join(args), file=log)
if {fail}:
    print("kernels.cpp:1: error: no such luck", file=sys.stderr)
    sys.exit(1)
time.sleep(0.05)
out = args[args.index("-o") + 1]
if "-c" in args:
    open(out, "w").close()
else:
    shutil.copy("{library}", out)
"""


@dataclass(frozen=True)
class Pretended:
    """A compiler in a PATH of its own."""

    folder: Path
    library: Path

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def links(self) -> int:
        """How often a library was made."""
        return sum("-shared" in line for line in self.log.read_text().splitlines()) if self.log.exists() else 0

    def write(self, *, fail: bool = False) -> None:
        script = self.folder / "bin" / "c++"
        script.parent.mkdir(exist_ok=True)
        script.write_text(SCRIPT.format(python=sys.executable, log=self.log, fail=fail, library=self.library))
        script.chmod(0o755)


@pytest.fixture(scope="module")
def real_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bytes of a real library, built once or taken from the cache."""
    loaded = library(FMT)
    copy = tmp_path_factory.mktemp("real") / "kernels.so"
    copy.write_bytes(Path(loaded._name).read_bytes()[: -build.DIGEST_BYTES])
    return copy


@pytest.fixture
def compiler(tmp_path: Path, real_library: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    pretended = Pretended(tmp_path, real_library)
    pretended.write()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return pretended


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_library_holds_every_kernel(real_library: Path) -> None:
    loaded = library(FMT)
    for name in ("kvarn_seal", "kvarn_decode", "kvarn_attend"):
        assert hasattr(loaded, name)


def test_it_is_built_once_and_then_loaded(compiler: Pretended, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    library(FMT, folder=folder)
    first = only(folder).stat()
    library(FMT, folder=folder)
    assert compiler.links == 1
    assert only(folder).stat().st_ino == first.st_ino
    assert only(folder).name.startswith("kvarn_k4v2_g128_d64_")


def test_another_format_processor_or_option_is_another_library(compiler: Pretended, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for wanted in (FMT, Preset().with_head_dim(128), Preset(tile_tokens=64).with_head_dim(64)):
        library(wanted, folder=folder, instructions="portable")
    library(FMT, folder=folder, instructions="avx2")
    library(FMT, folder=folder, instructions="portable", poison=True)
    assert compiler.links == len(list(folder.iterdir())) == 5


def test_libraries_that_nobody_loads_are_removed_when_another_is_built(compiler: Pretended, tmp_path: Path) -> None:
    library(FMT, folder=tmp_path)
    (used,) = tmp_path.glob("*.so")
    unused = tmp_path / "kvarn_k4v2_g128_d64_avx2_0.so"
    unused.write_bytes(b"of an older version")
    long_ago = time.time() - (build.KEPT_DAYS + 1) * 86400
    for path in (used, unused):
        os.utime(path, (long_ago, long_ago))
    library(FMT, folder=tmp_path)  # loads the first
    library(Preset().with_head_dim(128), folder=tmp_path)
    assert used.exists()
    assert not unused.exists()


def test_a_changed_source_is_another_library(
    compiler: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    library(FMT, folder=folder)
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in (*build.SOURCES, *build.HEADERS):
        (sources / name).write_bytes((Path(build.__file__).parent / name).read_bytes())
    (sources / "vectors.h").write_text("// changed")
    monkeypatch.setattr(build, "__file__", str(sources / "build.py"))
    library(FMT, folder=folder)
    assert compiler.links == 2


@pytest.mark.parametrize("damage", ["empty", "cut in half", "one byte less", "a flipped bit", "foreign"])
def test_a_damaged_library_is_built_again(compiler: Pretended, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "cache"
    library(FMT, folder=folder)
    raw = only(folder).read_bytes()
    flipped = bytearray(raw)
    flipped[len(raw) // 3] ^= 4
    foreign = Path("/bin/sh").resolve().read_bytes()
    bad = {
        "empty": b"",
        "cut in half": raw[: len(raw) // 2],
        "one byte less": raw[:-1],
        "a flipped bit": bytes(flipped),
        "foreign": foreign,
    }[damage]
    path = only(folder)
    path.unlink()  # not written into, for it is loaded
    path.write_bytes(bad)
    library(FMT, folder=folder)
    assert compiler.links == 2
    assert only(folder).read_bytes() == raw


def test_two_processes_build_at_once(compiler: Pretended, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    program = (
        "from pathlib import Path; from kvarn.format import Preset;"
        "from kvarn.backends.triton.cpu.build import library;"
        f"print(library(Preset().with_head_dim(64), folder=Path({str(folder)!r})).kvarn_seal is not None)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(2)
    ]
    for process in processes:
        assert process.communicate(timeout=60)[0] == "True\n"
        assert process.returncode == 0
    assert 1 <= compiler.links <= 2
    only(folder)  # and nothing half-built beside it


def test_without_a_compiler_the_reason_names_what_to_install(
    compiler: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match="install g\\+\\+ or clang, or pip install ziglang"):
        library(FMT, folder=tmp_path / "cache")


def test_a_compiler_that_fails_is_quoted(compiler: Pretended, tmp_path: Path) -> None:
    compiler.write(fail=True)
    folder = tmp_path / "cache"
    with pytest.raises(BuildError, match=r"refused the kernels: .*no such luck"):
        library(FMT, folder=folder)
    assert not list(folder.iterdir())


def test_a_library_that_does_not_load_is_a_reason(compiler: Pretended, tmp_path: Path) -> None:
    compiler.library.with_suffix(".bad").write_bytes(b"nothing")
    Pretended(compiler.folder, compiler.library.with_suffix(".bad")).write()
    with pytest.raises(BuildError, match="was built but does not load"):
        library(FMT, folder=tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_a_reason(compiler: Pretended, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written to"):
        library(FMT, folder=tmp_path / "file")


@pytest.mark.parametrize(
    ("flags", "machine", "want"),
    [
        ((*build.AVX2, *build.AVX512), "x86_64", "avx512"),
        ((*build.AVX2, "avx512f"), "x86_64", "avx2"),
        (("avx2",), "x86_64", "portable"),
        ((), "x86_64", "portable"),
        ((*build.AVX2, *build.AVX512), "aarch64", "portable"),
    ],
)
def test_the_instruction_set_follows_the_processor(
    flags: tuple[str, ...], machine: str, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    assert instruction_set(frozenset(flags)) == want
