"""A model's name leads to a folder, or to one clear line."""

from pathlib import Path

import pytest

from kvarn.errors import ModelNotFoundError
from kvarn.serve.models import resolve


def silent(stage: str, done: int, total: int) -> None:
    pass


def test_a_folder_with_a_config_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path), progress=silent) == tmp_path


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        resolve(str(tmp_path), progress=silent)


@pytest.mark.parametrize("name", ["nothing-here", "./nor/here/at-all", "a b/c"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"use demo, a folder with config\.json, or org/name"):
        resolve(name, progress=silent)


def test_a_hub_id_that_cannot_be_had_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="nobody/nothing"):
        resolve("nobody/nothing", progress=silent)
