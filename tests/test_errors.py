"""The exception tree is the one its docstring draws."""

import kvarn.errors as errors
from kvarn.errors import ContextOverflowError, KvarnError, SealError


def test_every_exception_is_exported_drawn_and_one_of_ours() -> None:
    own = {name for name, x in vars(errors).items() if isinstance(x, type) and issubclass(x, Exception)}
    assert own == set(errors.__all__)
    drawing = errors.__doc__ or ""
    for name in own:
        assert issubclass(getattr(errors, name), KvarnError)
        assert name in drawing, f"{name} is missing from the drawing"


def test_usage_errors_leave_with_2_and_the_others_with_1() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert kind.exit_code == (2 if issubclass(kind, errors.UsageError) else 1)


def test_a_seal_error_names_layer_head_and_the_way_out() -> None:
    text = str(SealError("why", layer=3, kv_head=1))
    assert "layer 3" in text
    assert "kv head 1" in text
    assert "why" in text
    assert "--kv-cache-dtype exact" in text


def test_a_context_overflow_holds_both_numbers() -> None:
    text = str(ContextOverflowError(num_prompt_tokens=4097, context=4096))
    assert "4097" in text
    assert "4096" in text
