"""POST /v1/responses, without state: items in, items out."""

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvarn.serve.http.conversation import Conversation, Thinking, prepare
from kvarn.serve.http.efforts import effort_for
from kvarn.serve.http.errors import renamed
from kvarn.serve.http.items import respond_in_items, unseal_thought
from kvarn.serve.http.params import check_model
from kvarn.serve.http.responses_events import ResponseForm, response_events
from kvarn.serve.http.responses_schema import (
    CallItem,
    CustomCallItem,
    InputItem,
    MessageItem,
    OutputItem,
    ResponsesBody,
)
from kvarn.serve.http.responses_tools import custom_arguments, flat_name, functions, origins
from kvarn.serve.http.schema import Generation
from kvarn.serve.http.service import Service
from kvarn.serve.http.turns import call_of, joined_turns
from kvarn.serve.tokenizer import Tokenizer


def conversation_of(body: ResponsesBody, tokenizer: Tokenizer) -> Conversation:
    """The request in the one internal form."""
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    turns = [message for item in body.input for message in _messages(item)]
    return Conversation(
        messages=joined_turns([*head, *turns], later_system=tokenizer.chat_format.later_system),
        tools=functions(body.tools),
        tool_choice=body.tool_choice,
        parallel=body.parallel_tool_calls,
        thinking=Thinking(effort=effort_for(tokenizer, body.reasoning.effort)),
    )


def _messages(item: InputItem) -> Iterator[dict[str, Any]]:
    """An item as a message, in the chat templates' form."""
    match item:
        case MessageItem():
            yield {"role": "system" if item.role == "developer" else item.role, "content": item.content}
        case CallItem():
            yield call_of(item.call_id, flat_name(item.namespace, item.name), item.arguments)
        case CustomCallItem():
            yield call_of(item.call_id, flat_name(item.namespace, item.name), custom_arguments(item.input))
        case OutputItem():
            yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
        case _:
            thought = item.content or unseal_thought(item.encrypted_content)
            if thought:
                yield {"role": "assistant", "content": "", "reasoning_content": thought}


_NAMES = {"reasoning_effort": "reasoning.effort", "response_format": "text.format"}


async def responses(service: Service, request: Request, body: ResponsesBody) -> Response:
    """Answer a conversation."""
    served = service.check_ready()
    check_model(served, body.model)
    service.check_room()
    with renamed(_NAMES):
        prepared = await prepare(
            service,
            conversation_of(body, served.tokenizer),
            Generation.model_construct(
                model=body.model, temperature=body.temperature, top_p=body.top_p, response_format=body.text.format
            ),
            max_tokens=body.max_output_tokens,
            tenant=request.state.tenant,
            param="input",
        )
    form = ResponseForm(body=body, model=served.id, origins=origins(body.tools))
    return await respond_in_items(service, request, prepared, form, response_events, stream=body.stream)
