"""An answer along paths of constraints: what any of them allows, one after the other."""

from typing import Any

import pytest

from kvarn.constraint import Constraint, ConstraintMaker
from kvarn.errors import ConstraintError
from kvarn.serve.toolcalls.paths import paths


class Words:
    """One of some words of letters, a letter a token (a is 0)."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.so_far = ""

    def allowed(self) -> bytes:
        mask = bytearray(1)
        for word in self.words:
            if word.startswith(self.so_far) and word != self.so_far:
                mask[0] |= 1 << ord(word[len(self.so_far)]) - 97
        return bytes(mask)

    def accept(self, token: int) -> None:
        self.so_far += chr(97 + token)
        if not any(word.startswith(self.so_far) for word in self.words):
            raise ConstraintError("no such word")

    @property
    def may_end(self) -> bool:
        return self.so_far in self.words


def words(*texts: str) -> ConstraintMaker:
    return lambda: Words(*texts)


def language(make: ConstraintMaker, limit: int = 6) -> set[str]:
    """All whole answers."""
    found = set()

    def follow(text: str) -> None:
        constraint: Constraint = make()
        for char in text:
            constraint.accept(ord(char) - 97)
        if constraint.may_end:
            found.add(text)
        mask = constraint.allowed()
        for token in range(8):
            if mask and mask[0] >> token & 1 and len(text) < limit:
                follow(text + chr(97 + token))

    follow("")
    return found


@pytest.mark.parametrize(
    ("choices", "want"),
    [
        ([[words("ab")]], {"ab"}),
        ([[words("ab", "")]], {"ab", ""}),
        ([[words("ab"), words("c", "d")]], {"abc", "abd"}),
        ([[words("a", "ab"), words("b", "c")]], {"ab", "ac", "abb", "abc"}),
        ([[words("", "a"), words("b")]], {"b", "ab"}),
        ([[words("a", "aa", "aaa"), words("a")]], {"aa", "aaa", "aaaa"}),
        ([[words("ab")], [words("ac"), words("d")]], {"ab", "acd"}),
        ([[words("ab")], [words("ab"), words("c")]], {"ab", "abc"}),
        ([[words("a"), words("b"), words("c")]], {"abc"}),
    ],
)
def test_an_answer_is_what_any_path_makes(choices: Any, want: set[str]) -> None:
    assert language(paths(*choices)) == want


def test_one_constraint_alone_is_itself() -> None:
    one = words("a")
    assert paths([one]) is one


def test_every_answer_has_its_own_place() -> None:
    make = paths([words("a"), words("b")])
    first, second = make(), make()
    first.accept(0)
    assert first.allowed() == b"\x02"
    assert second.allowed() == b"\x01"


def test_what_no_path_allows_leaves_nothing() -> None:
    constraint = paths([words("a")], [words("b"), words("a")])()
    assert constraint.allowed() == b"\x03"
    constraint.accept(1)
    assert constraint.allowed() == b"\x01"
    assert not constraint.may_end
