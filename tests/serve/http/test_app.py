"""Paths, models, tokenize, the cache's report and the metrics."""

from typing import Any

import pytest


def test_the_model_is_listed_and_found_by_an_id_with_a_slash(server: Any) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("org/fake", "model", 1024)
    assert server.http.get("/v1/models/org/fake").json() == model
    assert server.http.get("/v1/models/org%2Ffake").json() == model
    assert server.http.get("/v1/models/other-name").json() == model


def test_another_model_is_a_404(server: Any) -> None:
    for response in (server.chat(model="gpt-4"), server.complete(model="x"), server.http.get("/v1/models/org/other")):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "org/fake" in error["message"]
    assert server.chat(model="other-name").json()["model"] == "org/fake"


@pytest.mark.parametrize(
    "path", ["/page", "/v1", "/v1/chat", "/v1/chat/completions/", "/docs", "/v1/embeddings", "/%00"]
)
def test_an_unknown_path_is_a_404_in_openais_shape(server: Any, path: str) -> None:
    response = server.http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_a_wrong_method_is_a_405_in_openais_shape(server: Any) -> None:
    for response in (server.http.get("/v1/chat/completions"), server.http.delete("/v1/models/org/fake")):
        assert response.status_code == 405
        assert response.json()["error"]["code"] == "method_not_allowed"
        assert response.headers["allow"]


def test_tokenize_gives_what_the_model_sees(server: Any) -> None:
    got = server.http.post("/tokenize", json={"prompt": "AB"}).json()
    assert got == {"tokens": [33, 34], "count": 2, "max_model_len": 1024}
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] == server.chat().json()["usage"]["prompt_tokens"]
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}, {"prompt": "a", "colour": 1}):
        assert server.http.post("/tokenize", json=body).status_code == 400
    assert server.http.post("/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404


def test_the_cache_report_counts_hits_and_what_is_stored(serve: Any, until: Any) -> None:
    with serve() as own:
        for _ in range(2):
            own.complete(prompt="x" * 200)
        until(own.idle)
        got = own.http.get("/v1/cache").json()
        assert got["hit_tokens"] == 192
        assert got["computed_tokens"] == 204 + 12
        assert got["memory"]["tiles"] == 3
        assert got["memory"]["blocks"] == {"size": 40, "held": 0, "kept": 2, "free": 38}
        assert got["report"]["tokens"]["from_memory"] == 192


def test_the_cache_report_says_what_a_sequence_holds(serve: Any) -> None:
    with serve() as own:
        for tokens in (1, 64, 65, 128, 129, 200, 257):
            kv = own.http.get("/v1/cache", params={"tokens": tokens}).json()["kv"]
            assert own.complete(prompt=chr(48 + tokens % 10) * tokens, max_tokens=1).status_code == 200
            assert kv["sequence"]["bytes"] == own.engine.peak_bytes_held
            assert kv["sequence"]["bytes_exact"] == -(-tokens // 64) * own.backend.pool_size.slot_bytes
        assert (kv["dtype"], kv["layers"], kv["layers_sealed"]) == ("kvarn_k4v2_g64", 2, 2)
        assert (kv["sealed_bytes_per_token"], kv["exact_bytes_per_token"]) == (1.0, 4.0)
        assert "sequence" not in own.http.get("/v1/cache").json()["kv"]
        for wrong in ("0", "-1", "many", "1.5", "9" * 5000):
            assert own.http.get("/v1/cache", params={"tokens": wrong}).status_code == 400


def test_a_fault_of_ours_is_a_500_without_a_traceback(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as own:
        tokenizer = own.service.served.tokenizer
        monkeypatch.setattr(tokenizer, "encode", lambda text: {}["secret"], raising=False)
        response = own.complete()
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert own.chat().status_code == 500
        assert own.http.get("/health").status_code == 200


def test_the_api_describes_itself(server: Any) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} <= set(paths)
