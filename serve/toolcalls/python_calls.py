"""Calls that are written as Python: `[f(x=1), g(y="a")]`."""

import ast
import json
from collections.abc import Iterable

from kvarn.serve.toolcalls.calls import Calls
from kvarn.serve.toolcalls.scan import Mismatch, Reading, Source
from kvarn.serve.toolcalls.syntax import PythonCalls


def read_python(source: Source, calls: Calls, syntax: PythonCalls, *, bare: bool) -> Reading[None]:
    """Python calls with keyword arguments, known when the last one is whole."""
    if not bare:
        yield from source.expect(syntax.begin)
    text = yield from _python_text(source, "" if bare else syntax.end)
    found = _python_calls(text, calls.functions)
    if bare and not all(name in calls.functions for name, _ in found):
        raise Mismatch
    for name, arguments in found:
        calls.start(name)
        calls.arguments(arguments)
    source.forget()


def _python_text(source: Source, end: str) -> Reading[str]:
    """Up to `end` outside of strings, or up to the bracket that closes the first one."""
    start, depth, quote = source.at, 0, ""
    while char := (yield from source.peek()):
        if quote:
            if char == "\\":
                source.at += yield from source.need(2)
            elif char == quote:
                quote = ""
        elif end and char == end[0]:
            before = source.at
            if (yield from source.accept(end)):
                return source.text[start:before]
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
        source.at += 1
        if not end and depth == 0 and not quote and char in ")]":
            return source.text[start : source.at]
    raise Mismatch


def _python_calls(text: str, known: Iterable[str]) -> list[tuple[str, str]]:
    body = text.strip()
    odd: dict[str, str] = {}  # names that Python could not read
    for name in known:
        if not all(word.isidentifier() for word in name.split(".")):
            odd[f"kvarn_{len(odd)}_"] = name
            body = body.replace(f"{name}(", f"kvarn_{len(odd) - 1}_(")
    found = _parsed(body)
    for word, name in odd.items():
        found = [(a.replace(word, name), b.replace(word, name)) for a, b in found]
    return found


def _parsed(body: str) -> list[tuple[str, str]]:
    try:
        tree = ast.parse(body if body.startswith("[") else f"[{','.join(body.splitlines())}]", mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise Mismatch
        return [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Mismatch from None


class _Constants(ast.NodeTransformer):
    """JSON's names for true, false and null are taken too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known: dict[str, bool | None] = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise Mismatch
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Mismatch
        arguments[keyword.arg] = ast.literal_eval(_Constants().visit(keyword.value))
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)
