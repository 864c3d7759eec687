"""The formats of values in JSON schemas. Where llguidance's own is wider than the standard, a pattern narrows it.

A reader that checks formats takes every text that these allow. Some valid ones they leave out: leap seconds, lower-case
letters in times, quoted names and addresses in brackets in e-mail addresses.
"""

from typing import Any

FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    *("int32", "int64"),
)
"""Those that are enforced."""

ANYTHING = ("float", "double", "binary", "password")
"""Those of OpenAPI that say nothing about which values are valid."""

_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_MONTH_DAY = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"([0-9]{{4}}-{_MONTH_DAY}|{_LEAP}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_LABEL = r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,31}"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"

_NARROWER: dict[str, tuple[dict[str, Any], ...]] = {
    "date": ({"pattern": f"^{_DATE}$"},),
    "time": ({"pattern": f"^{_TIME}$"},),
    "date-time": ({"pattern": f"^{_DATE}T{_TIME}$"},),
    "email": ({"pattern": rf"^{_ATOM}(\.{_ATOM})*@{_HOST}$", "maxLength": 254}, {"pattern": "^[^@]{1,64}@"}),
    "hostname": ({"pattern": f"^{_HOST}$", "maxLength": 253},),
    "int32": ({"minimum": -(2**31), "maximum": 2**31 - 1},),
    # llguidance counts in floats, and 2**63 is too much for it.
    "int64": ({"minimum": -(2**63 - 2**12), "maximum": 2**63 - 2**12},),
}


def narrower(name: str) -> tuple[dict[str, Any], ...]:
    """Schemas that hold a value to a format together; none where llguidance's own reading is right."""
    return _NARROWER.get(name, ())
