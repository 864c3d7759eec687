"""Weights are known by their content: never by name, size and date, and wherever a copy lies."""

import os
import shutil
from pathlib import Path

import pytest

from kvarn import identity
from kvarn.identity import tokenizer_identity, weights_identity


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "model"
    folder.mkdir()
    paths = [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 1000)
    return paths


def test_a_copy_elsewhere_under_other_names_is_the_same(shards: list[Path], tmp_path: Path) -> None:
    copies = [Path(shutil.copy(path, tmp_path / f"{i}.safetensors")) for i, path in enumerate(shards)]
    assert weights_identity(shards, tmp_path / "a") == weights_identity(copies, tmp_path / "b")


def test_other_weights_under_the_same_name_size_and_date_are_others(shards: list[Path], tmp_path: Path) -> None:
    memo = tmp_path / "memo"
    before = weights_identity(shards, memo)
    stat = shards[0].stat()
    with shards[0].open("r+b") as file:
        file.seek(500)
        file.write(b"x")
    os.utime(shards[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert shards[0].stat().st_mtime_ns == stat.st_mtime_ns
    assert weights_identity(shards, memo) != before


def test_each_file_is_read_once(shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = tmp_path / "made" / "memo"
    first = weights_identity(shards, memo)
    monkeypatch.setattr(identity, "_file_digest", lambda path: pytest.fail(f"{path} is read again"))
    assert weights_identity(shards, memo) == first


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"a": 1}', '{"a": "short"}'])
def test_a_damaged_memo_costs_time_only(shards: list[Path], tmp_path: Path, content: str) -> None:
    memo = tmp_path / "memo"
    want = weights_identity(shards, tmp_path / "other")
    memo.write_text(content)
    assert weights_identity(shards, memo) == want
    assert weights_identity(shards, memo) == want


def test_a_memo_that_cannot_be_written_costs_time_only(shards: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert weights_identity(shards, tmp_path / "file" / "memo") == weights_identity(shards, tmp_path / "memo")


def test_a_file_written_to_while_it_is_read_is_not_remembered(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = identity._file_digest

    def slow(path: Path) -> str:
        found = digest(path)
        path.write_bytes(b"y" * 1000)
        return found

    memo = tmp_path / "memo"
    monkeypatch.setattr(identity, "_file_digest", slow)
    during = weights_identity(shards, memo)
    monkeypatch.setattr(identity, "_file_digest", digest)
    assert weights_identity(shards, memo) != during


def test_the_tokenizer_counts_and_the_chat_template_does_not(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_identity(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert tokenizer_identity(tmp_path) == before
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert tokenizer_identity(tmp_path) != before
