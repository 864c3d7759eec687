"""A server over HTTP: a stub that says what it is told to, in a thread."""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvarn.errors import UsageError
from kvarn.serve.chat.client import Server, ServerError, ServerTalk
from kvarn.serve.chat.commands import Chat

Chatting = Callable[..., Chat]
REPORT = {
    "memory": {"tiles": 3, "bytes_held": 0, "bytes_allocated": 1 << 20},
    "tokens": {"from_memory": 128, "from_disk": 0, "computed": 40},
    "disk": {},
}


def chunk(text: str | None = None, reason: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def sse(content: Any) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


USAGE = sse(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)
DONE = b"data: [DONE]\n\n"


class Stub:
    """`answers` are given one after another: a status and the parts of a body; None waits for `go`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answers: list[tuple[int, list[bytes | None]]] = []
        self.go = threading.Event()
        self.hung_up = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                return

            def do_GET(self) -> None:
                found = {"/v1/models": {"data": [{"id": "org/model"}]}, "/v1/cache": {"report": REPORT}}
                self.send(200, [json.dumps(found[self.path]).encode()])

            def do_POST(self) -> None:
                stub.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                stub.keys.append(self.headers["authorization"])
                self.send(*stub.answers.pop(0))

            def send(self, status: int, parts: list[bytes | None]) -> None:
                self.send_response(status)
                self.end_headers()
                for part in parts:
                    if part is None:
                        self.connection.settimeout(10)
                        if not self.connection.recv(1):
                            stub.hung_up.set()
                        return
                    self.wfile.write(part)
                    self.wfile.flush()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    thread = threading.Thread(target=lambda: made.http.serve_forever(poll_interval=0.01))
    thread.start()
    yield made
    made.http.shutdown()
    thread.join(10)
    made.http.server_close()


def talk_with(stub: Stub, key: str | None = None, system: str | None = None) -> ServerTalk:
    return ServerTalk(Server(url=stub.url + "/v1/", api_key=key), None, system)


def test_messages_go_as_text_with_the_settings_and_the_key(stub: Stub, chatting: Chatting) -> None:
    one, two = [chunk(""), chunk("Hel"), chunk("lo"), chunk(None, "stop"), USAGE, DONE], [chunk("Yes", "stop"), DONE]
    stub.answers = [(200, [*one]), (200, [*two])]
    chat = chatting(talk_with(stub, "secret", "Be brief."), "hi", "/set top_k 5", "again", "/stats")
    chat.run()
    assert chat.screen.answers[:2] == ["Hello", "Yes"]
    first, second = stub.bodies
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert second["messages"][2:] == [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "again"}]
    assert (first["model"], first["stream"], first["temperature"], first["max_tokens"]) == ("org/model", True, 0, 10)
    assert "top_k" not in first
    assert second["top_k"] == 5
    assert stub.keys == ["Bearer secret"] * 2
    assert "the server did not count its tokens" in " ".join(chat.screen.notes)
    assert "secret" not in repr(Server(url=stub.url, api_key="secret"))


def test_usage_comes_from_the_server(stub: Stub, chatting: Chatting) -> None:
    stub.answers = [(200, [chunk("a"), chunk("b", "stop"), USAGE, DONE])]
    chat = chatting(talk_with(stub), "hi", "/stats", "/show", "/cache")
    chat.run()
    said = "\n".join(chat.screen.notes)
    assert "prompt: 9 tokens" in said
    assert "4 of them cached" in said
    assert "answer: 3 tokens" in said
    assert "model: org/model at http://127.0.0.1" in said
    assert "128 tokens were not computed again" in said


def test_a_text_with_odd_line_breaks_or_in_small_parts_comes_whole(stub: Stub, chatting: Chatting) -> None:
    text = "a\u2028b\x85c\x0bd é 日本"
    body = chunk(text) + b": a comment\n\n" + chunk(None, "stop") + DONE
    stub.answers = [(200, [body[i : i + 7] for i in range(0, len(body), 7)])]
    chat = chatting(talk_with(stub), "hi")
    chat.run()
    assert chat.screen.answers[0] == text


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_are_heard_and_are_no_part_of_the_answer(stub: Stub, chatting: Chatting, field: str) -> None:
    thought = b"data: " + json.dumps({"choices": [{"delta": {field: "hmm"}}]}).encode() + b"\n\n"
    stub.answers = [(200, [thought, thought, chunk("yes", "stop"), DONE]), (200, [chunk("no", "stop"), DONE])]
    chat = chatting(talk_with(stub), "hi", "and?")
    chat.run()
    assert chat.screen.thoughts == "hmmhmm"
    assert chat.screen.answers[:2] == ["yes", "no"]
    assert stub.bodies[1]["messages"][1] == {"role": "assistant", "content": "yes"}


def test_retry_and_undo(stub: Stub, chatting: Chatting) -> None:
    stub.answers = [(200, [chunk(text, "stop"), DONE]) for text in ("one", "two", "three")]
    chat = chatting(talk_with(stub), "/set temperature 1", "a", "/retry", "/undo", "b", "/undo", "/undo")
    chat.run()
    assert [body["seed"] for body in stub.bodies] == [0, 1, 0]
    assert [body["messages"] for body in stub.bodies[::2]] == [[{"role": "user", "content": x}] for x in "ab"]
    assert stub.bodies[1]["messages"] == stub.bodies[0]["messages"]
    assert chat.screen.errors == ["nothing was said yet"]


def test_ctrl_c_hangs_up_and_keeps_what_was_said(stub: Stub, chatting: Chatting) -> None:
    stub.answers = [(200, [chunk("so far"), None]), (200, [chunk("more", "stop"), DONE])]
    chat = chatting(talk_with(stub), "hi", "go on")
    chat.screen.on_text = lambda piece: os.kill(os.getpid(), signal.SIGINT) if piece == "so far" else None
    chat.run()
    assert stub.hung_up.wait(10)
    assert chat.screen.notes == ["stopped; what was said so far stays"]
    assert stub.bodies[1]["messages"][1] == {"role": "assistant", "content": "so far"}


@pytest.mark.parametrize(
    ("status", "parts", "text"),
    [
        (400, [b'{"error": {"message": "no\\nsuch \\u001b[31mfield", "code": "x"}}'], "no such ␛[31mfield"),
        (400, [b'{"error": {"message": "9 of 8", "code": "context_length_exceeded"}}'], "9 of 8; /undo drops"),
        (401, [b'{"error": {"message": "who are you?"}}'], "who are you? (--api-key, or KVARN_API_KEY)"),
        (502, [b"<html>" + b"x" * 100_000], "answers with code 502"),
        (200, [b"<html>"], "ended in the middle"),
        (200, [chunk("a")], "ended in the middle"),
        (200, [b"data: {\n\n"], "no part of a chat completion"),
        (200, [b"data: [1]\n\n"], "no part of a chat completion"),
        (200, [chunk("a"), sse({"error": {"message": "the engine stopped"}})], "the engine stopped"),
    ],
)
def test_errors_are_one_line_and_change_nothing(
    stub: Stub, chatting: Chatting, status: int, parts: list[bytes | None], text: str
) -> None:
    stub.answers = [(status, parts)]
    chat = chatting(talk_with(stub), "hi")
    chat.run()
    (error,) = chat.screen.errors
    assert text in error
    assert "\n" not in error
    assert chat.talk.is_empty


def test_what_needs_token_ids_says_why(stub: Stub, chatting: Chatting) -> None:
    chat = chatting(talk_with(stub), "/save x", "/load x")
    chat.run()
    assert len(chat.screen.errors) == 2
    assert all("token ids, which only the server has" in error for error in chat.screen.errors)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=r"cannot reach http://127.0.0.1:.*is kvarn serve running there"):
        ServerTalk(Server(url=f"http://127.0.0.1:{port}"), None, None)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is no server's address"):
        Server(url=url)
