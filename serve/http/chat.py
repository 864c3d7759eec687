"""POST /v1/chat/completions: a conversation in, its next message out."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from kvarn.serve.http.answer import Answer, Progress, Token, respond
from kvarn.serve.http.conversation import Conversation, Named, Thinking, Tool, ToolChoice, prepare
from kvarn.serve.http.params import check_model
from kvarn.serve.http.parts import CallArguments, CallStart, Part, Text, Thought
from kvarn.serve.http.schema import ChatBody
from kvarn.serve.http.service import Service
from kvarn.serve.http.tool_schema import ToolBody


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """OpenAI's chat.completion objects."""

    model: str
    logprobs: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """See kvarn.serve.http.answer.Form."""
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        """See kvarn.serve.http.answer.Form."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.finish_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """See kvarn.serve.http.answer.Form."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, progress: Progress) -> list[dict[str, Any]]:
        """See kvarn.serve.http.answer.Form."""
        deltas = [_delta(part) for part in progress.parts]
        if not deltas and (progress.tokens or progress.finish_reason is not None):
            deltas.append({})
        choices: list[dict[str, Any]] = [
            {"index": progress.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices:
            choices[0]["logprobs"] = self._logprobs(progress.tokens) if progress.tokens else None
            choices[-1]["finish_reason"] = progress.finish_reason
        return choices

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {**_entry(token.text, token.logprob), "top_logprobs": [_entry(*top) for top in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _entry(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text)}


def tools_of(tools: Sequence[ToolBody]) -> list[Tool]:
    """The tools of a body in the form that all endpoints share."""
    return [
        Tool(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            strict=tool.function.strict,
        )
        for tool in tools
    ]


def _conversation(body: ChatBody) -> Conversation:
    choice = body.tool_choice
    return Conversation(
        messages=[message.for_template for message in body.messages],
        tools=tools_of(body.tools),
        tool_choice=Named(choice.removeprefix("=")) if choice.startswith("=") else cast(ToolChoice, choice),
        parallel=body.parallel_tool_calls,
        thinking=Thinking(effort=body.reasoning_effort, variables=body.chat_template_kwargs),
    )


async def chat(service: Service, request: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    served = service.check_ready()
    check_model(served, body.model)
    service.check_room()
    prepared = await prepare(
        service,
        _conversation(body),
        body,
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        logprobs=body.top_logprobs or 0,
        tenant=request.state.tenant,
    )
    form = ChatForm(model=served.id, logprobs=body.logprobs)
    usage = body.stream_options is not None and body.stream_options.include_usage
    return await respond(
        service,
        request,
        [prepared.params],
        form,
        stream=body.stream,
        usage=usage,
        parser=prepared.parser,
        thinks=prepared.thinks,
    )
