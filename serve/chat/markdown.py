"""Markdown as lines for a terminal, with nothing hidden and nothing that steers it; and where its last block begins."""

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions
from rich.markdown import Markdown
from rich.segment import Segment

from kvarn.serve.literal import literal

# HTML, link definitions and entities would be shown as something else, or not at all; an image is shown as a link.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_PARSER.disable(["html_block", "html_inline", "reference", "entity", "image"])
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def lines_of(console: Console, text: str) -> list[str]:
    """The text rendered for this console, one string with its colours per line, an empty one between two blocks."""
    lines: list[str] = []
    for block in _blocks(_PARSER.parse(literal(text))):
        markdown = Markdown("", hyperlinks=False, code_theme="ansi_dark")
        markdown.markup, markdown.parsed = text, block
        with console.capture() as capture:
            # One column stays free: some terminals break a full line by themselves.
            console.print(_Literal(markdown), width=max(console.width - 1, 1), end="")
        rendered = [line.rstrip() for line in capture.get().split("\n")]
        while rendered and _is_blank(rendered[-1]):
            rendered.pop()
        while rendered and _is_blank(rendered[0]):
            rendered.pop(0)
        lines += ["", *rendered] if lines else rendered
    return lines


def _blocks(tokens: list[Token]) -> Iterator[list[Token]]:
    """The tokens of each block of the top level."""
    block: list[Token] = []
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":  # a poem's lines stay lines
                child.type = "hardbreak"
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield block
            block = []


def _is_blank(line: str) -> bool:
    return not _COLOURS.sub("", line).strip()


class _Literal:
    """What something renders to, filtered once more: the last gate before the terminal."""

    def __init__(self, inner: Markdown) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._inner, options):
            if not segment.control:
                yield Segment(literal(segment.text), segment.style)


def last_block(text: str) -> int:
    """Where the last block of a growing text begins, in characters: what stands before it is finished.

    Only whole lines count, since a line that has just begun may still go on with the block before it.
    """
    whole = text[: text.rfind("\n") + 1]
    blocks = [token.map[0] for token in _PARSER.parse(whole) if token.level == 0 and token.map and token.nesting >= 0]
    if len(blocks) < 2:
        return 0
    place = 0
    for _ in range(blocks[-1]):
        place = whole.index("\n", place) + 1
    return place
