"""The figures of `kvarn bench` as an SVG: three panels over the context, a colour a cache, a dash pattern a batch."""

import math
from typing import Any
from xml.sax.saxutils import escape

from kvarn.serve.literal import one_line

_COLOURS = ("#5b6770", "#17805f", "#b4572a", "#4a5fc1", "#8a3f8f", "#8f7a1d")
_DASHES = ("", "7 4", "2 4", "11 4 2 4")
_WIDTH, _HEIGHT = 340, 220  # of a panel's axes
_LEFT, _TOP, _GAP = 70, 70, 90
_PANELS = (
    ("prompt tokens/s", "prompt_tokens_per_s", 1.0),
    ("decode tokens/s", "decode_tokens_per_s", 1.0),
    ("KV held, MiB", "kv_bytes_held", 2.0**20),
)


def svg(report: dict[str, Any]) -> str:
    """The plot of a report of kvarn.serve.bench; bars go from the slowest run to the fastest."""
    rows = report["rows"]
    series = sorted({(r["batch"], r["cache"]) for r in rows}, key=lambda s: (s[0], _first(rows, "cache", s[1])))
    contexts = sorted({r["context"] for r in rows})
    width = _LEFT + len(_PANELS) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 60 + 18 * len(series)
    title = f"{one_line(report['model'])}, {report['dtype']} on {report['device']} ({report['backend']})"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_LEFT, 28, title, size=16, anchor="start"),
    ]
    for index, (name, key, unit) in enumerate(_PANELS):
        left = _LEFT + index * (_WIDTH + _GAP)
        parts += _panel(rows, series, contexts, left=left, name=name, key=key, unit=unit)
    for index, (batch, cache) in enumerate(series):
        y = _TOP + _HEIGHT + 60 + 18 * index
        style = _style(rows, batch, cache)
        parts.append(f'<path d="M{_LEFT} {y - 4}h40" {style}/>')
        parts.append(_text(_LEFT + 50, y, f"{cache}, batch {batch}", anchor="start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    rows: list[dict[str, Any]],
    series: list[tuple[int, str]],
    contexts: list[int],
    *,
    left: float,
    name: str,
    key: str,
    unit: float,
) -> list[str]:
    step = _tick(max(_values(r, key)[2] for r in rows) / unit)
    top = math.ceil(max(_values(r, key)[2] for r in rows) / unit / step) * step
    span = math.log2(contexts[-1] / contexts[0]) or 1.0

    def x(context: int) -> float:
        if len(contexts) == 1:
            return left + _WIDTH / 2
        return left + _WIDTH * (0.04 + 0.92 * math.log2(context / contexts[0]) / span)

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1 - value / unit / top)

    parts = [_text(left, _TOP - 14, name, anchor="start", size=14)]
    for i in range(round(top / step) + 1):
        at = y(i * step * unit)
        parts.append(f'<path d="M{left} {at:.1f}h{_WIDTH}" stroke="#dddddd"/>')
        parts.append(_text(left - 8, at + 4, f"{i * step:g}", anchor="end"))
    parts += [_text(x(context), _TOP + _HEIGHT + 20, str(context)) for context in contexts]
    parts.append(_text(left + _WIDTH / 2, _TOP + _HEIGHT + 38, "tokens of context"))
    for batch, cache in series:
        style = _style(rows, batch, cache)
        own = sorted((r for r in rows if (r["batch"], r["cache"]) == (batch, cache)), key=lambda r: int(r["context"]))
        points = [(x(r["context"]), *map(y, _values(r, key))) for r in own]
        line = " ".join(f"{px:.1f},{middle:.1f}" for px, _, middle, _ in points)
        parts.append(f'<polyline points="{line}" {style}/>')
        for px, low, middle, high in points:
            parts.append(f'<path d="M{px:.1f} {low:.1f}V{high:.1f}" stroke="{_colour(rows, cache)}"/>')
            parts.append(f'<circle cx="{px:.1f}" cy="{middle:.1f}" r="4" fill="{_colour(rows, cache)}"/>')
    return parts


def _values(row: dict[str, Any], key: str) -> tuple[float, float, float]:
    """The least, the middle and the most of a figure."""
    value = row[key]
    return (value["min"], value["median"], value["max"]) if isinstance(value, dict) else (value, value, value)


def _first(rows: list[dict[str, Any]], key: str, value: Any) -> int:
    return [row[key] for row in rows].index(value)


def _colour(rows: list[dict[str, Any]], cache: str) -> str:
    caches = list(dict.fromkeys(r["cache"] for r in rows))
    return _COLOURS[caches.index(cache) % len(_COLOURS)]


def _style(rows: list[dict[str, Any]], batch: int, cache: str) -> str:
    batches = sorted({r["batch"] for r in rows})
    dash = _DASHES[batches.index(batch) % len(_DASHES)]
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{_colour(rows, cache)}" stroke-width="2"{pattern}'


def _tick(most: float) -> float:
    """A round step that divides 0 ... most into four to ten."""
    scale = 10.0 ** math.floor(math.log10(most / 4))
    return next(step * scale for step in (1, 2, 2.5, 5, 10) if most / (step * scale) <= 10)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
