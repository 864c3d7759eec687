"""How much to think, for endpoints whose clients ask for it whatever the model is."""

from kvarn.errors import UsageError
from kvarn.serve.tokenizer import Tokenizer
from kvarn.serve.toolcalls.thinking import effort_variables


def effort_for(tokenizer: Tokenizer, effort: str | None) -> str | None:
    """The effort to ask for: None where the chat template has no variable for it, so that it could change nothing.

    Only to switch off thoughts that cannot be switched off is left to be refused.
    """
    form = tokenizer.chat_format
    if effort is None or (effort == "none" and form.thinks):
        return effort
    try:
        return effort if effort_variables(form, tokenizer.variables, effort) else None
    except UsageError:
        return None


def effort_on(tokenizer: Tokenizer) -> str | None:
    """The effort that switches thoughts on, where they can be switched; else it is the template that decides."""
    try:
        switches = effort_variables(tokenizer.chat_format, tokenizer.variables, "none")
    except UsageError:
        return None
    return "medium" if switches else None
