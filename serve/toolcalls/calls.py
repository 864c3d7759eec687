"""Where readers put the calls that they find."""

from collections.abc import Callable, Mapping
from typing import Any

from kvarn.serve.http.parts import CallArguments, CallStart, Part
from kvarn.serve.toolcalls.scan import Mismatch

MAX_NAME = 256  # characters of a function's name; beyond that it is none


class Calls:
    """Where readers put what they find. functions: name -> the schema of its parameters.

    With `parallel` false there is one call, and all that comes after it is dropped.
    """

    def __init__(
        self, out: list[Part], functions: Mapping[str, Mapping[str, Any]], parallel: bool, new_id: Callable[[], str]
    ) -> None:
        self.functions = functions
        self.count = 0
        self.closed = False
        self._out = out
        self._parallel = parallel
        self._new_id = new_id

    def start(self, name: str) -> None:
        """A call begins."""
        if not name or len(name) > MAX_NAME:
            raise Mismatch
        self.closed = self.closed or (self.count > 0 and not self._parallel)
        if not self.closed:
            self._out.append(CallStart(self.count, self._new_id(), name))
            self.count += 1

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text and not self.closed:
            self._out.append(CallArguments(self.count - 1, text))
