"""What a chat template can do with tools and thoughts is found by rendering samples with it."""

import dataclasses
from typing import Any

import pytest
from chat_templates import (
    DEEPSEEK,
    DEEPSEEK_TAGS,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LFM,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    MISTRAL_NAMED,
    OPENED,
    PLAIN,
    QWEN3,
    QWEN_CODER,
    REFUSES_SYSTEM,
    TemplateText,
)

from kvarn.serve.toolcalls.learn import FALLBACK, learn
from kvarn.serve.toolcalls.syntax import (
    JsonCalls,
    NamedCalls,
    PythonCalls,
    QuotedCalls,
    TaggedCalls,
    ThoughtMarks,
    triggers,
)

HERMES_CALLS = JsonCalls(begin="<tool_call>\n", end="\n</tool_call>", lead="\n")


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (HERMES, HERMES_CALLS),
        (QWEN3, HERMES_CALLS),
        (LLAMA3, JsonCalls(begin="<|python_tag|>", bare=True, arguments="parameters")),
        (MISTRAL, JsonCalls(begin="[TOOL_CALLS] ", listed=True)),
        (MISTRAL_NAMED, NamedCalls(open="[TOOL_CALLS]", separator="[CALL_ID]", id_end="[ARGS]")),
        (
            DEEPSEEK,
            NamedCalls(
                wrap="<｜tool▁calls▁begin｜>",
                open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                separator="\n```json\n",
                close="```<｜tool▁call▁end｜>",
                unwrap="<｜tool▁calls▁end｜>",
            ),
        ),
        (
            QWEN_CODER,
            TaggedCalls(
                open="<tool_call>\n<function=",
                name_end=">",
                key_open="<parameter=",
                key_end=">\n",
                value_end="\n</parameter>",
                close="</function>\n</tool_call>",
                lead="\n",
            ),
        ),
        (
            GLM,
            TaggedCalls(
                open="<tool_call>",
                name_end="",
                key_open="<arg_key>",
                key_end="</arg_key>\n<arg_value>",
                value_end="</arg_value>",
                close="</tool_call>",
                lead="\n",
            ),
        ),
        (
            DEEPSEEK_TAGS,
            TaggedCalls(
                wrap="<｜DSML｜function_calls>",
                open='<｜DSML｜invoke name="',
                name_end='">',
                key_open='<｜DSML｜parameter name="',
                key_end='"',
                value_end="</｜DSML｜parameter>",
                close="</｜DSML｜invoke>",
                unwrap="</｜DSML｜function_calls>",
                lead="\n\n",
                typed=' string="true">',
            ),
        ),
        (GEMMA, QuotedCalls(open="<|tool_call>call:", quote='<|"|>', close="<tool_call|>")),
        (LLAMA4, PythonCalls(bare=True)),
    ],
    ids=[
        "hermes",
        "qwen3",
        "llama3",
        "mistral",
        "mistral_named",
        "deepseek",
        "qwen_coder",
        "glm",
        "deepseek_tags",
        "gemma",
        "llama4",
    ],
)
def test_the_syntax_of_calls(template: str, syntax: Any) -> None:
    form = learn(TemplateText(template))
    assert form.native
    assert form.syntax == syntax


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        (HERMES, {"arguments_as_text": False, "empty": None, "short_ids": False, "calls_alone": False}),
        (MISTRAL, {"short_ids": True}),
        (MISTRAL_NAMED, {"short_ids": True, "thoughts": ThoughtMarks(open="[THINK]", close="[/THINK]")}),
        (DEEPSEEK, {"arguments_as_text": True, "calls_alone": True}),
        (QWEN3, {"thoughts": ThoughtMarks(open="<think>", close="</think>"), "thinks": True}),
        (HARMONY, {"harmony": True, "thought_field": "thinking", "thinks": True}),
        (PLAIN, {"native": False, "no_tools": "", "syntax": FALLBACK, "thinks": False}),
        (OPENED, {"native": False, "no_tools": "", "syntax": FALLBACK, "thinks": True}),
    ],
    ids=["hermes", "mistral", "mistral_named", "deepseek", "qwen3", "harmony", "plain", "opened"],
)
def test_what_the_template_wants(template: str, fields: dict[str, Any]) -> None:
    form = learn(TemplateText(template))
    assert {name: getattr(form, name) for name in fields} == fields


def test_a_template_that_lists_tools_and_leaves_calls_to_the_text() -> None:
    form = learn(TemplateText(LFM))
    assert form.native
    assert not form.writes_calls
    assert form.syntax == PythonCalls(begin="<|tool_call_start|>", end="<|tool_call_end|>")
    granite = learn(TemplateText(LFM.replace("List of tools: <|tool_list_start|>", "Write <|tool_call|>")))
    assert granite.syntax == JsonCalls(begin="<|tool_call|>", listed=True)
    assert not granite.writes_calls
    deaf = LFM.replace("m.role == 'tool' %}{{", "m.role == 'tool' %}{{ raise_exception('no') }}{{")
    assert not learn(TemplateText(deaf)).native


def test_a_template_that_can_be_told_of_no_tools_says_why() -> None:
    assert "System role not supported" in learn(TemplateText(REFUSES_SYSTEM)).no_tools
    drops = PLAIN.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}")
    assert "drops system messages" in learn(TemplateText(drops)).no_tools


def test_a_template_that_lists_tools_and_loses_calls_is_not_trusted_with_them() -> None:
    lists = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
    form = learn(TemplateText(lists))
    assert not form.native
    assert form.syntax is FALLBACK


def test_calls_that_cannot_be_read_back_are_not_learned() -> None:
    odd = HERMES.replace('{"name": "\' + call.name + \'", "arguments": ', '(" + call.name + " of )')
    assert odd != HERMES
    form = learn(TemplateText(odd))
    assert not form.native
    quoted = GEMMA.replace("'<|\"|>' + value + '<|\"|>'", "'\"' + value + '\"'")
    assert quoted != GEMMA
    assert not learn(TemplateText(quoted)).native


def test_an_empty_thought_before_a_call_is_no_part_of_its_mark() -> None:
    first = "{% if loop.first %}{{ '<think>\n</think>' }}{% endif %}{{ '\n<tool_call>"
    thinks = HERMES.replace("{{ '\n<tool_call>", first)
    assert thinks != HERMES
    form = learn(TemplateText(thinks))
    assert isinstance(form.syntax, JsonCalls)
    assert form.syntax.begin == "<tool_call>\n"


def test_marks_that_begin_as_other_marks_do_are_whole() -> None:
    alike = HERMES.replace("'\n' + m.content", "'<tool_none>' + m.content").replace(
        "{{ '\n<tool_call>", "{{ '<tool_call>"
    )
    assert alike.count("<tool_none>") == 1
    form = learn(TemplateText(alike))
    assert isinstance(form.syntax, JsonCalls)
    assert form.syntax.begin == "<tool_call>\n"


def test_a_template_that_fails_on_anything_is_survived() -> None:
    form = learn(TemplateText("{{ raise_exception('no') }}"))
    assert not form.native
    assert "no" in form.no_tools
    assert learn(TemplateText("")).no_tools


def test_marks_are_all_texts_that_calls_and_thoughts_stand_between() -> None:
    form = learn(TemplateText(MISTRAL_NAMED))
    assert {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"} <= set(form.call_marks)
    assert form.thought_marks == ("[THINK]", "[/THINK]")
    assert "<|channel|>" in learn(TemplateText(HARMONY)).thought_marks
    assert dataclasses.replace(form, thoughts=None).thought_marks == ()


def test_a_call_is_recognized_by_its_first_words() -> None:
    assert triggers(HERMES_CALLS) == ("<tool_call>",)
    assert triggers(learn(TemplateText(DEEPSEEK)).syntax) == (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    )
    assert triggers(PythonCalls(bare=True)) == ()
