"""What every endpoint makes of a chat request, and what the engine and the answer's parser make of that.

An endpoint converts its body to a `Conversation` and its sampling fields to a `Generation`, calls `prepare`, submits
`Prepared.params`, and runs every answer's text through a parser of `Prepared.parser` (`answer.progress` does).
"""

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvarn.request import RequestParams
from kvarn.serve.http.binding import binding
from kvarn.serve.http.errors import ApiError
from kvarn.serve.http.params import encode, request_params
from kvarn.serve.http.parts import AnswerParser, PlainParser
from kvarn.serve.http.schema import Generation
from kvarn.serve.http.service import Served, Service
from kvarn.serve.toolcalls.answers import AnswerReader
from kvarn.serve.toolcalls.grammar import Signature
from kvarn.serve.toolcalls.harmony import HarmonyReader
from kvarn.serve.toolcalls.learn import ChatFormat
from kvarn.serve.toolcalls.messages import for_template
from kvarn.serve.toolcalls.thinking import check_variables, effort_variables, thought_state


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
    form = await _check(served, conversation, param)
    prompt = await encode_conversation(served, conversation, param)
    reads_calls = bool(conversation.tools) and conversation.tool_choice != "none"
    marks = form.call_marks * reads_calls + form.thought_marks
    last = conversation.messages[-1]
    continued = last["content"] if last["role"] == "assistant" else None
    state = thought_state(form, served.tokenizer.spell(prompt[-_TAIL:]), continued)
    choice = conversation.tool_choice
    constraint = await binding(
        served,
        form,
        body,
        [
            Signature(name=tool.name, parameters=tool.parameters or _NO_PARAMETERS, strict=tool.strict)
            for tool in conversation.tools
            if not isinstance(choice, Named) or tool.name == choice.name
        ],
        must_call=choice == "required" or isinstance(choice, Named),
        may_call=reads_calls,
        several=conversation.parallel and not isinstance(choice, Named),
        state=state,
    )
    params = request_params(
        service,
        body,
        prompt,
        max_tokens=max_tokens,
        logprobs=logprobs,
        tenant=tenant,
        param=param,
        constraint=constraint,
        shown=served.tokenizer.special_in("\0".join(marks)),
    )
    parser = _parser(form, conversation, state == "within", reads_calls)
    return Prepared(params=params, parser=parser, thinks=form.thinks)


_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_TAIL = 32  # tokens at the end of a prompt, among which the beginning of a thought would be


def _parser(
    form: ChatFormat, conversation: Conversation, opened: bool, reads_calls: bool
) -> Callable[[], AnswerParser]:
    if form.harmony:
        return functools.partial(HarmonyReader, parallel=conversation.parallel, new_id=new_call_id)
    if not reads_calls and form.thoughts is None:
        return PlainParser
    return functools.partial(
        AnswerReader,
        thoughts=form.thoughts,
        opened=opened,
        syntax=form.syntax if reads_calls else None,
        functions={tool.name: tool.parameters or {} for tool in conversation.tools},
        parallel=conversation.parallel,
        new_id=new_call_id,
    )


async def _check(served: Served, conversation: Conversation, param: str) -> ChatFormat:
    """The model's format; ApiError 400 for what does not go together, or not with this model."""
    if not served.tokenizer.has_chat_template:
        raise ApiError(
            400,
            f"{served.id} has no chat template; send the text to /v1/completions",
            code="no_chat_template",
            param=param,
        )
    form = await encode(lambda: served.tokenizer.chat_format, param)
    names = [tool.name for tool in conversation.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(
            400, f"two tools are named {twice!r}; give each a name of its own", code="invalid_value", param="tools"
        )
    if names and form.no_tools:
        raise ApiError(400, f"{served.id} cannot call functions: {form.no_tools}", code="no_tools", param="tools")
    choice = conversation.tool_choice
    if choice == "required" and not names:
        raise ApiError(
            400, "tool_choice is required, but there are no tools", code="invalid_value", param="tool_choice"
        )
    if isinstance(choice, Named) and choice.name not in names:
        raise ApiError(
            400,
            f"tool_choice names {choice.name!r}, which is not among the tools",
            code="invalid_value",
            param="tool_choice",
        )
    last = conversation.messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise ApiError(
            400, "the last message has calls without their results; add these", code="invalid_value", param=param
        )
    return form


async def encode_conversation(served: Served, conversation: Conversation, param: str = "messages") -> list[int]:
    """The prompt's token ids, tools and all; what counting tokens needs. ApiError 400 as for `prepare`."""
    form = await _check(served, conversation, param)
    thinking, known = conversation.thinking, served.tokenizer.variables
    await encode(lambda: check_variables(known, thinking.variables), "chat_template_kwargs")
    own = await encode(lambda: effort_variables(form, known, thinking.effort), "reasoning_effort")
    variables = own | dict(thinking.variables)
    messages, tools = for_template(
        conversation.messages, [_described(tool) for tool in conversation.tools], form, parallel=conversation.parallel
    )
    continues = messages[-1]["role"] == "assistant"
    return await encode(
        lambda: served.tokenizer.encode_chat(messages, continue_final=continues, tools=tools, variables=variables),
        param,
    )


def _described(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it."""
    parameters = {**_NO_PARAMETERS, **(tool.parameters or {})}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}
