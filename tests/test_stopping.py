"""A stop string is found wherever the tokens cut it, and never shown in part."""

from hypothesis import given
from hypothesis import strategies as st

from kvarn.stopping import StopStrings


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.randoms())
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(text: str, stop: list[str], cut: object) -> None:
    stops = StopStrings(tuple(stop))
    shown, rest = "", text
    while rest and not stops.found:
        size = cut.randint(1, len(rest))  # type: ignore[attr-defined]
        part, rest = rest[:size], rest[size:]
        shown += stops.add(part)
        assert text.startswith(shown)
        assert not any(s in shown for s in stop)
    ends = [i for i in range(len(text)) if any(text.startswith(s, i) for s in stop)]
    if not stops.found:
        assert not ends
        assert shown + stops.finish() == text
    else:
        # A longer stop string may begin earlier and end later than one that is whole already.
        assert len(shown) in ends
        assert text.startswith(stops.match, len(shown))
        assert stops.match in stop
        assert stops.finish() == ""


def test_a_half_finished_stop_string_comes_out_at_the_end() -> None:
    stops = StopStrings(("<end>",))
    assert stops.add("text <en") == "text "
    assert stops.finish() == "<en"


def test_nothing_comes_after_a_stop_string() -> None:
    stops = StopStrings(("stop",))
    assert stops.add("a stop b") == "a "
    assert stops.found
    assert stops.match == "stop"
    assert stops.add("more") == ""
