"""trainable_token_indices: single rows of the embedding (and head) that the adapter replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .base_layout import HEAD
from .contents import Contents
from .ledger import Ledger
from .names import TensorName
from .saved import SavedParameters, Twins


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Row `indices[i]` of a table becomes row i of tensor `key`, [num_tokens, hidden_size]."""

    indices: tuple[int, ...]
    key: str


def find_token_rows(contents: Contents, saved: SavedParameters, ledger: Ledger) -> dict[str, TokenRows]:
    """Replaced rows by parameter. In a tied base PEFT lets the head follow the embedding's rows."""
    stored = {contents.renaming.to_base(n.module): n for n in contents.names if n.role == "token_rows"}
    wanted = _wanted(contents)
    _check_targets(contents, ledger)
    rows: dict[str, TokenRows] = {}
    for module, indices in wanted.items():
        name = stored.get(module)
        if name is None:
            ledger.refuse(
                f"{module}.token_adapter.trainable_tokens_delta: missing, expected because of "
                "trainable_token_indices. Save the adapter again"
            )
        elif _fits(contents, module, indices, name, ledger):
            rows[f"{module}.weight"] = TokenRows(indices, name.key)
            ledger.use_tensor(name.key)
    _follow_tie(contents, wanted, stored, rows, saved, ledger)
    _check_alone(contents, rows, ledger)
    if rows:
        ledger.merge_only("trainable_token_indices: changed embeddings, so it runs as its own merged wave", "tokens")
    return rows


def _wanted(contents: Contents) -> dict[str, tuple[int, ...]]:
    """Token indices by module of the base that keeps rows of its own."""
    given = contents.config.trainable_token_indices
    embedding = contents.layout.embedding
    if not given:
        return {}
    if not isinstance(given, Mapping):
        return {embedding: given}
    found: dict[str, tuple[int, ...]] = {}
    for module in (embedding, HEAD):
        trained = contents.renaming.to_trained(module)
        indices = next((item for target, item in given.items() if trained.endswith(target)), None)
        if indices is not None:
            found[module] = indices
    if contents.layout.is_tied and found.get(HEAD) == found.get(embedding):
        found.pop(HEAD, None)
    return found


def _check_targets(contents: Contents, ledger: Ledger) -> None:
    """Targets PEFT would not accept: names of other layers, and tied layers that are given different tokens."""
    given = contents.config.trainable_token_indices
    if not isinstance(given, Mapping):
        return
    key = "trainable_token_indices"
    tables = [contents.renaming.to_trained(module) for module in (contents.layout.embedding, HEAD)]
    for target in given:
        if not any(table.endswith(target) for table in tables):
            ledger.refuse_key(key, target, f"expected one of {', '.join(tables)}. Use the base it was trained on")
    if contents.layout.is_tied and contents.config.ensure_weight_tying and len(set(given.values())) > 1:
        ledger.refuse_key(key, dict(given), "expected the same tokens for tied layers, as ensure_weight_tying is true")


def _fits(contents: Contents, module: str, indices: tuple[int, ...], name: TensorName, ledger: Ledger) -> bool:
    num_rows, hidden_size = contents.shapes[f"{module}.weight"]
    shape = contents.entries[name.key].shape
    outside = [index for index in indices if index >= num_rows]
    if outside:
        ledger.refuse_key(
            "trainable_token_indices",
            outside,
            f"expected indices below {num_rows}, the rows of {module}. The adapter belongs to another base",
        )
    if shape != (len(indices), hidden_size):
        why = f"has shape {list(shape)}, expected {[len(indices), hidden_size]} by trainable_token_indices"
        ledger.refuse_tensors([name.key], "token rows shape", f"{why}. Save the adapter again")
    return not outside and shape == (len(indices), hidden_size)


def _follow_tie(
    contents: Contents,
    wanted: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, TensorName],
    rows: dict[str, TokenRows],
    saved: SavedParameters,
    ledger: Ledger,
) -> None:
    """Give a tied head the embedding's rows, and allow the redundant copy PEFT writes for a resized base."""
    source = rows.get(f"{contents.layout.embedding}.weight")
    if not contents.layout.is_tied or source is None or HEAD in wanted:
        return
    rows[f"{HEAD}.weight"] = source
    if HEAD in stored:
        saved.twins.append(Twins(source.key, stored[HEAD].key))
        ledger.use_tensor(stored[HEAD].key)


def _check_alone(contents: Contents, rows: Mapping[str, TokenRows], ledger: Ledger) -> None:
    """PEFT knows no layer that has token rows together with a LoRA pair."""
    for name in contents.names:
        if name.role in ("embedding_a", "lora_a"):
            module = contents.renaming.to_base(name.module)
            if f"{module}.weight" in rows:
                ledger.refuse_key(
                    "trainable_token_indices",
                    contents.config.trainable_token_indices,
                    f"expected no LoRA pair on {module} beside it; PEFT cannot build such a layer",
                )
