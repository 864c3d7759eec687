"""What one process has read another one does not read again: the whole command line, on the real model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvarn.serve.cli import main
from kvarn.serve.tokenizer import Tokenizer

TILE = 128
TEXT = Path(__file__).resolve().parents[1] / "docs" / "format.md"


def ask(demo_dir: Path, home: Path, *options: str, seed: int = 0) -> dict[str, Any]:
    """A process of its own, with its own hash seed; float32, so that a greedy answer is a matter of arithmetic."""
    command = [sys.executable, "-m", "kvarn.serve.cli", "run", str(demo_dir), "--dtype", "float32", "--json"]
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "KVARN_CACHE": str(home)}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def tokenizer(demo_dir: Path) -> Tokenizer:
    return Tokenizer(demo_dir)


def cut(tokenizer: Tokenizer, tokens: int, skip: int = 0) -> str:
    """A text of exactly so many tokens."""
    text = TEXT.read_text()[skip:]
    ids = tokenizer.encode(text)[:tokens]
    for end in range(tokens, 0, -1):  # a text that is cut may be split into tokens in another way
        short = tokenizer.decode(ids[:end])
        if len(tokenizer.encode(short)) == tokens:
            return short
    raise AssertionError("no text of that length")


def test_another_question_about_a_text_that_was_read(demo_dir: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = cut(tokenizer, 2900)
    prompts = [f"{text}\n\nQuestion: {question}" for question in ("What is a tile?", "Who reads the sink, and how?")]
    ids = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    assert min(map(len, ids)) >= 2900
    shared = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b) // TILE * TILE
    assert shared >= 2800
    first = ask(demo_dir, tmp_path / "one", "-n", "12", prompts[0], seed=1)
    warm = ask(demo_dir, tmp_path / "one", "-n", "12", prompts[1], seed=2)
    cold = ask(demo_dir, tmp_path / "two", "-n", "12", prompts[1], "--no-cache", seed=3)
    assert first["usage"]["cached_tokens"] == cold["usage"]["cached_tokens"] == 0
    assert warm["usage"]["cached_tokens"] == shared
    assert warm["cache"]["tokens"]["from_disk"] == shared
    assert warm["cache"]["tokens"]["computed"] == warm["usage"]["prompt_tokens"] - shared + 11
    assert warm["text"] == cold["text"]
    again = ask(demo_dir, tmp_path / "one", "-n", "12", prompts[0], seed=4)
    assert again["usage"]["cached_tokens"] == (again["usage"]["prompt_tokens"] - 1) // TILE * TILE
    assert again["text"] == first["text"]


@pytest.mark.parametrize("length", [2 * TILE, 2 * TILE + 1])
def test_the_same_prompt_at_the_edge_of_a_tile(
    demo_dir: Path, tokenizer: Tokenizer, tmp_path: Path, length: int
) -> None:
    text = cut(tokenizer, length, skip=500)
    answers = [ask(demo_dir, tmp_path, "--raw", "-n", "6", text, seed=seed) for seed in (1, 2)]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [length, length]
    assert answers[1]["usage"]["cached_tokens"] == (length - 1) // TILE * TILE
    assert answers[0]["text"] == answers[1]["text"]


def test_a_session_goes_on_after_a_restart_without_reading_its_history_again(
    demo_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    opening = cut(tokenizer, 300)
    first = ask(demo_dir, tmp_path, "--session", "talk", "-n", "20", opening)
    second = ask(demo_dir, tmp_path, "--session", "talk", "-n", "6", "And then?")
    fed = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens"] > fed
    assert second["usage"]["cached_tokens"] == fed // TILE * TILE
    messages = [
        {"role": "user", "content": opening},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And then?"},
    ]
    assert second["usage"]["prompt_tokens"] == len(tokenizer.encode_chat(messages))


def test_explain_says_how_far_a_prompt_is_stored_and_what_keeps_others_from_hitting(
    demo_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = cut(tokenizer, 300)
    ask(demo_dir, tmp_path, "--raw", "-n", "1", text)

    def explain(*options: str) -> dict[str, Any]:
        command = ["cache", "explain", str(demo_dir), "--raw", "--json", "--cache-dir", str(tmp_path), *options]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.stderr
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    same = explain("--dtype", "float32", text)
    assert (same["blocks"], same["others"]) == (2, {})
    assert (same["prompt"]["tiles"], same["prompt"]["reusable_tokens"]) == (2, 256)
    other = explain("--dtype", "float32", f"{cut(tokenizer, 200)} and something else entirely")
    assert other["prompt"]["tiles"] == 1
    assert other["prompt"]["diverges_at"] == 200
    narrow = explain("--dtype", "bfloat16", "--kv-cache-dtype", "kvarn_k4v4_g128", "--rope-scaling", "linear:2", text)
    assert (narrow["blocks"], narrow["prompt"]["tiles"]) == (0, 0)
    [parts] = narrow["others"].values()
    assert [part.split(":")[0] for part in parts] == ["dtype", "format", "rope.factor", "rope.rope_type"]
