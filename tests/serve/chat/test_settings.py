"""/set changes one value, or nothing."""

import pytest

from kvarn.errors import UsageError
from kvarn.serve.chat.settings import Settings


def test_every_setting_can_be_changed() -> None:
    settings = Settings()
    for name, value in dict.fromkeys(settings.values(), 1).items():
        settings = settings.changed(name, str(value))
    assert set(settings.values().values()) == {1}
    assert settings.sampling.temperature == 1.0
    assert settings.max_tokens == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("heat", "1", "no setting 'heat'; there are temperature, top_p"),
        ("temperature", "hot", "temperature 'hot' is not a number"),
        ("temperature", "nan", "temperature nan"),
        ("temperature", "-1", "not between 0"),
        ("top_k", "1.5", "top_k '1.5' is not a whole number"),
        ("top_p", "0", "top_p 0.0"),
        ("max_tokens", "0", "use 1 or more"),
        ("seed", "", "seed '' is not a whole number"),
        ("logit_bias", "1", "no setting"),
    ],
)
def test_a_wrong_name_or_value_is_refused(name: str, value: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Settings().changed(name, value)
