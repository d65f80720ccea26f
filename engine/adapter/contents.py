"""All that is known of an adapter from its configuration and the headers of its weight files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .base_layout import BaseLayout
from .config import AdapterConfig
from .names import Renaming, Role, TensorName
from .tensor_file import TensorEntry


@dataclass(frozen=True, slots=True)
class Contents:
    """All that is known of an adapter before its values are read."""

    config: AdapterConfig
    layout: BaseLayout
    renaming: Renaming
    names: tuple[TensorName, ...]
    entries: Mapping[str, TensorEntry]
    # Shapes of the base's parameters as this adapter changes them (a resized vocabulary).
    shapes: Mapping[str, tuple[int, ...]]

    def by_module(self, roles: frozenset[Role]) -> dict[str, dict[Role, TensorName]]:
        """Tensors of some roles, by the trained model's module."""
        grouped: dict[str, dict[Role, TensorName]] = {}
        for name in self.names:
            if name.role in roles:
                grouped.setdefault(name.module, {})[name.role] = name
        return grouped
