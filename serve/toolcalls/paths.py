"""A constraint made of others: an answer takes one of several paths, each a row of constraints one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.constraint import Constraint, ConstraintMaker


@dataclass(kw_only=True)
class _Place:
    """Where one path is: within a constraint, before those of `rest`."""

    now: Constraint
    rest: Sequence[ConstraintMaker]
    mask: bytes = b""


class Paths:
    """See kvarn.constraint.Constraint. As long as the answer fits several paths, it may go on along any of them."""

    def __init__(self, paths: Sequence[Sequence[ConstraintMaker]]) -> None:
        self._places: list[_Place] = []
        for path in paths:
            self._enter(path)

    def _enter(self, path: Sequence[ConstraintMaker]) -> None:
        self._keep(_Place(now=path[0](), rest=path[1:]))

    def _keep(self, place: _Place) -> None:
        place.mask = place.now.allowed()
        self._places.append(place)
        if place.rest and place.now.may_end:
            self._enter(place.rest)

    def allowed(self) -> bytes:
        """See kvarn.constraint.Constraint."""
        if len(self._places) == 1:
            return self._places[0].mask
        size = max(len(place.mask) for place in self._places)
        union = 0
        for place in self._places:
            union |= int.from_bytes(place.mask, "little")
        return union.to_bytes(size, "little")

    def accept(self, token: int) -> None:
        """See kvarn.constraint.Constraint."""
        places, self._places = self._places, []
        for place in places:
            if token // 8 < len(place.mask) and place.mask[token // 8] >> token % 8 & 1:
                place.now.accept(token)
                self._keep(place)

    @property
    def may_end(self) -> bool:
        """See kvarn.constraint.Constraint."""
        return any(not place.rest and place.now.may_end for place in self._places)


def paths(*choices: Sequence[ConstraintMaker]) -> ConstraintMaker:
    """Makes such a constraint; itself, where there is but one in one path."""
    if len(choices) == 1 and len(choices[0]) == 1:
        return choices[0][0]
    return lambda: Paths(choices)
