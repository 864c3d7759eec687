"""A session is its token ids: what was fed comes back, and nothing is guessed."""

from pathlib import Path

import pytest

from kvarn.errors import UsageError
from kvarn.serve.sessions import Session, load_session, save_session, session_path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_CACHE", str(tmp_path))


def test_a_session_comes_back_as_it_was_saved() -> None:
    assert load_session("a", "t") is None
    for tokens in ((1, 2, 3), (1, 2, 3, 4)):
        save_session("a", Session(tokens=tokens, tokenizer="t"))
        assert load_session("a", "t") == Session(tokens=tokens, tokenizer="t")
    assert session_path("a").stat().st_mode & 0o77 == 0
    assert [path.name for path in session_path("a").parent.iterdir()] == ["a.json"]


def test_turns_and_the_system_prompt_come_back_and_older_files_have_none() -> None:
    session = Session(tokens=(1, 2, 3, 4), tokenizer="t", turns=(0, 2, 3, 3), system="Be brief.")
    save_session("a", session)
    assert load_session("a", "t") == session
    session_path("a").write_text('{"version": 1, "tokenizer": "t", "tokens": [1]}')
    assert load_session("a", "t") == Session(tokens=(1,), tokenizer="t")


@pytest.mark.parametrize(
    "extra", ['"turns": [0]', '"turns": [2, 1]', '"turns": [0, 3]', '"turns": "ab"', '"system": 1']
)
def test_damaged_turns_are_refused(extra: str) -> None:
    save_session("a", Session(tokens=(), tokenizer="t"))
    session_path("a").write_text(f'{{"version": 1, "tokenizer": "t", "tokens": [1, 2], {extra}}}')
    with pytest.raises(UsageError, match="cannot be read"):
        load_session("a", "t")


def test_another_tokenizers_session_is_refused() -> None:
    save_session("a", Session(tokens=(1,), tokenizer="t"))
    with pytest.raises(UsageError, match="another model's tokenizer"):
        load_session("a", "u")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".hidden", "a\n", "x" * 101])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is no session name"):
        session_path(name)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"version": 2, "tokenizer": "t", "tokens": []}', '{"version": 1, "tokenizer": "t", "tokens": [-1]}'],
)
def test_a_damaged_session_is_refused_and_left_alone(content: str) -> None:
    path = session_path("a")
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(UsageError, match="cannot be read"):
        load_session("a", "t")
    assert path.read_text() == content


def test_a_session_that_cannot_be_saved_says_so(tmp_path: Path) -> None:
    (tmp_path / "sessions").write_text("in the way")
    with pytest.raises(UsageError, match="cannot be saved"):
        save_session("a", Session(tokens=(1,), tokenizer="t"))
