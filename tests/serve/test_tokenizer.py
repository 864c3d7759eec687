"""Text streams in whole characters, and chats go through the model's own template."""

from pathlib import Path

import pytest

from kvarn.errors import ModelError
from kvarn.serve.tokenizer import Tokenizer

TEXTS = [
    "plain words",
    "emoji 🙂🙃 and flags 🇫🇷",
    "日本語のテキスト",
    "naïve café — “quotes”",
    "\n\n  indented\tcode = {1: 'x'}\n",
]


@pytest.fixture(scope="module")
def tokenizer(demo_dir: Path) -> Tokenizer:
    return Tokenizer(demo_dir)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_whole_text_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()
    parts = [stream.add(token) for token in tokenizer.encode(text)]
    assert all("\ufffd" not in part for part in parts)
    parts.append(stream.finish())
    assert "".join(parts) == text == stream.text


def test_a_character_that_never_completes_comes_out_as_a_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")
    stream = tokenizer.stream()
    text = "".join(stream.add(token) for token in ids[:-1])
    assert text == "a"
    assert stream.finish() == "\ufffd"


def test_a_chat_is_rendered_by_the_models_template_up_to_the_answer(tokenizer: Tokenizer) -> None:
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
    bare = tokenizer.encode("Hello")
    assert set(bare) <= set(ids)
    assert tokenizer.decode(ids).replace("\n", "") == "systemBe brief.userHelloassistant"


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer(tmp_path)
