"""POST /v1/completions: raw prompts in, what follows them out."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvarn.serve.http.answer import Answer, Progress, Token, respond
from kvarn.serve.http.params import check_model, constraint_of, encode, request_params
from kvarn.serve.http.parts import Text
from kvarn.serve.http.schema import CompletionBody
from kvarn.serve.http.service import Service


@dataclass(frozen=True, kw_only=True)
class CompletionForm:
    """OpenAI's text_completion objects. `echoes`: per prompt, the text that its answers begin with."""

    model: str
    n: int
    echoes: Sequence[str] | None
    logprobs: int | None
    offsets: dict[int, int] = field(default_factory=dict)  # per answer: characters of its tokens so far
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """See kvarn.serve.http.answer.Form."""
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def whole(self, index: int, answer: Answer) -> dict[str, Any]:
        """See kvarn.serve.http.answer.Form."""
        echo = self.echoes[index // self.n] if self.echoes is not None else ""
        return self._choice(index, echo + answer.text, answer.tokens, answer.finish_reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        """See kvarn.serve.http.answer.Form."""
        return None if self.echoes is None else self._choice(index, self.echoes[index // self.n], [], None)

    def deltas(self, progress: Progress) -> list[dict[str, Any]]:
        """See kvarn.serve.http.answer.Form."""
        text = "".join(part.text for part in progress.parts if isinstance(part, Text))
        if not (text or progress.tokens or progress.finish_reason):
            return []
        return [self._choice(progress.index, text, progress.tokens, progress.finish_reason)]

    def _choice(self, index: int, text: str, tokens: Sequence[Token], finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens) if tokens else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        texts = [token.text.decode(errors="replace") for token in tokens]
        tops = []
        offsets = []
        for token, text in zip(tokens, texts, strict=True):
            top = {piece.decode(errors="replace"): logprob for piece, logprob in token.top}
            tops.append({**top, text: token.logprob})
            offsets.append(self.offsets.get(index, 0))
            self.offsets[index] = offsets[-1] + len(text)
        logprobs = [token.logprob for token in tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


async def completions(service: Service, request: Request, body: CompletionBody) -> Response:
    """Answer raw prompts."""
    served = service.check_ready()
    tokenizer = served.tokenizer
    check_model(served, body.model)
    service.check_room()
    texts = [x for x in body.prompt if isinstance(x, str)]
    encoded = iter(await encode(lambda: [tokenizer.encode(text) for text in texts], "prompt"))
    prompts = [next(encoded) if isinstance(x, str) else x for x in body.prompt]
    constraint = await constraint_of(served, body)
    params = [
        request_params(
            service,
            body,
            prompt,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs or 0,
            tenant=request.state.tenant,
            param="prompt",
            constraint=constraint,
        )
        for prompt in prompts
    ]
    echoes = [x if isinstance(x, str) else tokenizer.decode(x) for x in body.prompt] if body.echo else None
    form = CompletionForm(model=served.id, n=body.n, echoes=echoes, logprobs=body.logprobs)
    usage = body.stream_options is not None and body.stream_options.include_usage
    return await respond(service, request, params, form, stream=body.stream, usage=usage)
