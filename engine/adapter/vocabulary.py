"""A vocabulary the adapter resized: the new shapes of embedding and head, when the file holds both whole."""

from __future__ import annotations

from collections.abc import Mapping

from .base_layout import HEAD
from .contents import Contents
from .ledger import Ledger
from .names import Role
from .targets import is_saved_module

WHOLE_ROLES: frozenset[Role] = frozenset(("saved", "saved_base", "saved_copy"))


def resized_shapes(contents: Contents, ledger: Ledger) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the base's parameters, with the rows of embedding and head as this adapter has them."""
    base = contents.layout.parameters
    tables = (f"{contents.layout.embedding}.weight", f"{HEAD}.weight")
    given = {table: shape for table in tables if (shape := _stored_shape(contents, table)) is not None}
    if len(given) == 1 and _is_shared(contents, next(iter(given))):
        given = dict.fromkeys(tables, next(iter(given.values())))
    if all(shape == base[table] for table, shape in given.items()):
        return base
    if any(len(shape) != 2 or shape[1] != base[table][1] for table, shape in given.items()):
        return base  # Not a matter of rows: each tensor is refused by its shape.
    if given.keys() != set(tables) or len(set(given.values())) > 1:
        rows = ", ".join(f"{table} has {shape[0]} rows" for table, shape in given.items())
        ledger.refuse(
            f"vocabulary: {rows}, the base has {contents.layout.vocab_size}; expected embedding and head, both whole "
            "and of one size. Save the adapter with save_embedding_layers=True"
        )
        return base
    return {**base, **given}


def _stored_shape(contents: Contents, table: str) -> tuple[int, ...] | None:
    for name in contents.names:
        if name.role in WHOLE_ROLES and f"{contents.renaming.to_base(name.module)}.{name.parameter}" == table:
            return contents.entries[name.key].shape
    return None


def _is_shared(contents: Contents, table: str) -> bool:
    """Whether a stored table takes the place of embedding and tied head at once (see `saved.py`)."""
    module = contents.renaming.to_trained(table.rpartition(".")[0])
    return contents.layout.is_tied and not is_saved_module(contents.config, module)
