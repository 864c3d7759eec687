"""Neighbours of one speaker become one turn, whatever they hold, and the rest stays as it is."""

import itertools
from typing import Any

import pytest
from chat_templates import MISTRAL, PLAIN, QWEN3, TemplateText
from hypothesis import given
from hypothesis import strategies as st

from kvarn.serve.http.turns import call_of, joined_turns
from kvarn.serve.toolcalls.learn import learn

MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text("ab")}),
    min_size=1,
    max_size=8,
)


@given(MESSAGES, st.booleans())
def test_no_neighbours_of_one_role_are_left_and_no_text_is_lost(messages: list[Any], later_system: bool) -> None:
    turns = joined_turns(messages, later_system=later_system)
    assert all(a["role"] != b["role"] or a["role"] == "tool" for a, b in itertools.pairwise(turns))
    kept = "".join(turn["content"] for turn in turns).replace("<system>", "").replace("</system>", "")
    assert kept.replace("\n", "") == "".join(message["content"] for message in messages)
    if later_system:
        assert {turn["role"] for turn in turns} == {message["role"] for message in messages}


def test_pieces_of_an_answer_are_put_together() -> None:
    pieces = [
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "Let "},
        {"role": "assistant", "content": "me."},
        call_of("a", "f", "{}"),
        call_of("b", "g", "{}"),
    ]
    (turn,) = joined_turns(pieces, later_system=True)
    assert (turn["content"], turn["reasoning_content"]) == ("Let me.", "hm")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["f", "g"]
    assert pieces[0]["content"] == "", "what came in is not changed"


def test_a_later_system_message_is_told_by_the_user_where_the_template_takes_none() -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "system", "user", "system", "assistant")]
    assert joined_turns(messages, later_system=False) == [
        {"role": "system", "content": "s\n\ns"},
        {"role": "user", "content": "u\n\n<system>\ns\n</system>"},
        {"role": "assistant", "content": "a"},
    ]
    assert [turn["role"] for turn in joined_turns(messages, later_system=True)][1:] == ["user", "system", "assistant"]


ONLY_FIRST = """\
{%- for m in messages %}
  {%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}
  {{- m.role + ': ' + m.content + '\n' }}
{%- endfor %}"""
DROPPED = """\
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "takes"), [(QWEN3, True), (PLAIN, True), (MISTRAL, False), (ONLY_FIRST, False), (DROPPED, False)]
)
def test_whether_a_template_takes_later_system_messages_is_learned(template: str, takes: bool) -> None:
    assert learn(TemplateText(template)).later_system is takes
