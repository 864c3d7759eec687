"""Errors in OpenAI's shape, with the true HTTP code."""

import json
from collections.abc import Mapping, Sequence
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


def error_response(error: ApiError) -> Response:
    """The answer to a request that was refused. In ASCII: a message may quote what is not valid Unicode."""
    return Response(json.dumps(error.body), error.status, error.headers, media_type="application/json")


def path_of(location: Sequence[int | str]) -> str | None:
    """("body", "messages", 0, "content") -> messages[0].content."""
    text = ""
    for part in location[1:]:
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
    """Every way in which a request fails gives OpenAI's shape."""

    async def api(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error))

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(from_http(error))

    async def kvarn(_: Request, error: Exception) -> Response:
        assert isinstance(error, KvarnError)
        return error_response(from_kvarn(error))

    async def ours(_: Request, error: Exception) -> Response:
        return error_response(fault())

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(KvarnError, kvarn)
    app.add_exception_handler(Exception, ours)
