"""Efforts as variables of a template, and where a prompt leaves the thoughts."""

from typing import Any

import pytest

from kvarn.errors import UsageError
from kvarn.serve.toolcalls.learn import ChatFormat
from kvarn.serve.toolcalls.syntax import ThoughtMarks
from kvarn.serve.toolcalls.thinking import check_variables, effort_variables, thought_state

THINK = ChatFormat(thoughts=ThoughtMarks(open="<think>", close="</think>"))
GRADED, SWITCHED = frozenset({"reasoning_effort"}), frozenset({"enable_thinking"})


@pytest.mark.parametrize(
    ("known", "effort", "want"),
    [
        (GRADED, None, {}),
        (GRADED, "minimal", {"reasoning_effort": "low"}),
        (GRADED, "medium", {"reasoning_effort": "medium"}),
        (GRADED, "max", {"reasoning_effort": "high"}),
        (SWITCHED, "none", {"enable_thinking": False}),
        (SWITCHED, "minimal", {"enable_thinking": False}),
        (SWITCHED, "low", {"enable_thinking": True}),
        (frozenset({"thinking"}), "none", {"thinking": False}),
        (GRADED | SWITCHED, "none", {"enable_thinking": False}),
        (GRADED | SWITCHED, "high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_what_an_effort_means_to_a_template(known: frozenset[str], effort: str | None, want: dict[str, Any]) -> None:
    assert effort_variables(THINK, known, effort) == want


def test_efforts_that_nothing_can_bring_about() -> None:
    assert effort_variables(ChatFormat(), frozenset(), "none") == {}
    with pytest.raises(UsageError, match="does not make it think"):
        effort_variables(ChatFormat(), frozenset(), "high")
    with pytest.raises(UsageError, match="no variable that steers"):
        effort_variables(THINK, frozenset(), "high")
    with pytest.raises(UsageError, match="cannot switch thoughts off"):
        effort_variables(THINK, GRADED, "none")


def test_variables_that_the_template_does_not_read_are_refused_with_those_that_it_does() -> None:
    check_variables(SWITCHED, ["enable_thinking"])
    with pytest.raises(UsageError, match="'colour'; it has enable_thinking"):
        check_variables(SWITCHED, ["enable_thinking", "colour"])


@pytest.mark.parametrize(
    ("tail", "continued", "state"),
    [
        ("<think> is a tag<|im_end|>\n<|im_start|>assistant\n", None, "free"),
        ("<|im_start|>assistant\n<think>\n", None, "within"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, "over"),
        ("", "<think>\nHm", "within"),
        ("", "<think>\nHm</think>", "over"),
        ("", "Well", "over"),
        ("", "", "free"),
    ],
)
def test_where_a_prompt_leaves_the_thoughts(tail: str, continued: str | None, state: str) -> None:
    assert thought_state(THINK, tail, continued) == state
    assert thought_state(ChatFormat(), tail, continued) == "over"
