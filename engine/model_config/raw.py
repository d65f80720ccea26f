"""Looks up typed values in a `config.json` and collects every problem found on the way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import EngineError, ModelFilesError

_MAX_LAYERS = 10_000  # the deepest published models have some hundred


class RawConfig:
    """Values of one `config.json`. Where it is silent, `defaults` say what transformers assumes for the family.

    A look-up that fails returns a harmless stand-in and notes the problem; `raise_problems` reports all at once.
    """

    def __init__(
        self,
        model_type: str,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.model_type = model_type
        self._values = values
        self._aliases = aliases or {}
        self._defaults = defaults
        self._place = ""
        self._damages: list[str] = []
        self._refusals: list[str] = []

    def part(self, place: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> RawConfig:
        """An object inside the file, with the same list of problems; `place` names it in messages, "" for one whose
        keys are the file's own."""
        inner = RawConfig(self.model_type, values, defaults or {})
        inner._place = f"{self._place}{place}." if place else self._place
        inner._damages, inner._refusals = self._damages, self._refusals
        return inner

    def get(self, key: str) -> Any:
        """The value, the family's default, or None."""
        alias = self._aliases.get(key, key)
        if alias in self._values:
            return self._values[alias]
        return self._values[key] if key in self._values else self._defaults.get(key)

    def all_values(self) -> dict[str, Any]:
        """The values of the file, without defaults."""
        return dict(self._values)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty where the file says null or nothing."""
        value = self.get(key) or {}
        if isinstance(value, Mapping):
            return dict(value)
        self.damage(key, "expected an object")
        return {}

    def integer(self, key: str) -> int:
        """A positive integer that must be there."""
        number = self.number(key)
        if number != int(number):
            self.damage(key, "expected an integer")
        return int(number)

    def num_layers(self, key: str) -> int:
        """A positive integer that must be there, of things that are listed one by one."""
        number = self.integer(key)
        if number <= _MAX_LAYERS:
            return number
        self.damage(key, f"expected at most {_MAX_LAYERS}")
        return 1

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None where the file says null or nothing."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        """A positive number that must be there."""
        value = self.get(key)
        if _is_positive(value):
            return float(value) if isinstance(value, float) else int(value)
        self.damage(key, "expected a positive number")
        return 1

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None where the file says null or nothing."""
        return None if self.get(key) is None else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        value = self.get(key)
        if isinstance(value, list) and len(value) == count and all(map(_is_positive, value)):
            return tuple(value)
        self.damage(key, f"expected a list of {count} positive numbers")
        return (1.0,) * count

    def flag(self, key: str) -> bool:
        """True or false; null and silence mean false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.damage(key, "expected true or false")
        return value is True

    def choice(self, key: str, supported: Iterable[str], value: str) -> str:
        """`value`, found under `key`, if it is among `supported`; else it is refused by name."""
        names = tuple(supported)
        if value in names:
            return value
        self.refuse(key, f"supported: {', '.join(names)}", value)
        return names[0]

    def damage(self, key: str, expected: str) -> None:
        """Note a value that is missing or makes no sense."""
        value = self.get(key)
        found = "missing" if value is None else f"found {value!r}"
        self._damages.append(f"{self._place}{key}: {found}, {expected}")

    def refuse(self, key: str, expected: str, value: object = None) -> None:
        """Note a setting that is not computed exactly. `value`: what stands for the value in the message."""
        shown = self.get(key) if value is None else value
        self._refusals.append(f"{self._place}{key}={shown!r} is not supported, {expected}")

    def raise_problems(self) -> None:
        """Raise `EngineError` or `ModelFilesError` with everything noted, if anything was."""
        problems = "; ".join(dict.fromkeys([*self._refusals, *self._damages]))
        place = f"config.json (model_type={self.model_type!r})"
        if self._refusals:
            raise EngineError(f"{place}: {problems}. Use another base model, see --model.")
        if self._damages:
            raise ModelFilesError(f"{place}: {problems}. Fetch the model again, or check --model.")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def stop_token_ids(raw: RawConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a completion; `generation_config.json` wins. One id, a list, or none."""
    listed = generation.get("eos_token_id")
    return _token_ids(raw, "eos_token_id", raw.get("eos_token_id") if listed is None else listed)


def first_token_id(raw: RawConfig) -> int | None:
    """The token that begins a text, where there is one."""
    return next(iter(_token_ids(raw, "bos_token_id", raw.get("bos_token_id"))), None)


def _token_ids(raw: RawConfig, key: str, value: Any) -> tuple[int, ...]:
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        return tuple(listed)
    raw.damage(key, f"expected a token id or a list of them, not {value!r}")
    return ()
