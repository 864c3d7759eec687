"""Parts of an answer, put together."""

from kvarn.serve.http.parts import Call, CallArguments, CallStart, Collected, PlainParser, Text, Thought


def test_parts_come_together_as_one_answer() -> None:
    whole = Collected()
    parts = [
        Thought("H"),
        Thought("m."),
        Text("Well"),
        CallStart(0, "a", "look"),
        CallArguments(0, '{"x"'),
        CallStart(1, "b", "wait"),
        CallArguments(0, ": 1}"),
        Text("."),
    ]
    for part in parts:
        whole.add(part)
    calls = [Call(id="a", name="look", arguments='{"x": 1}'), Call(id="b", name="wait")]
    assert whole == Collected(text="Well.", thought="Hm.", calls=calls)


def test_without_a_format_everything_is_text() -> None:
    parser = PlainParser()
    assert parser.add("<think>a") == [Text("<think>a")]
    assert parser.add("") == parser.finish() == []
    assert not parser.in_thought
