"""Whether and how a model thinks: as variables of the chat template, and whether an answer begins with a thought."""

from collections.abc import Iterable
from typing import Any, Literal

from kvarn.errors import UsageError
from kvarn.serve.toolcalls.learn import ChatFormat

_SWITCHES = ("enable_thinking", "thinking")  # variables that are true or false
_LEVEL = "reasoning_effort"
_LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}  # templates know low, medium and high


def check_variables(known: frozenset[str], asked: Iterable[str]) -> None:
    """UsageError for variables that the chat template does not read; `known` are those that it does."""
    unknown = sorted(set(asked) - known)
    if unknown:
        names = ", ".join(sorted(known)) or "none at all"
        raise UsageError(f"this model's chat template has no variable {unknown[0][:64]!r}; it has {names}")


def effort_variables(form: ChatFormat, known: frozenset[str], effort: str | None) -> dict[str, Any]:
    """The chat template's variables for an effort; UsageError for one that nothing in it can bring about."""
    if effort is None:
        return {}
    switches = [name for name in _SWITCHES if name in known]
    if effort in ("none", "minimal") and switches:
        return dict.fromkeys(switches, False)
    if effort == "none":
        if not form.thinks:
            return {}  # which is what it does
        raise UsageError("this model's chat template cannot switch thoughts off; leave reasoning_effort out")
    level = {_LEVEL: _LEVELS.get(effort, effort)} if _LEVEL in known else {}
    if not level and not switches:
        why = "has no variable that steers how much it thinks" if form.thinks else "does not make it think"
        raise UsageError(f"reasoning_effort is not possible: this model's chat template {why}; leave it out")
    return level | dict.fromkeys(switches, True)


ThoughtState = Literal["free", "within", "over"]
"""An answer may begin with a thought, begins within one, or begins after it."""


def thought_state(form: ChatFormat, tail: str, continued: str | None) -> ThoughtState:
    """Where a prompt leaves the model's thoughts. tail: its end. continued: the text that the answer continues, if it
    does."""
    if form.thoughts is None:
        return "over"
    text = (tail if continued is None else continued).rstrip()
    _, opened, after = text.rpartition(form.thoughts.open)
    if opened and (not after if continued is None else form.thoughts.close not in after):
        return "within"
    return "over" if continued or text.endswith(form.thoughts.close) else "free"
