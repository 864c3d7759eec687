"""Whether an answer is the JSON that a schema asks for, judged by another library than the one that constrained it."""

import json
import sys
from typing import Any

import jsonschema_rs

LARGEST = sys.float_info.max


def is_valid(schema: Any, text: str) -> bool:
    """Whether a text is JSON that a schema accepts, formats included; not JSON at all is a ValueError."""
    return jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(load(text))


def load(text: str) -> Any:
    """The value of a text. A number beyond float64, which JSON allows, is the largest float and not infinity."""
    return json.loads(text, parse_float=lambda number: min(max(float(number), -LARGEST), LARGEST))
