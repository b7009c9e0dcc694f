"""What a widget may hold, and the sentence for what it may not. Pure arithmetic."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class IntLimit:
    """A whole number with `low <= value <= high` and `value % multiple_of == plus`."""

    default: int
    low: int
    high: int
    multiple_of: int = 1
    plus: int = 0

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, with the nearest values that would do; None if it is fine."""
        if isinstance(value, bool) or not isinstance(value, int):
            return f"is {value!r}; it must be a whole number between {self.low} and {self.high}."
        if self.low <= value <= self.high and (value - self.plus) % self.multiple_of == 0:
            return None
        rule = f"between {self.low} and {self.high}"
        if self.multiple_of > 1 and self.plus:
            rule = f"{self.multiple_of}k + {self.plus} {rule}"
        elif self.multiple_of > 1:
            rule = f"a multiple of {self.multiple_of} {rule}"
        return f"is {value}; it must be {rule}. Use {self._nearest(value)}."

    def at_most(self, value: int) -> int | None:
        """The largest allowed value that is not above `value`; None if there is none."""
        below = self._not_above(value)
        return below if self.low <= below <= self.high else None

    def _not_above(self, value: int) -> int:
        return self.plus + (value - self.plus) // self.multiple_of * self.multiple_of

    def _nearest(self, value: int) -> str:
        below = self._not_above(value)
        clipped = sorted({min(max(near, self.low), self.high) for near in (below, below + self.multiple_of)})
        if not self.low <= value <= self.high:
            return str(clipped[0] if value < self.low else clipped[-1])
        return " or ".join(str(near) for near in clipped)


@dataclass(frozen=True, kw_only=True)
class FloatLimit:
    """A number with `low <= value <= high`; `step` is only the widget's."""

    default: float
    low: float
    high: float
    step: float = 0.1

    def problem(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"is {value!r}; it must be a number between {self.low} and {self.high}."
        if self.low <= value <= self.high:
            return None
        near = self.low if value < self.low else self.high
        return f"is {value}; it must be between {self.low} and {self.high}. Use {near}."


@dataclass(frozen=True, kw_only=True)
class Switch:
    """On or off."""

    default: bool

    def problem(self, value: Any) -> str | None:
        return None if isinstance(value, bool) else f"is {value!r}; it must be true or false."


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of some names; the first is the default."""

    options: tuple[str, ...]

    @property
    def default(self) -> str:
        return self.options[0]

    def problem(self, value: Any) -> str | None:
        return None if value in self.options else f"is {value!r}; it must be one of {', '.join(self.options)}."
