"""Which cache a command gets, what names its blocks, and what `kvarn cache` says of them."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_backend import FakeBackend, fake_config

from kvarn.disk_tier import DiskTier
from kvarn.errors import UsageError
from kvarn.format import Preset
from kvarn.keys import Fingerprint, block_key
from kvarn.record import BlockMeta, build
from kvarn.serve import caching
from kvarn.serve.caching import CacheOptions, describe_root, fingerprint, open_tier
from kvarn.serve.cli import main
from kvarn.serve.loading import Loaded, ModelOptions, hash_weights
from kvarn.store_disk import DiskStore
from kvarn.tier import NO_TIER

PRESET = Preset()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model folder as far as a fingerprint looks at it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fake_config() | {"dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"weights!")
    return folder


def loaded(model_dir: Path, preset: Preset | None = PRESET) -> Loaded:
    return Loaded(
        model_dir=model_dir,
        backend_name="fake",
        backend=FakeBackend(preset),
        tokenizer=None,  # type: ignore[arg-type]
        load_seconds=0.0,
        weights=partial(hash_weights, model_dir),
    )


OPTIONS = ModelOptions(model="m")


def of(model_dir: Path, preset: Preset | None = PRESET, **options: Any) -> Fingerprint:
    return fingerprint(loaded(model_dir, preset), dataclasses.replace(OPTIONS, **options))


def test_a_copy_of_a_model_elsewhere_is_the_same_model(model_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model_dir, tmp_path / "other name"))
    config = json.loads((copy / "config.json").read_text())
    written = dict(reversed(config.items())) | {"transformers_version": "9", "_name_or_path": "x", "dtype": "bfloat16"}
    (copy / "config.json").write_text(json.dumps(written, indent=3))
    assert of(copy) == of(model_dir)


def test_other_weights_under_the_same_name_are_another_model(model_dir: Path) -> None:
    before = of(model_dir)
    shard = model_dir / "model.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b"weights!", b"weights?"))
    after = of(model_dir)
    assert after.weights != before.weights
    assert dataclasses.replace(after, weights=before.weights) == before


def test_every_other_part_shows(model_dir: Path) -> None:
    base = of(model_dir)
    assert of(model_dir, Preset(value_bits=4)).format != base.format
    (model_dir / "tokenizer.json").write_text("{ }")
    assert of(model_dir).tokenizer != base.tokenizer
    (model_dir / "config.json").write_text(json.dumps(fake_config() | {"rms_norm_eps": 1.0}))
    assert of(model_dir).config != base.config


def test_the_cache_is_off_when_asked_or_when_there_is_no_room(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert open_tier(loaded(model_dir), OPTIONS, CacheOptions(no_cache=True)) is NO_TIER
    assert "disk cache off: --no-cache" in capsys.readouterr().err
    monkeypatch.setattr(caching, "default_budget", lambda folder: (0, "off: 4.0 GiB are free"))
    assert open_tier(loaded(model_dir), OPTIONS, CacheOptions(cache_dir=tmp_path)) is NO_TIER
    assert "disk cache off: 4.0 GiB are free" in capsys.readouterr().err
    assert not (tmp_path / "kvarn-cache-v1").exists()


def test_a_size_that_is_asked_for_is_the_budget_and_is_said(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = open_tier(loaded(model_dir), OPTIONS, CacheOptions(cache_dir=tmp_path / "c", cache_size="3GiB"))
    assert isinstance(tier, DiskTier)
    assert isinstance(tier.store, DiskStore)
    assert tier.store.budget_bytes == 3 << 30
    tier.close()
    assert "of 3.00 GiB used (3GiB, as asked for)" in capsys.readouterr().err
    with pytest.raises(UsageError, match="is not a size"):
        open_tier(loaded(model_dir), OPTIONS, CacheOptions(cache_dir=tmp_path / "c", cache_size="much"))


def test_a_folder_that_cannot_be_used_is_an_error_when_named_and_a_line_when_not(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "kvarn-cache-v1"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="--cache-dir"):
        open_tier(loaded(model_dir), OPTIONS, CacheOptions(cache_dir=tmp_path, cache_size="1GiB"))
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path))
    assert open_tier(loaded(model_dir), OPTIONS, CacheOptions(cache_size="1GiB")) is NO_TIER
    assert "disk cache off: " in capsys.readouterr().err
    assert (foreign / "thesis.txt").read_text() == "mine"


def test_a_fingerprint_in_a_few_words(model_dir: Path) -> None:
    found = of(model_dir)
    words = describe_root(dataclasses.replace(found, adapter="b" * 64).text("c" * 64))
    assert (
        words
        == f"fake, weights {found.weights[:8]}, float32, KVarN-1 kvarn_k4v2_g128, adapter bbbbbbbb, tenant cccccccc"
    )
    assert describe_root("[]") == "a fingerprint that this version does not know"


@pytest.fixture
def filled(tmp_path: Path, model_dir: Path) -> Path:
    """A cache folder with a chain of three blocks."""
    found = of(model_dir)
    backend = FakeBackend(Preset())
    backend.allocate(4, 4)
    store = DiskStore(tmp_path / "filled", 1 << 30, fingerprint=found.root())
    store.describe(found.root(), found.text())
    backend.slots[0] = backend.blocks[0] = [1] * 128
    parent = found.root()
    for tile in range(3):
        record = backend.export_block(0) if tile else backend.export_sink(0)
        tokens = tuple(range(tile * 128, tile * 128 + 128))
        key = block_key(parent, tokens)
        meta = BlockMeta(key=key, parent=parent, tokens=tokens, fingerprint=found.root(), format=found.format)
        assert store.put(meta, build(meta, record))
        parent = key
    store.close()
    return tmp_path / "filled"


def cache(*args: object) -> Any:
    return CliRunner().invoke(main, ["cache", *map(str, args)])


def test_status_and_ls_show_what_is_there(filled: Path) -> None:
    result = cache("status", "--cache-dir", filled)
    assert result.exit_code == 0, result.output
    assert f"folder: {filled / 'kvarn-cache-v1'}" in result.output
    assert "held: 3 blocks" in result.output
    assert "fake, weights" in result.output
    report = json.loads(cache("status", "--cache-dir", filled, "--json").output)
    assert (report["blocks"], report["quarantined"], len(report["fingerprints"])) == (3, 0, 1)
    assert report["total_bytes"] >= report["block_bytes"] > 0
    assert len(cache("ls", "--cache-dir", filled).output.splitlines()) == 3
    entries = [json.loads(line) for line in cache("ls", "--cache-dir", filled, "--json").output.splitlines()]
    assert {entry["num_tokens"] for entry in entries} == {128}
    assert {entry["fingerprint"] for entry in entries} == {report["fingerprints"][0]["fingerprint"]}


def test_verify_finds_the_damaged_block_and_leaves_with_an_error(filled: Path) -> None:
    assert cache("verify", "--cache-dir", filled).output == "3 blocks are good, 0 are not\n"
    file = sorted(filled.rglob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    result = cache("verify", "--cache-dir", filled)
    assert result.exit_code == 1
    assert "2 blocks are good, 1 are not" in result.output
    assert json.loads(cache("status", "--cache-dir", filled, "--json").output)["quarantined"] == 1


def test_prune_keeps_to_the_size_and_clear_takes_all_that_is_ours(filled: Path) -> None:
    (filled / "mine.txt").write_text("mine")
    before = json.loads(cache("status", "--cache-dir", filled, "--json").output)
    target = before["total_bytes"] - 1
    report = json.loads(cache("prune", "--cache-dir", filled, "--to", target, "--json").output)
    assert report["total_bytes"] <= target
    assert report["freed_bytes"] > 0
    assert cache("clear", "--cache-dir", filled).exit_code == 0
    assert not list(filled.rglob("*.safetensors"))
    assert (filled / "mine.txt").read_text() == "mine"
