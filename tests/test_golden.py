"""The oracle keeps the golden bytes, and the golden bytes catch every wrong reading of the format.

Nothing here writes a golden file: tools/make_golden.py does, by hand.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvarn import reference
from kvarn.errors import SealError
from kvarn.format import FORMAT_VERSION, SealStatus

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"


def _load(name: str) -> ModuleType:
    """A module of tools/, which is not a package; registered, so that its neighbours can import it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


golden_mutants = _load("golden_mutants")
make_golden = _load("make_golden")

FILE: dict[str, Any] = json.loads((GOLDEN / f"format{FORMAT_VERSION}.json").read_text())
STORED: dict[str, dict[str, Any]] = {vector["name"]: vector for vector in FILE["vectors"]}
GUARDS = [(wrong, part, name) for wrong, parts in FILE["guards"].items() for part, name in parts.items()]


def _vector(stored: dict[str, Any]) -> Any:
    """The vector as the golden file, not the tool, spells it."""
    made = {
        what: make_golden.Input(x["kind"], x["seed"], tuple(map(tuple, x["edits"])))
        for what in ("keys", "values")
        for x in [stored[what]]
    }
    return make_golden.Vector(stored["name"], stored["preset"], stored["head_dim"], made["keys"], made["values"])


@pytest.mark.parametrize("name", STORED)
def test_the_oracle_keeps_bytes_flags_intermediates_and_refusals(name: str) -> None:
    assert make_golden.describe(_vector(STORED[name])) == STORED[name]


@pytest.mark.parametrize("name", STORED)
def test_a_second_implementation_gives_the_same_bytes(name: str) -> None:
    vector = _vector(STORED[name])
    keys, values = vector.keys.array(vector.fmt), vector.values.array(vector.fmt)
    sealed = golden_mutants.seal(keys, values, vector.fmt)
    assert sealed.status.name == STORED[name]["status"]
    if sealed.status == SealStatus.OK:
        tile, flags = reference.seal(keys, values, vector.fmt)
        np.testing.assert_array_equal(sealed.tile, tile)
        assert sealed.flags == flags
    else:
        with pytest.raises(SealError, match=sealed.status.reason):
            reference.seal(keys, values, vector.fmt)


@pytest.mark.parametrize(("wrong", "part", "name"), GUARDS)
def test_a_wrong_reading_is_caught(wrong: str, part: str, name: str) -> None:
    stored = STORED[name]
    vector = _vector(stored)
    keys, values = vector.keys.array(vector.fmt), vector.values.array(vector.fmt)
    mutant = golden_mutants.seal(keys, values, vector.fmt, wrong)
    right = golden_mutants.seal(keys, values, vector.fmt)
    assert part in make_golden.parts_that_differ(vector.fmt, right, mutant)
    digest = None if mutant.tile is None else make_golden.sha256(mutant.tile)
    assert (mutant.status.name, digest, mutant.flags) != (stored["status"], stored.get("tile"), stored.get("flags", 0))


def test_every_wrong_reading_has_a_guard() -> None:
    assert set(FILE["guards"]) == set(golden_mutants.WRONG_READINGS)
    assert all(FILE["guards"].values())


@pytest.mark.parametrize(("name", "file"), FILE["whole_tiles"].items())
def test_whole_tiles_are_the_oracles_bytes(name: str, file: str) -> None:
    vector = _vector(STORED[name])
    stored = np.frombuffer((GOLDEN / file).read_bytes(), np.uint8)
    tile, flags = reference.seal(vector.keys.array(vector.fmt), vector.values.array(vector.fmt), vector.fmt)
    np.testing.assert_array_equal(tile, stored)
    assert flags == STORED[name]["flags"]


def test_the_set_covers_every_width_tile_length_and_head_dim() -> None:
    sealed = [_vector(v).fmt for v in STORED.values() if v["status"] == "OK"]
    assert {fmt.key_bits for fmt in sealed} == {2, 3, 4, 5, 6, 8}
    assert {fmt.value_bits for fmt in sealed} == {2, 3, 4, 5, 6, 8}
    assert {(fmt.tile_tokens, fmt.head_dim) for fmt in sealed} == {
        (g, d) for g in (64, 128) for d in (64, 128, 256, 512)
    }
    assert {v.get("flags") for v in STORED.values()} == {0, 1, None}
    assert {v["status"] for v in STORED.values()} == {status.name for status in SealStatus}


def test_the_file_is_what_the_tools_vectors_say() -> None:
    spelled = [_vector(stored) for stored in STORED.values()]
    assert spelled == list(make_golden.VECTORS)


def test_the_tool_does_not_overwrite_without_force() -> None:
    before = {path.name: path.read_bytes() for path in GOLDEN.iterdir() if path.is_file()}
    run = subprocess.run([sys.executable, ROOT / "tools" / "make_golden.py"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "--force" in run.stderr
    assert {path.name: path.read_bytes() for path in GOLDEN.iterdir() if path.is_file()} == before


def test_splitmix64_gives_the_published_sequence() -> None:
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert make_golden.splitmix64(1234567, 4).tolist() == expected


def test_fma_rounds_once() -> None:
    a = np.float32(1 + 2.0**-12)
    one = np.array([a])
    assert golden_mutants.fma(one, one, np.array([-(a * a)], np.float32))[0] == np.float32(2.0**-24)
