"""What every endpoint makes of a chat request, and what the engine and the answer's parser make of that.

An endpoint converts its body to a `Conversation` and its sampling fields to a `Generation`, calls `prepare`, submits
`Prepared.params`, and runs every answer's text through a parser of `Prepared.parser` (`answer.progress` does).
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvarn.request import RequestParams
from kvarn.serve.http.errors import ApiError
from kvarn.serve.http.params import constraint_of, encode, request_params
from kvarn.serve.http.parts import AnswerParser, PlainParser
from kvarn.serve.http.schema import Generation
from kvarn.serve.http.service import Served, Service


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema; None takes no arguments. strict: the arguments
    must fit the schema."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True)
class Named:
    """The tool choice that asks for a call of this function."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | Named


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """Whether and how to think. effort: none, minimal, low, medium, high, xhigh or max; None is the template's default.
    variables: further variables of the chat template, by name."""

    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A chat request, whatever endpoint it came to.

    messages, in the chat templates' form: `role` (system, user, assistant, tool), `content` (a string, maybe empty),
    and where they have any `name`, `tool_call_id` (role tool; `name` is then the function's, filled in by `prepare`
    from the call), `reasoning_content` (role assistant: what it thought), and `tool_calls` (role assistant: a list of
    `{"id", "type": "function", "function": {"name", "arguments"}}`, with the arguments as the JSON *text* that the
    model wrote: `prepare` gives templates what they need, and keeps the text as it is where it can, for the prefix
    cache). A last message of the assistant is continued.
    parallel: whether an answer may hold several calls.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel: bool = True
    thinking: Thinking = field(default_factory=Thinking)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """params: for the engine. parser: makes the parser of one answer, so one call for each of n. thinks: the model may
    think, so the usage says how many tokens that took."""

    params: RequestParams
    parser: Callable[[], AnswerParser]
    thinks: bool = False


def new_call_id() -> str:
    """A fresh id of a call."""
    return f"call_{secrets.token_hex(12)}"


async def prepare(
    service: Service,
    conversation: Conversation,
    body: Generation,
    *,
    max_tokens: int | None,
    logprobs: int = 0,
    tenant: str,
    param: str = "messages",
) -> Prepared:
    """The engine's parameters and the parser's maker; ApiError 400 for what the model or its template cannot do.

    body: the sampling fields (an endpoint that has others builds a `Generation`). max_tokens None: up to the end of the
    context. param: the field that holds the messages, for errors.
    """
    served = service.check_ready()
    prompt = await encode_conversation(served, conversation, param)
    params = request_params(
        service,
        body,
        prompt,
        max_tokens=max_tokens,
        logprobs=logprobs,
        tenant=tenant,
        param=param,
        constraint=await constraint_of(served, body),
    )
    return Prepared(params=params, parser=PlainParser)


async def encode_conversation(served: Served, conversation: Conversation, param: str = "messages") -> list[int]:
    """The prompt's token ids, tools and all; what counting tokens needs. ApiError 400 as for `prepare`."""
    if not served.tokenizer.has_chat_template:
        raise ApiError(
            400,
            f"{served.id} has no chat template; send the text to /v1/completions",
            code="no_chat_template",
            param=param,
        )
    continues = conversation.messages[-1]["role"] == "assistant"
    messages = list(conversation.messages)
    return await encode(lambda: served.tokenizer.encode_chat(messages, continue_final=continues), param)
