"""What a chat's answer is bound to: a form that was asked for, calls that must come or must not, thoughts before it."""

from collections.abc import Sequence

from kvarn.constraint import ConstraintMaker
from kvarn.serve.http.errors import ApiError
from kvarn.serve.http.params import constraint_of, encode
from kvarn.serve.http.schema import Generation
from kvarn.serve.http.service import Served
from kvarn.serve.toolcalls.grammar import Marks, Signature, calls, no_calls, text_or_calls, thought
from kvarn.serve.toolcalls.learn import ChatFormat
from kvarn.serve.toolcalls.paths import paths
from kvarn.serve.toolcalls.thinking import ThoughtState


async def binding(
    served: Served,
    form: ChatFormat,
    body: Generation,
    functions: Sequence[Signature],
    *,
    must_call: bool,
    may_call: bool,
    several: bool,
    state: ThoughtState,
) -> ConstraintMaker | None:
    """The constraint of a chat's answers, built beside the event loop; ApiError 400 for what cannot be met.

    functions: those that may be called, or with `may_call` false those that the model knows. A form that the body asks
    for binds what is said, not the calls. state: where the prompt leaves the model's thoughts.
    """
    answer = await constraint_of(served, body)
    strict = may_call and any(function.strict for function in functions)
    forbidden = bool(functions) and not may_call
    if form.harmony and (answer is not None or must_call or strict):
        raise ApiError(
            400,
            f"{served.id} answers in messages of several channels, where neither calls nor a form can be enforced; "
            "leave out response_format, regex, grammar, strict, and tool_choice but auto and none",
            code="unsupported_parameter",
            param="tool_choice" if must_call else "tools" if strict else "response_format",
        )
    if form.harmony or (answer is None and not (must_call or strict or forbidden)):
        return None

    def build() -> ConstraintMaker | None:
        choices = [[answer]] if answer is not None and not must_call else []
        if functions:
            marks = Marks(special=served.tokenizer.special_tokens)
            if must_call or (may_call and answer is not None):
                text = calls(form.syntax, functions, marks, several=several)
                choices.append([lark(text, what="the parameters of the tools")])
            elif strict:
                text = text_or_calls(form.syntax, functions, marks, several=several)
                choices.append([lark(text, what="the parameters of the tools")])
            elif answer is None and (none := no_calls(form.syntax, marks)) is not None:
                choices.append([lark(none)])
        if not choices:
            return None
        if form.thoughts is None or state == "over":
            return paths(*choices)
        marks = Marks(special=served.tokenizer.special_tokens)
        first = lark(thought(form.thoughts, marks, opened=state == "within"))
        return paths(*([first, *choice] for choice in choices), *(choices if state == "free" else []))

    lark = served.structured.lark
    return await encode(build, "tools" if functions else "response_format")
