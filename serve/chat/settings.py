"""What /set changes: the sampling parameters and the length of an answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvarn.errors import UsageError
from kvarn.sampling import SamplingParams

_KINDS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How answers are made; checked when built (UsageError)."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens {self.max_tokens} is not possible; use 1 or more")

    def changed(self, name: str, value: str) -> "Settings":
        """These settings with another value; UsageError for an unknown name or a value that is not possible."""
        if name not in _KINDS:
            raise UsageError(f"no setting {name!r}; there are {', '.join(_KINDS)}")
        kind = _KINDS[name]
        try:
            number = kind(value)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise UsageError(f"{name} {value!r} is not {wanted}; try /set {name} {self.values()[name]}") from error
        if name == "max_tokens":
            return replace(self, max_tokens=int(number))
        return self.sampled(name, number)

    def sampled(self, name: str, value: float) -> "Settings":
        """These settings with another value of one sampling parameter; UsageError when it is not possible."""
        values = {**self._sampling_values(), name: value}
        return replace(self, sampling=SamplingParams(**values, logit_bias=self.sampling.logit_bias))  # type: ignore[arg-type]

    def values(self) -> dict[str, float]:
        """Every setting by its name."""
        return {**self._sampling_values(), "max_tokens": self.max_tokens}

    def _sampling_values(self) -> dict[str, float]:
        return {name: getattr(self.sampling, name) for name in _KINDS if name != "max_tokens"}
