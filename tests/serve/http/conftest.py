"""A real server on a free port in a thread, over the fake backend and a tokenizer of one character a token."""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
import uvicorn
from fake_backend import VOCAB, FakeBackend, next_token
from scripted import Scripted

from kvarn.engine import Engine, EngineConfig
from kvarn.errors import UsageError
from kvarn.format import Preset
from kvarn.serve.http.app import create_app
from kvarn.serve.http.security import Security
from kvarn.serve.http.service import Limits, Service
from kvarn.serve.toolcalls.learn import ChatFormat
from kvarn.step import StepPlan, StepResult

MODEL = "org/fake"
ALPHABET = [chr(32 + i) for i in range(95)] + ["\n", "é"]


class FakeTokenizer:
    """One token per character of ALPHABET; others count as the first."""

    has_chat_template = True
    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(c) if c in ALPHABET else 0 for c in text]

    chat_format = ChatFormat(native=True)
    variables: frozenset[str] = frozenset()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continue_final: bool = False,
        tools: Sequence[Any] = (),
        variables: Any = None,
    ) -> list[int]:
        if any(message["content"] == "refuse me" for message in messages):
            raise UsageError("the model's chat template refuses these messages: as asked")
        text = "\n".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.encode(text if continue_final else text + "\n<assistant>")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(ALPHABET[token] for token in ids)

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def is_special(self, token: int) -> bool:
        return False

    def token_bytes(self, token: int) -> bytes:
        return ALPHABET[token].encode()

    def spell(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def special_in(self, text: str) -> frozenset[int]:
        return frozenset()

    def stream(self, shown: frozenset[int] = frozenset()) -> "FakeStream":
        return FakeStream()


class FakeStream:
    def add(self, token: int) -> str:
        return ALPHABET[token]

    def finish(self) -> str:
        return ""


class GatedBackend(FakeBackend):
    """The fake backend; with `gate` closed each step waits for a permit. Reports log-probabilities as asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate: threading.Semaphore | None = None
        self.fault: BaseException | None = None

    def close_gate(self) -> None:
        self.gate = threading.Semaphore(0)

    def open_gate(self) -> None:
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.release(1000)

    def run(self, plan: StepPlan) -> StepResult:
        if self.gate is not None:
            self.gate.acquire(timeout=30)
        if self.fault is not None:
            raise self.fault
        result = super().run(plan)
        outputs = []
        for span, output in zip(plan.spans, result.outputs, strict=True):
            count = span.sampling.logprobs if span.sampling else 0
            top = tuple(((output.token + i) % VOCAB, -1.0 - i) for i in range(count)) if count else ()
            outputs.append(dataclasses.replace(output, top_logprobs=top))
        return dataclasses.replace(result, outputs=tuple(outputs))


class ScriptedBackend(Scripted, GatedBackend):
    """Says what a script has for it, and can be stopped."""


@dataclasses.dataclass
class Running:
    """A server that runs. `http` has no key and no other header of its own."""

    url: str
    http: httpx.Client
    service: Service
    backend: GatedBackend
    engine: Engine
    loop: asyncio.AbstractEventLoop

    def on_loop(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
        return self.http.post("/v1/chat/completions", json=body | fields)

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 5, "temperature": 0}
        return self.http.post("/v1/completions", json=body | fields)

    def idle(self) -> bool:
        scheduler = self.engine.scheduler
        held = scheduler.blocks.num_held + scheduler.slots.num_held
        return not scheduler.has_work and held == 0 and self.service.in_flight == 0


@contextlib.contextmanager
def running(
    *,
    limits: Limits | None = None,
    security: Security | None = None,
    places: int = 4,
    context: int = 1024,
    blocks: int = 40,
    ready: bool = True,
    poison: int | None = None,
    eos: tuple[int, ...] = (),
    script: tuple[Any, ...] | None = None,
) -> Iterator[Running]:
    preset = Preset(tile_tokens=64)
    tokenizer: Any = FakeTokenizer()
    if script is None:
        backend = GatedBackend(preset, poison=poison, eos=eos)
    else:
        tokenizer = script[0]
        backend = ScriptedBackend(preset, *script)
    engine = Engine(
        backend, EngineConfig(context=context, prefill_chunk=128, max_sequences=places, blocks=blocks, slots=20)
    )
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    started = threading.Event()
    made: dict[str, Any] = {}

    async def main() -> None:
        service = Service(limits)
        if ready:
            service.open(engine, tokenizer, (MODEL, "other-name"))
        config = uvicorn.Config(
            create_app(service, security or Security()),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        made.update(service=service, server=server, loop=asyncio.get_running_loop())
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        started.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(10)
    service = made["service"]
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
            yield Running(url, http, service, backend, engine, made["loop"])
    finally:  # also when a test has failed: else its server would outlive it, and the whole run
        backend.open_gate()
        made["server"].should_exit = True
        thread.join(10)
        stopped = service.served is None or service.served.runner.shutdown(drain=False, timeout=10)
    assert not thread.is_alive()
    assert stopped


@pytest.fixture(scope="session")
def serve() -> Any:
    """`with serve(...) as server`: a server of one's own."""
    return running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server that the tests of a file share; they leave it idle."""
    with running() as run:
        yield run


@pytest.fixture(scope="session")
def expected() -> Callable[[str, int], str]:
    """The greedy answer of the fake model to a raw prompt."""

    def answer(prompt: str, count: int) -> str:
        history = FakeTokenizer().encode(prompt)
        start = len(history)
        for _ in range(count):
            history.append(next_token(history))
        return FakeTokenizer().decode(history[start:])

    return answer


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait for something that another thread does."""

    def wait(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline, "it did not happen within 20 s"
            time.sleep(0.005)

    return wait
