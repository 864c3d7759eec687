"""What a model says cannot steer a terminal."""

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarn.sampling import SamplingParams
from kvarn.serve.literal import literal, one_line
from kvarn.serve.run import RunOptions, _print

STEERING = {*map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029])}
ANY = st.text(st.characters(exclude_categories=[]) | st.sampled_from("\x1b\x9b\x07\r\x08\u202e\u2066\ud800\x7f"))


@given(ANY)
def test_no_control_character_comes_through_and_other_text_stays(text: str) -> None:
    shown = literal(text)
    assert {c for c in shown if unicodedata.category(c) in ("Cc", "Cs") or c in STEERING} <= {"\n", "\t"}
    assert literal(shown) == shown
    shown.encode()
    kept = "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cs") and c not in STEERING)
    rest = iter(shown)
    assert all(c in rest for c in kept), "what steers nothing stays, in its order"
    assert "\n" not in one_line(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "␛[2J"),
        ("a\rb\x07\x7f", "a␍b␇␡"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eabc", "\\u202eabc"),
        ("a\n\tb é 日本 \u200d😀", "a\n\tb é 日本 \u200d😀"),
    ],
)
def test_controls_become_visible(text: str, shown: str) -> None:
    assert literal(text) == shown


def test_kvarn_run_filters_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RunOptions(prompt="", system=None, raw=False, max_tokens=1, sampling=SamplingParams(), as_json=False)
    for is_terminal, shown in ((True, "␛[2J"), (False, "\x1b[2J")):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda answer=is_terminal: answer)
        monkeypatch.setattr(sys, "stdout", out)
        _print("\x1b[2J", options)
        assert out.getvalue() == shown
