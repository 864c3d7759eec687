"""Text of a model or a file, made safe for a terminal: it is shown literally and cannot steer it."""

_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_CODES = [*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, *range(0xD800, 0xE000)]
_VISIBLE = {**_PICTURES, 0x7F: "\u2421"} | {c: f"\\x{c:02x}" if c < 0x100 else f"\\u{c:04x}" for c in _CODES}


def literal(text: str) -> str:
    """The text with everything that could steer a terminal in a visible form; line breaks and tabs stay.

    C0 controls and DEL become their pictures (ESC is \N{SYMBOL FOR ESCAPE}); C1 controls, bidirectional embeddings,
    overrides and isolates, line separators and halves of surrogate pairs become escapes such as \\x9b and \\u202e.
    """
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """The same in one line, for messages and errors."""
    return literal(" ".join(text.split()))
