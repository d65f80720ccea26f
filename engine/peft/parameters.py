"""Finds what an adapter replaces in the base: whole parameters, single token rows, and vocabularies of another size.

Whole parameters (modules_to_save, trained biases, saved embeddings) are of two kinds, which differ when the base ties
its head to the embedding (PEFT 0.21, seen in its forward pass):
- a modules_to_save copy stands beside the base's parameter, so only its own module sees it;
- a saved base layer is loaded into the base's parameter itself, so embedding and tied head both see it.
Token rows are those of trainable_token_indices. A resized vocabulary gives embedding and head new shapes; the file must
hold both whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..model_config.model import HEAD, SCORE
from .findings import OTHER_BASE, Ledger
from .names import LORA_ROLES, Role, TensorName
from .sites import Contents, ParameterChange
from .targets import is_saved_module, ties_saved

WHOLE_ROLES: frozenset[Role] = frozenset(("saved", "saved_base", "saved_copy"))
SAVED_ROLES: frozenset[Role] = WHOLE_ROLES | {"original"}
# Names of heads of tasks in other families.
_OTHER_HEADS = ("classifier", "classification_head", "qa_outputs")


@dataclass(slots=True)
class Changes:
    """How merging makes each base parameter that an adapter touches, and the tensors whose equality that relies on."""

    #: The change of each parameter, by its name.
    by_parameter: dict[str, ParameterChange] = field(default_factory=dict)
    #: Pairs of tensors that PEFT keeps equal.
    twins: list[tuple[str, str]] = field(default_factory=list)
    #: Pairs of tensors, the second of which PEFT keeps equal to the first one's transpose.
    transposed_twins: list[tuple[str, str]] = field(default_factory=list)

    def add(self, parameter: str, shape: tuple[int, ...], **facts: Any) -> None:
        """Add fields of `ParameterChange` to what is known of a parameter's change."""
        known = self.by_parameter.get(parameter, ParameterChange(parameter, shape))
        self.by_parameter[parameter] = replace(known, **facts)

    def replaced_by(self, parameter: str) -> str | None:
        """Tensor that stands for a parameter of the base; None: the base's value is kept."""
        change = self.by_parameter.get(parameter)
        return None if change is None else change.replaced_by

    def has_rows(self, parameter: str) -> bool:
        """Whether rows of a parameter are replaced."""
        change = self.by_parameter.get(parameter)
        return change is not None and change.rows_key is not None

    def unties(self, embedding: str) -> bool:
        """Whether embedding and head, one in a tied base, differ after merging."""
        pair = [self.by_parameter.get(f"{module}.weight") for module in (embedding, HEAD)]
        if pair[0] is None or pair[1] is None:
            return pair[0] is not pair[1]
        if pair[0].site or pair[1].site:
            # Tied pairs are stored twice, once transposed; only PEFT's own tie makes them one.
            return True
        return (pair[0].rows, pair[0].rows_key) != (pair[1].rows, pair[1].rows_key) or not (
            pair[0].replaced_by == pair[1].replaced_by
            or any({pair[0].replaced_by, pair[1].replaced_by} == set(twins) for twins in self.twins)
        )


def find_saved(contents: Contents, changes: Changes, ledger: Ledger) -> None:
    """Add all whole parameters, each checked against base and configuration, to `changes`, which are empty."""
    shared: dict[str, str] = {}
    groups: dict[tuple[str, str], dict[Role, TensorName]] = {}
    for name in contents.names:
        if is_of_score(name):
            continue
        if name.role in SAVED_ROLES and _fits_base(contents, name, ledger):
            groups.setdefault((name.module, str(name.parameter)), {})[name.role] = name
    for (trained, kind), parts in groups.items():
        parameter = f"{contents.renaming.to_base(trained)}.{kind}"
        if _is_saved(contents, trained):
            _take_saved(contents, parameter, parts, changes, ledger)
        else:
            _take_base(contents, parameter, parts, changes, shared, ledger)
    _share(contents, shared, changes)
    _judge_originals(contents, groups, changes, ledger)
    _check_complete(contents, changes, ledger)


def is_of_score(name: TensorName) -> bool:
    """Whether a tensor belongs to the head of a classifier (`heads.find_score`)."""
    return name.module == SCORE and name.role in SAVED_ROLES


def _is_saved(contents: Contents, trained: str) -> bool:
    if is_saved_module(contents.config, trained):
        return True
    is_table = contents.renaming.to_base(trained) in (contents.layout.embedding, HEAD)
    return is_table and contents.layout.is_tied and ties_saved(contents.config)


def _fits_base(contents: Contents, name: TensorName, ledger: Ledger) -> bool:
    parameter = f"{contents.renaming.to_base(name.module)}.{name.parameter}"
    expected = contents.shapes.get(parameter)
    shape = contents.entries[name.key].shape
    if expected is None:
        why = f"the base has no parameter {parameter!r}"
        if name.module.rpartition(".")[2] in _OTHER_HEADS:
            why += f", and of heads that classify text only {SCORE!r} is computed"
        ledger.refuse_tensors([name.key], "no such parameter", f"{why}. Use the base it was trained on")
    elif contents.layout.is_transposed and len(expected) == 2 and parameter.startswith(contents.layout.layers):
        why = "a whole layer that is stored transposed (Conv1D), which is not read. Train a LoRA pair on it"
        ledger.refuse_tensors([name.key], "transposed layer", why)
        return False
    elif shape != expected:
        why = f"has shape {list(shape)}, expected {list(expected)}. {OTHER_BASE}"
        ledger.refuse_tensors([name.key], "shape", why)
    return shape == expected


def _take_saved(
    contents: Contents, parameter: str, parts: Mapping[Role, TensorName], changes: Changes, ledger: Ledger
) -> None:
    """A parameter of a module in modules_to_save."""
    copies = [parts[role] for role in ("saved", "saved_copy") if role in parts]
    if "saved_base" in parts:
        why = "this module is in modules_to_save, expected no adapter on top of it. Save the adapter again"
        ledger.refuse_tensors([parts["saved_base"].key], "saved and adapted", why)
    if not copies:
        return
    changes.add(parameter, contents.shapes[parameter], replaced_by=copies[0].key)
    changes.twins.extend((copies[0].key, copy.key) for copy in copies[1:])
    for copy in copies:
        ledger.use_tensor(copy.key)
    ledger.merge_only("modules_to_save: whole layers change, so it runs as its own merged wave", "modules_to_save")


def _take_base(
    contents: Contents,
    parameter: str,
    parts: Mapping[Role, TensorName],
    changes: Changes,
    shared: dict[str, str],
    ledger: Ledger,
) -> None:
    """A bias, or a saved embedding or head, that takes the place of the base's own."""
    trained = next(iter(parts.values())).module
    adapted = {name.module for name in contents.names if name.role in LORA_ROLES or name.role == "token_rows"}
    role: Role = "saved_base" if trained in adapted else "saved"
    strays = [name.key for other, name in parts.items() if other not in (role, "original")]
    if strays:
        why = (
            "PEFT would load this for a layer that is wrapped by an adapter only, which this one is not"
            if role == "saved"
            else "PEFT would leave this out, as the layer is wrapped by an adapter. Save again with a recent PEFT"
        )
        ledger.refuse_tensors(strays, f"stray {role}", why)
    if role not in parts:
        return
    key = parts[role].key
    if parameter.endswith(".bias") and _is_trained_bias(contents, trained, trained in adapted):
        changes.add(parameter, contents.shapes[parameter], replaced_by=key)
        ledger.merge_only(f"bias={contents.config.bias!r}: trained biases, so it runs as its own merged wave", "bias")
    elif parameter in (f"{contents.layout.embedding}.weight", f"{HEAD}.weight", f"{HEAD}.bias"):
        if parameter.endswith(".bias"):
            changes.add(parameter, contents.shapes[parameter], replaced_by=key)
        else:
            shared[parameter] = key
        ledger.merge_only(f"{key}: a whole layer, so it runs as its own merged wave", "saved embedding")
    else:
        why = "a whole parameter that neither modules_to_save nor bias speaks of. Correct the configuration"
        ledger.refuse_tensors([key], "parameter outside the configuration", why)
        return
    ledger.use_tensor(key)


def _is_trained_bias(contents: Contents, trained: str, is_adapted: bool) -> bool:
    return contents.config.bias == "all" or (contents.config.bias == "lora_only" and is_adapted)


def _share(contents: Contents, shared: Mapping[str, str], changes: Changes) -> None:
    """Enter saved base layers; in a tied base either one stands for both embedding and head."""
    if not contents.layout.is_tied:
        for table, key in shared.items():
            changes.add(table, contents.shapes[table], replaced_by=key)
        return
    keys = list(shared.values())
    changes.twins.extend((keys[0], key) for key in keys[1:])
    for table in (f"{contents.layout.embedding}.weight", f"{HEAD}.weight"):
        if keys and table not in changes.by_parameter:
            changes.add(table, contents.shapes[table], replaced_by=shared.get(table, keys[0]))


def _judge_originals(
    contents: Contents,
    groups: Mapping[tuple[str, str], Mapping[Role, TensorName]],
    changes: Changes,
    ledger: Ledger,
) -> None:
    """The layer as it was before modules_to_save: irrelevant once every user of it has a parameter of its own."""
    tables = {f"{contents.layout.embedding}.weight", f"{HEAD}.weight"}
    for (trained, kind), parts in groups.items():
        if "original" not in parts:
            continue
        users = {f"{contents.renaming.to_base(trained)}.{kind}"}
        if contents.layout.is_tied and users <= tables:
            users = tables
        if users <= changes.by_parameter.keys():
            ledger.ignore_tensor(parts["original"].key, "the layer before modules_to_save trained it")
        else:
            why = f"changes {', '.join(sorted(users - changes.by_parameter.keys()))} too. Save that layer as well"
            ledger.refuse_tensors([parts["original"].key], "original module", why)


def _check_complete(contents: Contents, changes: Changes, ledger: Ledger) -> None:
    """Check that everything is there that was trained, as the configuration says."""
    config, layout = contents.config, contents.layout
    trained_names = {module: contents.renaming.to_trained(module) for module in layout.modules}
    for parameter in layout.parameters:
        is_there = parameter in changes.by_parameter or parameter == f"{SCORE}.weight"
        if not is_there and _is_saved(contents, trained_names[parameter.rpartition(".")[0]]):
            why = "missing, expected because modules_to_save names its module. Save the adapter again"
            ledger.refuse(f"{parameter}: {why}", "modules_to_save missing")
    if layout.is_tied and ties_saved(config):
        tables = [changes.replaced_by(f"{module}.weight") for module in (layout.embedding, HEAD)]
        if tables[0] and tables[1]:
            changes.twins.append((tables[0], tables[1]))
    for name in config.modules_to_save:
        if name == SCORE or (name in _OTHER_HEADS and SCORE in config.modules_to_save):
            continue  # PEFT adds both `classifier` and `score` to the modules of every SEQ_CLS adapter
        if name in _OTHER_HEADS:
            why = f"{name!r} is a head of another family; of heads that classify text only {SCORE!r} is computed"
            ledger.refuse_key("modules_to_save", config.modules_to_save, why)
        elif not any(name in f".{trained}" for trained in (*trained_names.values(), *contents.passed_over)):
            ledger.notes.append(f"modules_to_save names {name!r}, which this base does not have; PEFT ignores it too")
    _check_biases(contents, changes, ledger)


def _check_biases(contents: Contents, changes: Changes, ledger: Ledger) -> None:
    if contents.config.bias == "none":
        return
    adapted = {contents.renaming.to_base(name.module) for name in contents.names if name.role in LORA_ROLES}
    for parameter in contents.layout.parameters:
        module, _, kind = parameter.rpartition(".")
        is_expected = kind == "bias" and (contents.config.bias == "all" or module in adapted)
        if is_expected and parameter not in changes.by_parameter:
            why = f"missing, expected because bias={contents.config.bias!r}. Save the adapter with a recent PEFT"
            ledger.refuse(f"{parameter}: {why}", "bias missing")


def find_token_rows(contents: Contents, changes: Changes, ledger: Ledger) -> None:
    """Add replaced rows to `changes`. In a tied base PEFT lets the head follow the embedding's rows."""
    stored = {contents.renaming.to_base(n.module): n for n in contents.names if n.role == "token_rows"}
    wanted = _wanted(contents)
    _check_targets(contents, ledger)
    has_head = HEAD in wanted or (contents.layout.is_tied and wanted)
    if has_head and f"{HEAD}.bias" in contents.layout.parameters:
        why = "expected no tokens of a head that has a bias, which PEFT leaves out there. Train a LoRA pair on it"
        ledger.refuse_key("trainable_token_indices", contents.config.trainable_token_indices, why)
    for module, indices in wanted.items():
        name, table = stored.get(module), f"{module}.weight"
        if name is None:
            ledger.refuse(
                f"{module}.token_adapter.trainable_tokens_delta: missing, expected because of "
                "trainable_token_indices. Save the adapter again"
            )
        elif _fits(contents, module, indices, name, ledger):
            changes.add(table, contents.shapes[table], rows=indices, rows_key=name.key)
            ledger.use_tensor(name.key)
    _follow_tie(contents, wanted, stored, changes, ledger)
    _check_alone(contents, changes, ledger)
    if any(map(changes.has_rows, changes.by_parameter)):
        ledger.merge_only("trainable_token_indices: changed embeddings, so it runs as its own merged wave", "tokens")


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
            f"expected indices below {num_rows}, the rows of {module}. {OTHER_BASE}",
        )
    if shape != (len(indices), hidden_size):
        why = f"has shape {list(shape)}, expected {[len(indices), hidden_size]} by trainable_token_indices"
        ledger.refuse_tensors([name.key], "token rows shape", f"{why}. Save the adapter again")
    return not outside and shape == (len(indices), hidden_size)


def _follow_tie(
    contents: Contents,
    wanted: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, TensorName],
    changes: Changes,
    ledger: Ledger,
) -> None:
    """Give a tied head the embedding's rows, and allow the redundant copy PEFT writes for a resized base."""
    source = changes.by_parameter.get(f"{contents.layout.embedding}.weight")
    if not contents.layout.is_tied or source is None or source.rows_key is None or HEAD in wanted:
        return
    head = f"{HEAD}.weight"
    changes.add(head, contents.shapes[head], rows=source.rows, rows_key=source.rows_key)
    if HEAD in stored:
        changes.twins.append((source.rows_key, stored[HEAD].key))
        ledger.use_tensor(stored[HEAD].key)


def _check_alone(contents: Contents, changes: Changes, ledger: Ledger) -> None:
    """PEFT knows no layer that has token rows together with a LoRA pair."""
    for name in contents.names:
        if name.role in ("embedding_a", "lora_a"):
            module = contents.renaming.to_base(name.module)
            if changes.has_rows(f"{module}.weight"):
                ledger.refuse_key(
                    "trainable_token_indices",
                    contents.config.trainable_token_indices,
                    f"expected no LoRA pair on {module} beside it; PEFT cannot build such a layer",
                )


def resized_shapes(contents: Contents, ledger: Ledger) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the base's parameters, with the rows of embedding and head as this adapter has them."""
    base = contents.layout.parameters
    tables = (f"{contents.layout.embedding}.weight", f"{HEAD}.weight")
    given = {table: shape for table in tables if (shape := _stored_shape(contents, table)) is not None}
    if len(given) == 1 and _is_shared(contents, next(iter(given))):
        given = dict.fromkeys(tables, next(iter(given.values())))
    if all(shape == base[table] for table, shape in given.items()):
        return base
    bias = f"{HEAD}.bias"
    lacks_bias = bias in base and _stored_shape(contents, bias) is None
    if any(len(shape) != 2 or shape[1] != base[table][1] for table, shape in given.items()):
        return base  # Not a matter of rows: each tensor is refused by its shape.
    if given.keys() != set(tables) or len(set(given.values())) > 1 or lacks_bias:
        rows = ", ".join(f"{table} has {shape[0]} rows" for table, shape in given.items())
        ledger.refuse(
            f"vocabulary: {rows}, the base has {contents.layout.vocab_size}; expected embedding and head, both whole "
            "and of one size. Save the adapter with save_embedding_layers=True"
        )
        return base
    of_bias = {bias: next(iter(given.values()))[:1]} if bias in base else {}
    return {**base, **given, **of_bias}


def _stored_shape(contents: Contents, table: str) -> tuple[int, ...] | None:
    for name in contents.names:
        if name.role in WHOLE_ROLES and f"{contents.renaming.to_base(name.module)}.{name.parameter}" == table:
            return contents.entries[name.key].shape
    return None


def _is_shared(contents: Contents, table: str) -> bool:
    """Whether a stored table takes the place of embedding and tied head at once (see the head of this file)."""
    module = contents.renaming.to_trained(table.rpartition(".")[0])
    return contents.layout.is_tied and not is_saved_module(contents.config, module)
