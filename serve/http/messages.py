"""POST /v1/messages and /v1/messages/count_tokens: a conversation in Anthropic's shape, and its next message."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvarn.serve.http.conversation import Conversation, Named, Thinking, Tool, ToolChoice, encode_conversation, prepare
from kvarn.serve.http.efforts import effort_for, effort_on
from kvarn.serve.http.errors import renamed
from kvarn.serve.http.items import respond_in_items, unseal_thought
from kvarn.serve.http.messages_events import MessageForm, message_events
from kvarn.serve.http.messages_schema import (
    CountBody,
    MessagesBody,
    MessageTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvarn.serve.http.params import check_model
from kvarn.serve.http.schema import Generation
from kvarn.serve.http.service import Service
from kvarn.serve.http.turns import call_of, joined_turns
from kvarn.serve.tokenizer import Tokenizer

BILLING = "x-anthropic-billing-header:"
"""How a block of the system prompt begins that Claude Code adds for the billing, with another number in each request.
It is left out: the model has no use for it, and it would end every prefix that the cache could reuse."""

_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def conversation_of(body: CountBody, tokenizer: Tokenizer) -> Conversation:
    """The request in the one internal form."""
    system = _text([block for block in body.system if not block.text.startswith(BILLING)])
    head = [{"role": "system", "content": system}] if system else []
    turns = [message for turn in body.messages for message in _messages(turn)]
    choice = body.tool_choice
    picked: ToolChoice = "auto"
    if choice is not None:
        picked = Named(choice.name) if choice.name is not None else _CHOICES[choice.type]
    return Conversation(
        messages=joined_turns([*head, *turns], later_system=tokenizer.chat_format.later_system),
        tools=[
            Tool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
            for tool in body.tools
        ],
        tool_choice=picked,
        parallel=choice is None or not choice.disable_parallel_tool_use,
        thinking=Thinking(effort=effort_for(tokenizer, _effort(body, tokenizer))),
    )


def _effort(body: CountBody, tokenizer: Tokenizer) -> str | None:
    kind = body.thinking.type if body.thinking is not None else None
    if kind == "disabled":
        return "none"
    return body.output_config.effort or (effort_on(tokenizer) if kind == "enabled" else None)


def _text(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _messages(turn: MessageTurn) -> Iterator[dict[str, Any]]:
    """The messages of one turn, in order."""
    texts: list[TextBlock] = []
    for block in turn.content:
        if isinstance(block, TextBlock) and turn.role != "assistant":
            texts.append(block)
            continue
        if texts:
            yield {"role": turn.role, "content": _text(texts)}
            texts = []
        match block:
            case TextBlock():
                yield {"role": "assistant", "content": block.text}
            case ThinkingBlock():
                thought = block.thinking or unseal_thought(block.signature)
                yield {"role": "assistant", "content": "", "reasoning_content": thought}
            case ToolUseBlock():
                yield call_of(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            case ToolResultBlock():
                content = "Error: " * block.is_error + _text(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            case _:  # a thought that cannot be read
                yield {"role": "assistant", "content": ""}
    if texts or not turn.content:
        yield {"role": turn.role, "content": _text(texts)}


_NAMES = {"reasoning_effort": "thinking", "response_format": "output_config.format"}


async def messages(service: Service, request: Request, body: MessagesBody) -> Response:
    """Answer a conversation."""
    served = service.check_ready()
    check_model(served, body.model)
    service.check_room()
    with renamed(_NAMES):
        prepared = await prepare(
            service,
            conversation_of(body, served.tokenizer),
            Generation.model_construct(
                model=body.model,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                stop=body.stop_sequences,
                response_format=body.output_format or body.output_config.format,
            ),
            max_tokens=body.max_tokens,
            tenant=request.state.tenant,
        )
    form = MessageForm(
        model=served.id,
        max_tokens=body.max_tokens,
        omit_thoughts=body.thinking is not None and body.thinking.display == "omitted",
    )
    return await respond_in_items(service, request, prepared, form, message_events, stream=body.stream)


async def count_tokens(service: Service, body: CountBody) -> Response:
    """How many tokens the prompt has."""
    served = service.check_ready()
    check_model(served, body.model)
    with renamed(_NAMES):
        tokens = await encode_conversation(served, conversation_of(body, served.tokenizer))
    return JSONResponse({"input_tokens": len(tokens)})
