"""From the fields of a request to the engine's parameters; everything is checked before the engine sees it."""

import asyncio
import functools
import secrets
from collections.abc import Callable
from typing import TypeVar

from kvarn.constraint import ConstraintMaker
from kvarn.errors import UsageError
from kvarn.request import RequestParams
from kvarn.sampling import SamplingParams
from kvarn.serve.http.errors import ApiError, from_kvarn
from kvarn.serve.http.schema import Generation
from kvarn.serve.http.service import Served, Service
from kvarn.serve.tokenizer import stop_token_ids

T = TypeVar("T")


def check_model(served: Served, name: str) -> None:
    """ApiError 404 for a model that is not served under this name."""
    if name not in served.names:
        raise ApiError(
            404,
            f"the model {name[:200]!r} is not served here; use {served.id!r}",
            code="model_not_found",
            param="model",
        )


async def encode(tokenize: Callable[[], T], param: str) -> T:
    """Run something slow beside the event loop; what it refuses (UsageError) is ApiError 400 about `param`."""
    try:
        return await asyncio.to_thread(tokenize)
    except UsageError as error:
        raise from_kvarn(error, param=param) from error


async def constraint_of(served: Served, body: Generation) -> ConstraintMaker | None:
    """The constraint that a request asks for, built beside the event loop; ApiError 400 if it cannot be met."""
    structured = served.structured
    if (form := body.response_format) is not None:
        return await encode(lambda: structured.json_schema(form.schema), "response_format")
    if (regex := body.regex) is not None:
        return await encode(lambda: structured.regex(regex), "regex")
    if (grammar := body.grammar) is not None:
        return await encode(lambda: structured.grammar(grammar), "grammar")
    return None


def request_params(
    service: Service,
    body: Generation,
    prompt: list[int],
    *,
    max_tokens: int | None,
    logprobs: int,
    tenant: str,
    param: str,
    constraint: ConstraintMaker | None = None,
    shown: frozenset[int] = frozenset(),
) -> RequestParams:
    """The engine's parameters for one prompt; ApiError 400 for what does not fit. `param` is the prompt's field.

    shown: special tokens whose names are part of the answer's text.
    """
    served = service.check_ready()
    service.check_prompt(prompt, param)
    service.check_ids(list(body.logit_bias), "logit_bias")
    try:
        return RequestParams(
            prompt=tuple(prompt),
            max_tokens=served.context if max_tokens is None else min(max_tokens, served.context),
            sampling=SamplingParams(
                temperature=body.temperature,
                top_k=max(body.top_k, 0),
                top_p=body.top_p,
                min_p=body.min_p,
                repetition_penalty=body.repetition_penalty,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias=body.logit_bias,
                logprobs=logprobs,
                seed=secrets.randbits(63) if body.seed is None else body.seed,
            ),
            n=body.n,
            stop_token_ids=stop_token_ids(served.engine.backend.info, served.tokenizer),
            stop=body.stop,
            text=functools.partial(served.tokenizer.stream, shown),
            tenant=tenant,
            constraint=constraint,
        )
    except UsageError as error:
        raise from_kvarn(error, param=param) from error
