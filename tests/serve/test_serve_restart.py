"""SIGTERM under load, then a new start: conversations go on from what was read before, from disk. The real model."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DOCS = Path(__file__).resolve().parents[2] / "docs"


@contextmanager
def server(demo_dir: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvarn serve` in a process of its own, once it is ready, and its address."""
    command = [sys.executable, "-m", "kvarn.serve.cli", "serve", str(demo_dir), "--port", "0", "--dtype", "float32"]
    command += ["--ctx-size", "1024", "--cache-dir", str(cache), "--shutdown-timeout", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"ready on (http://[^/]+)", line):
                break
        else:
            raise AssertionError("the server ended before it was ready")
        rest = threading.Thread(target=process.stderr.read)
        rest.start()
        try:
            yield process, match[1]
        finally:
            process.kill()
            rest.join()


def body(seed: int, **fields: Any) -> dict[str, Any]:
    text = (DOCS / "format.md").read_text()[seed * 3000 :][:1400]
    messages = [{"role": "user", "content": f"{text}\n\nWhat is this about?"}]
    return {"model": "SmolLM2-135M-Instruct", "messages": messages, "temperature": 0, **fields}


def test_conversations_go_on_after_a_restart_under_load(demo_dir: Path, tmp_path: Path) -> None:
    begun = [threading.Event() for _ in range(3)]
    ended: list[str] = []

    def talk(url: str, seed: int) -> None:
        lines = []
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body(seed, stream=True, max_tokens=600), timeout=120
        ) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if '"content":"' in line and '"content":""' not in line:
                    begun[seed].set()
        ended.append(next(line for line in reversed(lines) if line))

    with server(demo_dir, tmp_path) as (process, url):
        talkers = [threading.Thread(target=talk, args=(url, seed)) for seed in range(3)]
        for talker in talkers:
            talker.start()
        assert all(event.wait(120) for event in begun)
        process.send_signal(signal.SIGTERM)
        for talker in talkers:
            talker.join()
        assert process.wait(60) == 0
    codes = [json.loads(line.removeprefix("data: "))["error"]["code"] for line in ended]
    assert codes == ["shutting_down"] * 3, "a stream that was cut says so"

    with server(demo_dir, tmp_path) as (_, url):
        for seed in range(3):
            usage = httpx.post(f"{url}/v1/chat/completions", json=body(seed, max_tokens=4), timeout=120).json()["usage"]
            whole = (usage["prompt_tokens"] - 1) // 128 * 128
            assert whole >= 256
            assert usage["prompt_tokens_details"]["cached_tokens"] == whole
        report = httpx.get(f"{url}/v1/cache").json()["report"]
        assert report["tokens"]["from_disk"] >= 3 * 256


def test_the_command_finds_the_same_store(demo_dir: Path, tmp_path: Path) -> None:
    """What `kvarn run` read, `kvarn serve` does not read again."""
    question = body(0)["messages"][0]["content"]
    command = [sys.executable, "-m", "kvarn.serve.cli", "run", str(demo_dir), "--dtype", "float32", "-n", "2", "--json"]
    command += ["--cache-dir", str(tmp_path), question]
    asked = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert json.loads(asked.stdout)["usage"]["cached_tokens"] == 0
    with server(demo_dir, tmp_path) as (_, url):
        usage = httpx.post(f"{url}/v1/chat/completions", json=body(0, max_tokens=2), timeout=120).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 128 * 128
