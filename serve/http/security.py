"""Who may ask: hosts, origins, keys, content types and body sizes, before any endpoint runs."""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn.serve.http.errors import ApiError, error_response
from kvarn.serve.http.page import PATHS as PAGE_PATHS

OPEN_PATHS = {"/health"} | PAGE_PATHS  # a probe needs no key, and the page asks for one
_LOCAL = {"localhost", "127.0.0.1", "::1"}

Check = Callable[[Scope, Receive], Awaitable[Receive]]


@dataclass(frozen=True, kw_only=True)
class Security:
    """keys: the API keys; none means that everybody on this machine may ask. cors_origins: web pages that may. host:
    the address that was bound."""

    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    host: str = "127.0.0.1"


def guard(app: ASGIApp, check: Check) -> ASGIApp:
    """`app` behind a check, which may raise ApiError and gives the `receive` to use from there on."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                receive = await check(scope, receive)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this name (lower case)."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def hostname(host: str) -> str | None:
    """`[::1]:8080` -> `::1`; None for what is no host."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def check_site(security: Security) -> Check:
    """No web page but the allowed ones drives this server from its visitor's browser (403).

    A browser sends Origin and Sec-Fetch-Site with what a page asks of another site. By DNS rebinding a page makes the
    server its own site; then the Host is the page's, not one of ours. With a key the Host does not matter.
    """

    async def check(scope: Scope, receive: Receive) -> Receive:
        host = header(scope, b"host") or ""
        own = {*_LOCAL, security.host.lower(), (scope.get("server") or ("", 0))[0]}
        if not security.keys and hostname(host) not in own:
            raise ApiError(
                403,
                f"the host {host[:200]!r} is not this server's; use localhost, or start it with --api-key",
                code="host",
            )
        origin = header(scope, b"origin")
        if origin is not None:
            allowed = origin in security.cors_origins or "*" in security.cors_origins
            if not allowed and origin.partition("://")[2] != host:
                raise ApiError(
                    403, f"the web page {origin[:200]!r} may not ask here; allow it with --cors-origin", code="origin"
                )
        elif header(scope, b"sec-fetch-site") in ("cross-site", "same-site") and not _follows_a_link(scope):
            raise ApiError(403, "another web page may not ask here; allow it with --cors-origin", code="origin")
        return receive

    return check


def _follows_a_link(scope: Scope) -> bool:
    """Whether a visitor of another page opens ours in a tab. It sends nothing by being opened, and fits no frame."""
    asked = (scope["method"], scope["path"], header(scope, b"sec-fetch-mode"), header(scope, b"sec-fetch-dest"))
    return asked == ("GET", "/", "navigate", "document")


def tenant_of(key: str) -> str:
    """The name of a key's prefix cache: its sha256, never the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def check_key(security: Security) -> Check:
    """`Authorization: Bearer KEY` or `x-api-key: KEY` (401). Sets the request's tenant: with keys, one per key."""
    tenants = [tenant_of(key) for key in security.keys]

    async def check(scope: Scope, receive: Receive) -> Receive:
        state = scope.setdefault("state", {})
        state["tenant"], state["start"] = "", time.perf_counter()
        if not tenants or scope["path"] in OPEN_PATHS:
            return receive
        kind, _, key = (header(scope, b"authorization") or "").partition(" ")
        if not key:  # as Anthropic's clients send it
            kind, key = "bearer", header(scope, b"x-api-key") or ""
        given = hashlib.sha256(key.strip().encode("latin-1")).hexdigest()
        # Digests of equal length, each one compared: the time says nothing about a key.
        found = [hmac.compare_digest(given, tenant) for tenant in tenants]
        if kind.lower() != "bearer" or not any(found):
            raise ApiError(
                401,
                "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        state["tenant"] = given
        return receive

    return check


def check_body(limit: int, timeout: float) -> Check:
    """POST takes application/json (400) of up to `limit` bytes (413), whole within `timeout` seconds (503).

    A page can send other content types without asking the browser first, so they are refused even without a body.
    """

    async def check(scope: Scope, receive: Receive) -> Receive:
        if scope["method"] != "POST":
            return receive
        kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                400, f"the content type is {kind[:100]!r}; send application/json", code="unsupported_content_type"
            )
        too_large = ApiError(413, f"the body has more than {limit} bytes; send less", code="body_too_large")
        length = header(scope, b"content-length") or "0"
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(503, f"the body did not come within {timeout:g} s", code="timeout") from None
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    return check
