"""Requests drawn from the server's own description, and rubbish: never a 5xx, and the server is idle afterwards."""

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    max_examples=15,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/tokenize", "POST"),
    ("/v1/models/{name}", "GET"),
]
LIMITS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/messages"), "max_tokens"),
    "/v1/responses": "max_output_tokens",
}


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_the_description_allows_or_not_is_never_a_5xx(server: Any, until: Any, path: str, method: str) -> None:
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operation = schema[path][method]
    # Nothing is wrong with any path, so only what is right can be drawn there.
    modes = schemathesis.GenerationMode if method == "POST" else [schemathesis.GenerationMode.POSITIVE]
    answered = 0
    for mode in modes:

        @SETTINGS
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            nonlocal answered
            sent = case.as_transport_kwargs(base_url=server.url)
            body = sent.get("json")
            if isinstance(body, dict) and isinstance(body.get("n"), int):
                body["n"] = min(body["n"], 4)
            if isinstance(body, dict):
                body["model"] = "org/fake"  # else most would end at the name
                body |= {LIMITS[path]: 4} if path in LIMITS else {}
            try:
                response = server.http.request(
                    method, sent["url"], json=body, headers={"content-type": "application/json"}
                )
            except (httpx.InvalidURL, httpx.LocalProtocolError, ValueError, TypeError):
                return  # what the client cannot send
            answered += 1
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                own = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
                assert set(response.json()["error"]) == own

        ask()
    assert answered > 10
    until(server.idle)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
USER = [{"role": "user", "content": "x"}]
SHARED = ("stop", "logit_bias", "n", "seed", "stream_options", "temperature", "top_k")
FIELDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (
        {"max_tokens": 2, "messages": USER},
        ("messages", "tools", "tool_choice", "reasoning_effort", "response_format", *SHARED),
    ),
    "/v1/completions": ({"max_tokens": 2, "prompt": "x"}, ("prompt", "regex", "grammar", *SHARED)),
    "/v1/responses": (
        {"max_output_tokens": 2, "input": "x"},
        ("input", "instructions", "text", "reasoning", "include", "tools", "tool_choice", "metadata", "stream_options"),
    ),
    "/v1/messages": (
        {"max_tokens": 2, "messages": USER},
        ("messages", "system", "thinking", "output_config", "output_format", "tools", "tool_choice", "stop_sequences"),
    ),
}
"""What a request has, and fields that get rubbish instead."""


@pytest.mark.parametrize("path", FIELDS)
def test_rubbish_is_never_a_5xx(server: Any, path: str) -> None:
    good, names = FIELDS[path]

    @SETTINGS
    @given(fields=st.dictionaries(st.sampled_from(names), JSON, max_size=3), raw=st.binary(max_size=50))
    def ask(fields: dict[str, Any], raw: bytes) -> None:
        for body in (json.dumps({"model": "org/fake", **good, **fields}).encode(), raw):
            response = server.http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code < 500, response.text

    ask()
