"""Keys, hosts, origins, content types and sizes: who may not ask learns so before anything runs."""

import hashlib
import http.client
from typing import Any

import httpx
import pytest

from kvarn.serve.http.security import Security
from kvarn.serve.http.service import Limits

BODY = {"model": "org/fake", "prompt": "hi", "max_tokens": 1}


def post(server: Any, **headers: str) -> httpx.Response:
    return server.http.post("/v1/completions", json=BODY, headers={k.replace("_", "-"): v for k, v in headers.items()})


def refused(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


WRONG_KEYS = [None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2"]


def test_without_the_right_key_it_is_a_401(serve: Any) -> None:
    with serve(security=Security(keys=("first-key",))) as own:
        for value in WRONG_KEYS:
            headers = {} if value is None else {"authorization": value}
            refused(own.http.get("/v1/models", headers=headers), 401)
            refused(own.http.get("/metrics", headers=headers), 401)
            response = post(own, **headers)
            refused(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            assert "first-key" not in response.text
        assert own.backend.plans == []
        assert own.http.get("/health").status_code == 200, "a probe needs no key"


def test_each_key_has_a_prefix_cache_of_its_own_named_by_its_digest(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(security=Security(keys=("first-key", "schlüssel"))) as own:
        seen = []
        submit = own.service.submit
        monkeypatch.setattr(own.service, "submit", lambda params: (seen.extend(params), submit(params))[1])
        for key in ("first-key", "schlüssel"):
            assert post(own, authorization=f"Bearer {key}".encode()).status_code == 200
            assert post(own, authorization=f"bearer {key}".encode()).status_code == 200
        want = [
            hashlib.sha256(key.encode()).hexdigest() for key in ("first-key", "first-key", "schlüssel", "schlüssel")
        ]
        assert [params.tenant for params in seen] == want


def test_without_keys_there_is_one_tenant(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    submit = server.service.submit
    monkeypatch.setattr(server.service, "submit", lambda params: (seen.extend(params), submit(params))[1])
    post(server, authorization="Bearer whatever")
    assert seen[0].tenant == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.nip.io", "[", ""]
)
def test_without_keys_a_foreign_host_is_a_403(server: Any, host: str) -> None:
    refused(post(server, host=host), 403)
    refused(server.http.get("/v1/models", headers={"host": host}), 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:99", "127.0.0.1:1", "[::1]:8080", "[::1]", "LOCALHOST"])
def test_this_machines_own_names_are_taken(server: Any, host: str) -> None:
    assert post(server, host=host).status_code == 200


def test_with_a_key_any_host_is_taken(serve: Any) -> None:
    with serve(security=Security(keys=("k",))) as own:
        assert post(own, host="kvarn.example", authorization="Bearer k").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "https://evil.example", "sec_fetch_site": "same-origin"},
    ],
)
def test_another_web_page_is_a_403(server: Any, headers: dict[str, str]) -> None:
    response = post(server, **headers)
    refused(response, 403)
    assert "access-control-allow-origin" not in response.headers
    refused(server.http.options("/v1/completions", headers={k.replace("_", "-"): v for k, v in headers.items()}), 403)


def test_the_server_itself_and_the_address_bar_are_taken(server: Any) -> None:
    assert post(server, origin=server.url, sec_fetch_site="same-origin").status_code == 200
    assert server.http.get("/v1/models", headers={"sec-fetch-site": "none"}).status_code == 200


def test_an_allowed_page_gets_the_cors_headers_even_with_its_errors(serve: Any) -> None:
    page = "https://app.example"
    with serve(security=Security(keys=("k",), cors_origins=(page,))) as own:
        asking = {
            "origin": page,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        preflight = own.http.options("/v1/completions", headers={**asking, "sec-fetch-site": "cross-site"})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == page
        answer = post(own, origin=page, sec_fetch_site="cross-site", authorization="Bearer k")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page)
        wrong = post(own, origin=page)
        refused(wrong, 401)
        assert wrong.headers["access-control-allow-origin"] == page
        refused(post(own, origin="https://evil.example", authorization="Bearer k"), 403)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data", "text/json"]
)
def test_post_takes_json_only(server: Any, kind: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/nowhere"):
        response = server.http.post(
            path, content=b'{"model": "org/fake", "prompt": "hi"}', headers={"content-type": kind}
        )
        refused(response, 400)
        assert response.json()["error"]["code"] == "unsupported_content_type"
    assert post(server, content_type="application/json; charset=utf-8").status_code == 200


def test_a_large_body_is_a_413_with_its_length_or_in_chunks(serve: Any) -> None:
    with serve(limits=Limits(max_body_bytes=1000)) as own:
        fits = b'{"model": "org/fake", "prompt": "hi", "max_tokens": 1}'
        fits += b" " * (1000 - len(fits))
        headers = {"content-type": "application/json"}
        assert own.http.post("/v1/completions", content=fits, headers=headers).status_code == 200
        refused(own.http.post("/v1/completions", content=fits + b" ", headers=headers), 413)
        chunks = iter([fits, b" "])
        refused(own.http.post("/v1/completions", content=chunks, headers=headers), 413)
        connection = http.client.HTTPConnection(own.url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(10**12))
        connection.endheaders()
        assert connection.getresponse().status == 413, "it does not wait for the body"
        connection.close()


def test_a_body_that_never_ends_is_given_up(serve: Any) -> None:
    with serve(limits=Limits(timeout=0.2)) as own:
        connection = http.client.HTTPConnection(own.url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 503
        connection.close()
