"""The application: which path does what, behind which checks."""

import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvarn import __version__
from kvarn.capacity import holding
from kvarn.serve.http import errors, page
from kvarn.serve.http.chat import chat, tools_of
from kvarn.serve.http.completions import completions
from kvarn.serve.http.conversation import Conversation, encode_conversation
from kvarn.serve.http.messages import count_tokens, messages
from kvarn.serve.http.messages_schema import CountBody, MessagesBody
from kvarn.serve.http.metrics import CONTENT_TYPE
from kvarn.serve.http.params import check_model, encode
from kvarn.serve.http.responses import responses
from kvarn.serve.http.responses_schema import ResponsesBody
from kvarn.serve.http.schema import ChatBody, CompletionBody, TokenizeBody
from kvarn.serve.http.security import Security, check_body, check_key, check_site, guard
from kvarn.serve.http.service import Served, Service

_log = logging.getLogger("kvarn.http")
_NEEDS_MODEL = ("/v1/", "/tokenize")


def create_app(service: Service, security: Security) -> ASGIApp:
    """The ASGI application of one server."""
    app: ASGIApp = _routes(service)
    app = guard(app, _check_status(service))
    app = guard(app, check_body(service.limits.max_body_bytes, service.limits.timeout))
    app = guard(app, check_key(security))
    if security.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=list(security.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app = guard(app, check_site(security))
    return _counted(app, service)


def _routes(service: Service) -> FastAPI:
    app = FastAPI(title="KVarN", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    errors.install(app)
    page.install(app)

    @app.post("/v1/chat/completions")
    async def post_chat(body: ChatBody, request: Request) -> Response:
        return await chat(service, request, body)

    @app.post("/v1/completions")
    async def post_completions(body: CompletionBody, request: Request) -> Response:
        return await completions(service, request, body)

    @app.post("/v1/responses")
    async def post_responses(body: ResponsesBody, request: Request) -> Response:
        return await responses(service, request, body)

    @app.post("/v1/messages")
    async def post_messages(body: MessagesBody, request: Request) -> Response:
        return await messages(service, request, body)

    @app.post("/v1/messages/count_tokens")
    async def post_count_tokens(body: CountBody) -> Response:
        return await count_tokens(service, body)

    @app.get("/v1/models")
    async def get_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service.check_ready())]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        served = service.check_ready()
        check_model(served, name)
        return _model(served)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        served = service.check_ready()
        if body.model is not None:
            check_model(served, body.model)
        if body.messages is not None:
            conversation = Conversation(
                messages=[message.for_template for message in body.messages], tools=tools_of(body.tools)
            )
            tokens = await encode_conversation(served, conversation)
        else:
            text = body.prompt or ""
            tokens = await encode(lambda: served.tokenizer.encode(text), "prompt")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": served.context}

    @app.get("/health")
    async def health() -> Response:
        code = 200 if service.status == "ready" else 503
        return JSONResponse({"status": service.status}, code)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/cache")
    def cache(tokens: Annotated[int | None, Query(ge=1)] = None) -> dict[str, Any]:
        served = service.check_ready()
        return {**_cache(served), "kv": _kv(served, tokens)}

    return app


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": "kvarn",
        "aliases": list(served.names[1:]),
        "max_model_len": served.context,
    }


def _cache(served: Served) -> dict[str, Any]:
    """What the prefix cache holds, and how many tokens of prompts it gave (hits) or had to be computed (misses)."""
    scheduler = served.engine.scheduler
    counters = scheduler.counters
    memory = {}
    for what, pool in (("blocks", scheduler.blocks), ("slots", scheduler.slots)):
        held, kept = pool.num_held, pool.num_kept
        memory[what] = {"size": pool.size, "held": held, "kept": kept, "free": pool.size - held - kept}
    return {
        "object": "cache",
        "tile_tokens": scheduler.config.tile_tokens,
        "memory": {"tiles": len(scheduler.cache), **memory},
        "hit_tokens": counters.cached_tokens + counters.restored_tokens,
        "computed_tokens": counters.computed_tokens,
        "preemptions": counters.preemptions,
        "report": served.engine.cache_report(),
    }


def _kv(served: Served, tokens: int | None) -> dict[str, Any]:
    """What the KV cache takes, in bytes; `sequence`: what one sequence of `tokens` tokens holds, and would hold exact.

    Both hold whole tiles. The sealed bytes a token are None where nothing is sealed.
    """
    plan, size = served.engine.backend.info.plan, served.engine.backend.pool_size
    tile = plan.tile_tokens
    report: dict[str, Any] = {
        "dtype": plan.name,
        "tile_tokens": tile,
        "layers": len(plan.layers),
        "layers_sealed": len(plan.sealed),
        "sealed_bytes_per_token": size.block_bytes / tile if plan.preset else None,
        "exact_bytes_per_token": size.slot_bytes / tile,
    }
    if tokens is not None:
        exact = -(-tokens // tile) * size.slot_bytes
        held = holding(tokens, plan).nbytes(size)
        report["sequence"] = {"tokens": tokens, "bytes": held, "bytes_exact": exact}
    return report


def _check_status(service: Service) -> Callable[[Scope, Receive], Awaitable[Receive]]:
    async def check(scope: Scope, receive: Receive) -> Receive:
        if scope["path"].startswith(_NEEDS_MODEL):
            service.check_ready()
        return receive

    return check


def _counted(app: ASGIApp, service: Service) -> ASGIApp:
    """Count every answer by endpoint and code; a fault of ours ends its request and nothing else."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started = False

        async def count(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                service.metrics.requests.labels(endpoint(scope["path"]), str(message["status"])).inc()
            await send(message)

        try:
            await app(scope, receive, count)
        except Exception:
            _log.exception("a request failed")
            if not started:
                await errors.error_response(errors.fault(), scope["path"])(scope, receive, count)

    return counted


_PATHS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/models", "/tokenize", "/health", "/metrics", "/v1/cache"),
}


def endpoint(path: str) -> str:
    """A path's label in the metrics; unknown ones share one."""
    if path in _PATHS:
        return path
    if path in page.PATHS:
        return "/"
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
