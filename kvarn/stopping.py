"""Stop strings in streamed text: found across token borders, never shown in part."""


class StopStrings:
    """Text in, safe text out: what could still be the beginning of a stop string is held back.

    found: whether a stop string was whole; match: which one.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False
        self.match = ""

    def add(self, text: str) -> str:
        """The text that is certain now. Once a stop string is whole, `found` is set and the text ends before it."""
        if self.found:
            return ""
        text = self._held + text
        places = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if places:
            place, self.match = min(places)
            self.found = True
            self._held = ""
            return text[:place]
        keep = max(_overlap(text, stop) for stop in self._stop) if self._stop else 0
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What is still held back, now that no more text comes."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
