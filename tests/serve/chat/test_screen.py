"""What reaches the terminal: read back by a small terminal of our own."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvarn.serve.chat.screen import Painter, PlainScreen, RichScreen

ESCAPES = re.compile(r"\x1b\[[0-9;]*[mAJ]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rich_screen(width: int = 40, height: int = 12) -> tuple[RichScreen, Terminal]:
    out = Terminal()
    console = Console(
        file=out,
        force_terminal=True,
        width=width,
        height=height,
        markup=False,
        highlight=False,
        emoji=False,
        color_system="standard",
    )
    ticks = iter(range(10**9))
    return RichScreen(console, clock=lambda: next(ticks)), out


def seen(written: str) -> list[str]:
    """The lines on an endless terminal: colours dropped, cursor up and erase done."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;]*[mAJ]|\n|\r)", written):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part == "\r" or not part or (part.endswith("m") and part.startswith("\x1b")):
            continue
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[J":
            del lines[row:]
            lines.append("")
        else:
            lines[row] += part
    return [line.rstrip() for line in lines]


def shown(text: str, size: int = 3, **kwargs: int) -> list[str]:
    """What stands on the terminal when a text came in pieces of `size` characters."""
    screen, out = rich_screen(**kwargs)
    for i in range(0, len(text), size):
        screen.text(text[i : i + size])
    screen.end()
    return seen(out.getvalue())


MARKDOWN = """# Title

Some **bold** and `code`, see [the page](http://example.org/a).
A <b>tag</b>, an entity &lt; and &#x202e;, [bold]no markup[/bold], :smile:

- one
- two

```python
x = [1, 2]
```

| a | b |
|---|---|
| 1 | 2 |

[hidden]: http://example.org/hidden
![picture](http://example.org/p.png)
"""


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_pieces_of_any_size_end_as_the_same_screen(size: int) -> None:
    lines = shown(MARKDOWN, size, width=160, height=50)
    assert lines == shown(MARKDOWN, 50, width=160, height=50)
    text = "\n".join(lines)
    assert "**" not in text
    assert "see the page (http://example.org/a)." in text
    assert "A <b>tag</b>, an entity &lt; and &#x202e;, [bold]no markup[/bold], :smile:" in text
    assert " • one" in text
    assert "x = [1, 2]" in text
    assert "[hidden]: http://example.org/hidden" in text
    assert "picture (http://example.org/p.png)" in text


def test_an_answer_longer_than_the_screen_scrolls_and_loses_nothing() -> None:
    lines = [f"line {i}" for i in range(60)]
    text = "```\n" + "\n".join(lines) + "\n```\n\nand the end\n"
    assert [line.strip() for line in shown(text, 5, height=10) if line.strip()] == [*lines, "and the end"]


def test_only_what_changed_is_written_again() -> None:
    screen, out = rich_screen()
    screen.text("a paragraph that is finished\n\nnext ")
    screen.text("line\n")
    before = len(out.getvalue())
    screen.text("more")
    assert "finished" not in out.getvalue()[before:]
    assert "more" in out.getvalue()[before:]


def test_the_painter_never_moves_above_the_screen() -> None:
    out = Terminal()
    painter = Painter(Console(file=out, force_terminal=True, width=20, height=5))
    painter.paint([str(i) for i in range(20)])
    painter.paint([f"changed {i}" for i in range(20)])
    painter.paint(["short"])
    assert all(int(up) <= 4 for up in re.findall(r"\x1b\[(\d+)A", out.getvalue()))


def test_reading_is_shown_until_the_answer_begins() -> None:
    screen, out = rich_screen()
    screen.reading(128, 300)
    assert seen(out.getvalue())[0] == "reading 128 of 300 tokens"
    screen.text("hi")
    screen.end()
    assert seen(out.getvalue()) == ["hi", ""]


def test_thinking_is_shown_until_the_answer_begins() -> None:
    screen, out = rich_screen()
    screen.thought("well, \x1b[2J")
    assert seen(out.getvalue())[0] == "thinking, 10 characters so far"
    screen.text("hi")
    screen.end()
    assert seen(out.getvalue()) == ["hi", ""]


STEERING = st.text(st.sampled_from("ab \n\t\x1b[]0;m\x07\x9b\r\x08\x7f\u202e\u2028`*_#<>&x1b;-|()!\ud800"), max_size=60)


@settings(deadline=None, max_examples=150)
@given(st.lists(STEERING, max_size=4))
def test_nothing_that_a_model_says_steers_the_terminal(pieces: list[str]) -> None:
    screen, out = rich_screen()
    for piece in pieces:
        screen.text(piece)
    screen.end()
    screen.note("".join(pieces))
    screen.error("".join(pieces))
    screen.quote("".join(pieces))
    rest = ESCAPES.sub("", out.getvalue()).replace("\r", "")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800]", rest)


@given(STEERING)
def test_plain_text_is_filtered_on_a_terminal_and_untouched_in_a_pipe(text: str) -> None:
    terminal, pipe, err = Terminal(), io.StringIO(), io.StringIO()
    for out in (terminal, pipe):
        screen = PlainScreen(out, err)
        screen.text(text)
        screen.end()
        screen.note(text)
        screen.quote(text)
    assert pipe.getvalue().removesuffix("\n") == text.removesuffix("\n")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", terminal.getvalue() + err.getvalue())
