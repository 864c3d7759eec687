"""`kvarn serve` as a process: the port before the weights, signals, faults and exit codes; and its options."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from fake_backend import FakeBackend

from kvarn.errors import CapacityError, UsageError
from kvarn.format import Preset
from kvarn.serve import serve as module
from kvarn.serve.caching import CacheOptions
from kvarn.serve.cli import main
from kvarn.serve.loading import Loaded, ModelOptions
from kvarn.serve.serve import ServeOptions, bind, build_engine, describe, read_keys, serve, served_name, url_of

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys, time
from pathlib import Path
sys.path[:0] = [{support!r}, {http!r}]
from conftest import FakeTokenizer
from fake_backend import FakeBackend
from kvarn.errors import CheckpointError
from kvarn.format import Preset
from kvarn.serve import serve
from kvarn.serve.cli import main
from kvarn.serve.cli import main
from kvarn.serve.loading import Loaded

class Backend(FakeBackend):
    def run(self, plan):
        time.sleep({step})
        if any(9 in span.tokens for span in plan.spans) and {fault}:
            raise KeyError("a fault of ours")
        return super().run(plan)

def load(options, **_):
    {loading}
    backend = Backend(Preset(tile_tokens=64), max_context=1024)
    return Loaded(
        model_dir=Path("fake"), backend_name="fake", backend=backend, tokenizer=FakeTokenizer(), load_seconds=0,
        weights=lambda: "w",
    )

serve.load = load
main(["serve", "fake", "--port", "0", "--no-cache", *sys.argv[1:]])
"""


@dataclass
class Process:
    inner: subprocess.Popen[str]
    url: str
    lines: list[str]

    def ended(self) -> int:
        return self.inner.wait(20)


@contextlib.contextmanager
def process(
    *args: str, step: float = 0.0, fault: bool = False, loading: str = "pass", ready: bool = True
) -> Iterator[Process]:
    """A server over the fake backend, once it listens (and, with `ready`, answers)."""
    code = SCRIPT.format(
        support=str(TESTS / "support"), http=str(TESTS / "serve" / "http"), step=step, fault=fault, loading=loading
    )
    with subprocess.Popen([sys.executable, "-c", code, *args], stderr=subprocess.PIPE, text=True) as inner:
        assert inner.stderr is not None
        lines: list[str] = []
        for line in inner.stderr:
            lines.append(line.rstrip())
            if ("ready on" if ready else "listening on") in line:
                break
        found = re.search(r"http://127\.0\.0\.1:\d+", lines[-1] if lines else "")
        assert found, lines
        rest = threading.Thread(target=lambda: lines.extend(line.rstrip() for line in inner.stderr or ()))
        rest.start()
        try:
            yield Process(inner, found[0], lines)
        finally:
            if inner.poll() is None:
                inner.kill()
            rest.join(10)


def get(url: str, path: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=10) as client:
        return client.get(url + path)


def wait_for(url: str, status: str) -> None:
    for _ in range(2000):
        if get(url, "/health").json()["status"] == status:
            return
    raise AssertionError(f"the server is never {status}")


def ask(url: str, answers: list[httpx.Response], **fields: object) -> threading.Thread:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 40, "temperature": 0} | fields

    def run() -> None:
        with httpx.Client(trust_env=False, timeout=30) as client:
            answers.append(client.post(f"{url}/v1/completions", json=body))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def running(url: str) -> bool:
    return "kvarn_running 1.0" in get(url, "/metrics").text


def test_it_says_what_it_serves_and_sigterm_finishes_what_runs_with_exit_code_0() -> None:
    with process("--alias", "nick", "--max-num-seqs", "3", step=0.02) as server:
        text = "\n".join(server.lines)
        for words in ("listening on", "blocks", "up to 1024 tokens (the model's context)", "3 sequences", "/v1"):
            assert words in text
        assert get(server.url, "/v1/models/nick").json()["id"] == "fake"
        wait_for(server.url, "ready")
        answers: list[httpx.Response] = []
        thread = ask(server.url, answers)
        while not running(server.url):
            pass
        server.inner.send_signal(signal.SIGTERM)
        wait_for(server.url, "draining")
        thread.join(20)
        assert answers[0].json()["usage"]["completion_tokens"] == 40
        assert server.ended() == 0


def test_what_does_not_end_in_time_is_cancelled_and_the_exit_code_is_0() -> None:
    with process("--shutdown-timeout", "0", step=0.02) as server:
        wait_for(server.url, "ready")
        answers: list[httpx.Response] = []
        thread = ask(server.url, answers, max_tokens=900)
        while not running(server.url):
            pass
        server.inner.send_signal(signal.SIGINT)
        thread.join(20)
        assert answers[0].status_code == 503
        assert server.ended() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with process(step=0.1) as server:
        wait_for(server.url, "ready")
        answers: list[httpx.Response] = []
        body = {"model": "fake", "prompt": "hi", "max_tokens": 900, "stream": True}
        with httpx.Client(trust_env=False) as client, client.stream("POST", f"{server.url}/v1/completions", json=body):
            server.inner.send_signal(signal.SIGTERM)
            wait_for(server.url, "draining")
            server.inner.send_signal(signal.SIGTERM)
            assert server.ended() == 128 + signal.SIGTERM
        assert answers == []


def test_an_engine_that_ends_ends_the_process_with_1() -> None:
    with process(fault=True) as server:
        wait_for(server.url, "ready")
        answers: list[httpx.Response] = []
        ask(server.url, answers, prompt=[9]).join(20)
        assert answers[0].status_code == 500
        assert server.ended() == 1
    assert any("error: the engine stopped: KeyError" in line for line in server.lines)


def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_reason() -> None:
    with process(loading='time.sleep(0.1); raise CheckpointError("a weight is short")', ready=False) as server:
        assert server.ended() == 1
    assert server.lines[-1] == "kvarn: error: a weight is short"


def test_a_signal_while_it_loads_ends_it_with_0() -> None:
    with process(loading="time.sleep(60)", ready=False) as server:
        assert get(server.url, "/health").json() == {"status": "loading"}
        server.inner.send_signal(signal.SIGTERM)
        assert server.ended() == 0


def test_a_taken_port_is_known_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", lambda options, **_: pytest.fail("weights were read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}.*use another --port"):
            serve(ModelOptions(model="demo"), CacheOptions(no_cache=True), ServeOptions(port=port))
    with pytest.raises(UsageError, match=r"cannot listen on no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_what_serve_cannot_do_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    for args, words in (
        (["--json"], "serve prints no JSON object"),
        (["--kv-cache-dtype", "int3"], "int3"),
        (["--api-key-file", str(tmp_path / "missing")], "cannot be read"),
        (["--memory-fraction", "2"], "--memory-fraction 2.0"),
    ):
        result = CliRunner().invoke(main, ["serve", "demo", "--port", "0", *args])
        assert result.exit_code == 2
        assert words in result.stderr


def test_the_command_line_gives_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[ModelOptions, CacheOptions, ServeOptions]] = []
    monkeypatch.setattr(module, "serve", lambda *options: asked.append(options))
    keys = tmp_path / "keys"
    keys.write_text("third\n")
    run = CliRunner().invoke
    assert run(main, ["serve", "demo"]).exit_code == 0
    assert asked[-1] == (ModelOptions(model="demo"), CacheOptions(), ServeOptions())
    assert run(main, ["serve", "demo"], env={"KVARN_API_KEY": "first second"}).exit_code == 0
    assert asked[-1][2].api_keys == ("first", "second")
    flags = "--api-key a --api-key b --host ::1 --port 9 --alias x --cors-origin http://y --max-queue 3 --timeout 4"
    more = "--shutdown-timeout 5 --max-body-mib 1 --max-num-seqs 2 --max-num-batched-tokens 99 --memory-fraction 0.5"
    args = [*flags.split(), *more.split(), "--api-key-file", str(keys), "-c", "512", "--no-cache"]
    assert run(main, ["serve", "demo", *args]).exit_code == 0
    model, cache, options = asked[-1]
    assert (model.ctx_size, cache.no_cache) == (512, True)
    assert options == ServeOptions(
        host="::1",
        port=9,
        aliases=("x",),
        api_keys=("a", "b", "third"),
        cors_origins=("http://y",),
        max_num_seqs=2,
        max_num_batched_tokens=99,
        memory_fraction=0.5,
        max_queue=3,
        timeout=4.0,
        shutdown_timeout=5.0,
        max_body_bytes=1 << 20,
    )


def test_a_bind_that_others_reach_is_warned_of_without_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "load", lambda options, **_: (_ for _ in ()).throw(UsageError("not here")))
    for host, keys, warned in (("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("127.0.0.1", (), False)):
        with pytest.raises(UsageError, match="not here"):
            serve(ModelOptions(model="x"), CacheOptions(), ServeOptions(host=host, port=0, api_keys=keys))
        assert ("warning: everybody who reaches" in capsys.readouterr().err) is warned


def test_the_url_is_where_it_listens() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    if socket.has_ipv6:
        with contextlib.suppress(UsageError), bind("::1", 0) as sock:
            assert url_of(sock).startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"memory_fraction": 0}, "memory-fraction 0"),
        ({"memory_fraction": 1.5}, "memory-fraction 1.5"),
        ({"max_num_batched_tokens": 4}, "4 is less than --max-num-seqs 8"),
        ({"timeout": 0}, "--timeout"),
        ({"max_queue": -1}, "--max-queue"),
        ({"port": 70000}, "70000"),
        ({"api_keys": ("",)}, "API key is empty"),
        ({"api_keys": ("a\nb",)}, "API key"),
    ],
)
def test_options_that_cannot_be_are_refused(fields: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ServeOptions(**fields)  # type: ignore[arg-type]


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nfirst\n\n  second  \n")
    assert read_keys(file) == ("first", "second")
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_keys(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "missing")


def loaded(backend: FakeBackend, folder: Path) -> Loaded:
    return Loaded(
        model_dir=folder,
        backend_name="fake",
        backend=backend,
        tokenizer=None,  # type: ignore[arg-type]
        load_seconds=0,
        weights=lambda: "w",
    )


def test_the_pools_are_sized_by_the_flags(tmp_path: Path) -> None:
    model = loaded(FakeBackend(Preset(tile_tokens=64), max_context=1024, available=4000), tmp_path)
    options = ServeOptions(max_num_seqs=2, max_num_batched_tokens=100, memory_fraction=0.5)
    engine, serving = build_engine(model, ModelOptions(model="x", ctx_size=512), options)
    assert engine.scheduler.config.context == serving.context == 512
    assert engine.scheduler.config.max_sequences == 2
    assert engine.scheduler.config.token_budget == 100
    assert engine.memory.blocks + engine.memory.slots == serving.kv_bytes <= 2000
    assert "asked for" in describe(model, serving, options, "http://x")[1]
    more, _ = build_engine(model, ModelOptions(model="x", ctx_size=512), ServeOptions(max_num_seqs=2))
    assert more.memory.blocks > engine.memory.blocks
    tight = loaded(FakeBackend(Preset(tile_tokens=64), max_context=1024, available=100), tmp_path)
    with pytest.raises(CapacityError):
        build_engine(tight, ModelOptions(model="x", ctx_size=512), options)


def test_the_served_name_is_the_hub_id_or_the_folders(tmp_path: Path) -> None:
    model = loaded(FakeBackend(None), tmp_path / "Some-Model")
    (tmp_path / "Some-Model").mkdir()
    assert served_name("org/name", model) == "org/name"
    assert served_name(str(tmp_path / "Some-Model"), model) == "Some-Model"
    assert served_name("demo", model) == "Some-Model"
