"""Errors with the true HTTP code, in OpenAI's shape; under /v1/messages in Anthropic's."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvarn.errors import ConstraintError, ContextOverflowError, KvarnError, UsageError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a request is refused or ended with. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that the client gets."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unavailable(message: str, code: str) -> ApiError:
    """503: try again in a moment."""
    return ApiError(503, message, code=code, headers={"retry-after": "1"})


def fault() -> ApiError:
    """500: what went wrong is ours, and stands in the log only."""
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def from_kvarn(error: KvarnError, *, param: str | None = None) -> ApiError:
    """Our own exceptions: what the caller asked wrongly is 400, anything else 500."""
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), code="context_length_exceeded", param=param)
    if isinstance(error, UsageError):
        return ApiError(400, str(error), code="invalid_value", param=param)
    if isinstance(error, ConstraintError):
        return ApiError(400, str(error), code="constraint_failed", param=param)
    return ApiError(500, str(error), code="engine_error")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The JSON object that a client of /v1/messages gets."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    where = f"{error.param}: " if error.param and not error.message.startswith(error.param) else ""
    return {"type": "error", "error": {"type": kind, "message": where + error.message}}


def error_response(error: ApiError, path: str) -> Response:
    """The answer to a request that was refused. In ASCII: a message may quote what is not valid Unicode."""
    body, status = error.body, error.status
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        body, status = anthropic_body(error), 529 if status == 503 else status
    return Response(json.dumps(body), status, error.headers, media_type="application/json")


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about fields of chats, as an endpoint that has them under other names says it."""
    try:
        yield
    except ApiError as error:
        new = names.get(error.param or "")
        if new is None:
            raise
        message = error.message.replace(str(error.param), new)
        raise ApiError(error.status, message, code=error.code, param=new, headers=error.headers) from error


def path_of(location: Sequence[int | str]) -> str | None:
    """("body", "messages", 0, "content") -> messages[0].content. A tag in angle brackets is no part of it."""
    text = ""
    for part in location[1:]:
        if isinstance(part, str) and part.startswith("<"):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or None


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, as a sentence."""
    first = error.errors()[0]
    kind, context = first["type"], first.get("ctx") or {}
    param = path_of(first["loc"])
    if kind == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON: {context.get('error', 'it cannot be read')}", code="invalid_json"
        )
    if kind == "kvarn_field":  # see kvarn.serve.http.fields.fault
        param = ".".join(x for x in (param, context["param"]) if x) or None
        return ApiError(400, first["msg"], code=context["code"], param=param)
    if param is None:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    if kind == "missing":
        return ApiError(400, f"{param} is missing", code="missing_required_parameter", param=param)
    return ApiError(400, f"{param}: {first['msg']}", code="invalid_value", param=param)


def from_http(error: HTTPException) -> ApiError:
    """What the router refuses: unknown paths and methods."""
    known = {
        404: ApiError(404, "no such path; see docs/server.md for those that exist", code="not_found"),
        405: ApiError(405, "this path does not take this method", code="method_not_allowed", headers=error.headers),
        400: ApiError(400, "the body cannot be read as JSON", code="invalid_json"),
    }
    return known.get(error.status_code) or ApiError(error.status_code, str(error.detail))


def install(app: FastAPI) -> None:
    """Every way in which a request fails gives its endpoint's shape."""

    async def api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error, request.url.path)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error), request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(from_http(error), request.url.path)

    async def kvarn(request: Request, error: Exception) -> Response:
        assert isinstance(error, KvarnError)
        return error_response(from_kvarn(error), request.url.path)

    async def ours(request: Request, error: Exception) -> Response:
        return error_response(fault(), request.url.path)

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(KvarnError, kvarn)
    app.add_exception_handler(Exception, ours)
