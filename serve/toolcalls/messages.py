"""A conversation's messages as a model's chat template takes them; where it knows no tools, as texts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.serve.tokenizer import JsonText, MarkedText
from kvarn.serve.toolcalls.learn import FALLBACK, ChatFormat
from kvarn.serve.toolcalls.syntax import CallSyntax, JsonCalls, PythonCalls

_INTRODUCTION = """\
You can call functions. They are listed here, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as a JSON object between these marks:
{begin}{{"name": "NAME", "arguments": {{"ARGUMENT": VALUE}}}}{end}
{several}Then stop: the results follow in the next message, between <tool_response> and </tool_response>."""
_SEVERAL = "Several calls may follow each other, each between marks of its own. "
_ONE = "Make one call at a time. "


def for_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: ChatFormat, *, parallel: bool
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """(messages, tools) to render. Calls have their arguments as JSON text (kvarn.serve.http.conversation)."""
    named = _with_names(messages)
    if form.native:
        return [_native(message, form) for message in named], list(tools)
    plain = _joined([_plain(message) for message in named])
    return (_with_tools(plain, tools, parallel=parallel) if tools else plain), []


def _with_names(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results know the name of their function, which some templates write."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        own = dict(message)
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if own["role"] == "tool" and own.get("tool_call_id") in names:
            own.setdefault("name", names[own["tool_call_id"]])
        found.append(own)
    return found


# A template that knows tools.


def _native(message: dict[str, Any], form: ChatFormat) -> dict[str, Any]:
    thought = message.pop("reasoning_content", None)
    if thought:
        message[form.thought_field] = thought
    if message.get("tool_calls") and not form.writes_calls:
        message["content"] = written(message.get("content") or "", message.pop("tool_calls"), form.syntax)
    elif message.get("tool_calls"):
        message["tool_calls"] = [_native_call(call, form) for call in message["tool_calls"]]
        message["content"] = form.empty if form.calls_alone else message.get("content") or form.empty
    if "tool_call_id" in message:
        message["tool_call_id"] = _id(message["tool_call_id"], form)
    return message


def _native_call(call: Mapping[str, Any], form: ChatFormat) -> dict[str, Any]:
    text = call["function"]["arguments"].strip() or "{}"
    arguments: Any = text if form.arguments_as_text else JsonText(text, _value(text))
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": _id(call["id"], form), "type": "function", "function": function}


def written(content: str, calls: Sequence[Mapping[str, Any]], syntax: CallSyntax) -> MarkedText:
    """A message's text with its calls, as the model writes them: a list between two marks."""
    assert isinstance(syntax, JsonCalls | PythonCalls)
    texts = [_written_call(call["function"]["name"], call["function"]["arguments"], syntax) for call in calls]
    return MarkedText((content, syntax.begin, f"[{', '.join(texts)}]", syntax.end))


def _written_call(name: str, arguments: str, syntax: JsonCalls | PythonCalls) -> str:
    text = arguments.strip() or "{}"
    if isinstance(syntax, JsonCalls):
        return f"{{{json.dumps(syntax.name)}: {json.dumps(name)}, {json.dumps(syntax.arguments)}: {text}}}"
    value = _value(text)
    if not isinstance(value, dict):
        return f"{name}({text})"
    return f"{name}({', '.join(f'{key}={_python(x)}' for key, x in value.items())})"


def _python(value: Any) -> str:
    """A JSON value as Python, with strings in JSON's quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_python(x) for x in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _value(text: str) -> Any:
    """The object that a JSON text says; the text itself where the model wrote something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _id(call_id: str, form: ChatFormat) -> str:
    """Ids of other makers, for templates that take nine letters and digits alone."""
    if not form.short_ids or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


# A template that knows none.


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.pop("tool_calls", None) or ()
    if not calls and message.get("content") is not None:
        return message
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        arguments = call["function"]["arguments"].strip() or "{}"
        texts.append(f'{FALLBACK.begin}{{"name": {name}, "arguments": {arguments}}}{FALLBACK.end}')
    return message | {"content": FALLBACK.lead.join(texts)}


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours that are both of the user as one message: results are the user's here, and many templates want
    turns."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user" and message.get("name") == joined[-1].get("name"):
            joined[-1] = joined[-1] | {"content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(
        tools=lines, begin=FALLBACK.begin, end=FALLBACK.end, several=_SEVERAL if parallel else _ONE
    )
    if messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
