"""Reads the names of a classifier's labels from a configuration, and what its numbers mean. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Kinds of a classifier's numbers: one label of several, any number of labels, or quantities.
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
_SINGLE, _MULTI, _REGRESSION = PROBLEM_TYPES
#: Most labels of a classifier.
MAX_LABELS = 1 << 16
#: Labels of a classifier whose configuration has no number of them, as in transformers.
DEFAULT_LABELS = 2
_MAX_LABEL_CHARS = 1000
_DEFAULT_NAME = re.compile(r"LABEL_\d+")


def read_labels(value: Any) -> tuple[str, ...]:
    """The names in `id2label`, an object of row numbers and names; none for null. Raises ValueError with what was
    expected.
    """
    if value is None or value == {}:
        return ()
    expected = ValueError(f"an object of the numbers from 0 to at most {MAX_LABELS - 1}, each with the name of a label")
    if not isinstance(value, Mapping) or len(value) > MAX_LABELS:
        raise expected
    names = {str(number): name for number, name in value.items()}
    found = [names.get(str(number)) for number in range(len(names))]
    if not all(isinstance(name, str | int | float) and len(str(name)) <= _MAX_LABEL_CHARS for name in found):
        raise expected
    return tuple(map(str, found))


def default_labels(count: int) -> tuple[str, ...]:
    """The names that transformers gives to labels without any."""
    return tuple(f"LABEL_{number}" for number in range(count))


def are_default(labels: tuple[str, ...]) -> bool:
    """Whether nobody has named these labels."""
    return all(_DEFAULT_NAME.fullmatch(label) for label in labels)


def problem_type_of(given: str, num_labels: int) -> str:
    """The kind of a classifier's numbers: `given`, or what transformers assumes where that is "": one label is a
    quantity, of several one is right.
    """
    return given or (_REGRESSION if num_labels == 1 else _SINGLE)
