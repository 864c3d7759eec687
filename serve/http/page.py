"""The chat page: the files of serve/page, read once, and the headers that keep them from doing anything else."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    # Text never becomes markup: the browser refuses innerHTML and its like, whoever writes it.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "cache-control": "no-cache",  # asks again each time, and gets a 304
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, kw_only=True)
class _File:
    body: bytes
    media_type: str
    etag: str


def _read() -> dict[str, _File]:
    """Path on the server -> file; index.html is `/`, the others lie under /page/."""
    found = {}
    for entry in files("kvarn.serve.page").iterdir():
        kind = entry.name.rpartition(".")[2]
        if kind in _TYPES:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
            found[path] = _File(body=body, media_type=_TYPES[kind], etag=etag)
    return found


_FILES = _read()
PATHS = frozenset(_FILES)
"""Every path of the page. They hold no secret and change nothing, so they are open to all who reach the server."""


async def _get(request: Request) -> Response:
    file = _FILES[request.scope["path"]]
    headers = {**HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def install(app: FastAPI) -> None:
    """Serve the page."""
    for path in PATHS:
        app.add_route(path, _get, methods=["GET"], include_in_schema=False)
