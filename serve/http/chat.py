"""POST /v1/chat/completions: a conversation in, its next message out."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvarn.serve.http.answer import Answer, Token, respond
from kvarn.serve.http.params import check_model, encode_messages, request_params
from kvarn.serve.http.schema import ChatBody
from kvarn.serve.http.service import Service


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
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.finish_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """See kvarn.serve.http.answer.Form."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, tokens: Sequence[Token], finish_reason: str | None) -> dict[str, Any]:
        """See kvarn.serve.http.answer.Form."""
        return {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {**_entry(token.text, token.logprob), "top_logprobs": [_entry(*top) for top in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _entry(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text)}


async def chat(service: Service, request: Request, body: ChatBody) -> Response:
    """Answer a conversation."""
    served = service.check_ready()
    check_model(served, body.model)
    service.check_room()
    prompt = await encode_messages(served, body.messages)
    params = request_params(
        service,
        body,
        prompt,
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        logprobs=body.top_logprobs or 0,
        tenant=request.state.tenant,
        param="messages",
    )
    form = ChatForm(model=served.id, logprobs=body.logprobs)
    usage = body.stream_options is not None and body.stream_options.include_usage
    return await respond(service, request, [params], form, stream=body.stream, usage=usage)
