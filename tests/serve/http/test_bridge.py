"""Clients that hang up, do not read, or take too long: what they hold is free within a step."""

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import pytest

from kvarn.request import RequestParams
from kvarn.serve.http import bridge
from kvarn.serve.http.errors import ApiError
from kvarn.serve.http.service import Limits

LONG = {"model": "org/fake", "prompt": "hi", "max_tokens": 900, "temperature": 0}


def send(server: Any, body: dict[str, Any]) -> socket.socket:
    """A request over a bare socket, so that the test decides when it reads and when it goes."""
    data = json.dumps(body).encode()
    host = server.url.removeprefix("http://")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", int(host.partition(":")[2])))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    sock.sendall(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_place_within_one_step(server: Any, until: Any, stream: bool) -> None:
    server.backend.close_gate()
    gate = server.backend.gate
    before = len(server.backend.plans)
    sock = send(server, {**LONG, "stream": stream})
    gate.release(3)
    until(lambda: len(server.backend.plans) == before + 3)
    sock.close()
    until(lambda: server.service.in_flight == 0)
    until(lambda: server.service.served.runner._inbox.qsize() == 1)
    gate.release()  # the step that runs already
    until(server.idle)
    assert len(server.backend.plans) == before + 4
    server.backend.open_gate()


def test_a_client_that_waits_in_the_queue_and_hangs_up_is_never_run(serve: Any, until: Any) -> None:
    with serve(places=1) as own:
        own.backend.close_gate()
        first = send(own, LONG)
        until(lambda: len(own.engine.scheduler.running) == 1)
        second = send(own, {**LONG, "prompt": "other"})
        until(lambda: own.service.in_flight == 2)
        second.close()
        until(lambda: own.service.in_flight == 1)
        first.close()
        own.backend.open_gate()
        until(own.idle)
        assert all(len(plan.spans) == 1 for plan in own.backend.plans)
        assert all(span.tokens[0] != ord("o") - 32 or span.start for plan in own.backend.plans for span in plan.spans)


def test_a_client_that_does_not_read_is_cancelled_and_others_go_on(
    serve: Any, until: Any, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    monkeypatch.setattr(bridge, "EVENTS_PER_ANSWER", 8)
    with serve() as own:
        # Many answers of one request, so that the kernel's buffers are full before they are done.
        sock = send(own, {**LONG, "n": 16, "stream": True, "logprobs": 20})
        until(lambda: own.service.in_flight == 16)
        until(own.idle)
        generated = sum(len(plan.spans) for plan in own.backend.plans)
        assert generated < 16 * 900, "it ended before its time"
        assert own.complete().json()["choices"][0]["text"] == expected("hi", 5)
        sock.close()


def test_a_request_ends_at_the_timeout(serve: Any, until: Any) -> None:
    with serve(limits=Limits(timeout=0.2)) as own:
        own.backend.close_gate()
        response = own.complete(max_tokens=900)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "timeout"
        assert "0.2 s" in response.json()["error"]["message"]
        text = own.complete(max_tokens=900, stream=True).text
        assert json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert "[DONE]" not in text
        own.backend.open_gate()
        until(own.idle)


def test_an_answer_that_fails_is_a_500_and_the_others_go_on(serve: Any, until: Any, expected: Any) -> None:
    with serve(poison=33) as own:
        good: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: good.append(own.complete(prompt="b" * 100, max_tokens=60)))
        thread.start()
        response = own.complete(prompt="A" * 200, max_tokens=900)
        assert response.status_code == 500
        assert "poisoned" in response.json()["error"]["message"]
        chunks = own.complete(prompt="A" * 200, stream=True).text
        assert "poisoned" in json.loads(chunks.split("\n\n")[-2].removeprefix("data: "))["error"]["message"]
        thread.join(20)
        assert good[0].json()["choices"][0]["text"] == expected("b" * 100, 60)
        until(own.idle)


def test_an_engine_that_ends_fails_what_runs_and_what_comes(serve: Any, until: Any) -> None:
    with serve() as own:
        own.backend.close_gate()
        answers: list[httpx.Response] = []
        failed = threading.Event()
        own.service.on_failure = failed.set
        thread = threading.Thread(target=lambda: answers.append(own.complete(max_tokens=900)))
        thread.start()
        until(lambda: own.service.in_flight == 1)
        own.backend.fault = KeyError("a fault of ours")
        own.backend.open_gate()
        thread.join(20)
        assert answers[0].status_code == 500
        assert "the engine stopped" in answers[0].json()["error"]["message"]
        assert "Traceback" not in answers[0].text
        assert failed.wait(10)
        assert own.http.get("/health").status_code == 503
        assert own.http.get("/health").json() == {"status": "failed"}
        after = own.complete()
        assert after.status_code == 503
        assert after.json()["error"]["code"] == "engine_stopped"


def test_a_feed_that_is_closed_twice_counts_once(server: Any) -> None:
    params = RequestParams(prompt=(1, 2), max_tokens=3)

    async def feed() -> list[int]:
        made = server.service.submit([params, params])
        seen = [server.service.in_flight]
        indices = {index async for index, _ in made}
        made.close()
        made.close()
        made.abort(ApiError(500, "too late"))
        return [*seen, server.service.in_flight, len(indices)]

    assert server.run(feed()) == [2, 0, 2]


def test_iterating_after_an_abort_raises_its_error(server: Any, until: Any) -> None:
    async def feed() -> str:
        made = server.service.submit([RequestParams(prompt=(1,), max_tokens=900)])
        made.abort(ApiError(503, "as asked"))
        try:
            async with asyncio.timeout(5):
                await anext(made)
        except ApiError as error:
            return error.message
        finally:
            made.close()
        return "nothing was raised"

    assert server.run(feed()) == "as asked"
    until(server.idle)
