"""Finds the head of a classifier (PEFT's task `SEQ_CLS`), and the names of its labels.

The head is a linear layer `score` without a bias, of a row for each label. transformers applies it to the last hidden
state of a prompt. PEFT stores it with the modules to save. It changes no layer of the base, so rows of many heads share
a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...system.untrusted import MALFORMED, parse_object, read_regular
from ..errors import AdapterRefusedError
from ..model_config.classifier import (
    MAX_LABELS,
    PROBLEM_TYPES,
    are_default,
    default_labels,
    problem_type_of,
    read_labels,
)
from ..model_config.model import SCORE
from .config import OTHER_TASKS
from .findings import OTHER_BASE, Ledger
from .folder import CONFIG_NAME, MAX_CONFIG_BYTES
from .names import BaseLayout, TensorName
from .parameters import Changes, is_of_score
from .sites import Contents
from .targets import is_saved_module

#: Task of PEFT whose adapters have a head.
SEQ_CLS = "SEQ_CLS"
#: Name of the base parameter that a head stands for.
SCORE_WEIGHT = f"{SCORE}.weight"
#: File of an adapter's folder that may name its labels, as that of a model.
MODEL_CONFIG = "config.json"


def find_score(contents: Contents, raw: Mapping[str, Any], changes: Changes, ledger: Ledger) -> None:
    """Add the head of a classifier to `changes`, if the adapter has one; enter what stands against it. `raw`: the
    adapter's configuration.
    """
    names = [name for name in contents.names if is_of_score(name)]
    is_named = is_saved_module(contents.config, SCORE)
    if not names:
        needs_own = raw.get("task_type") == SEQ_CLS and not contents.layout.has_score
        if is_named or needs_own:
            why = "modules_to_save names its module" if is_named else f"task_type is {SEQ_CLS!r}"
            ledger.refuse(f"{SCORE_WEIGHT}: missing, expected because {why}. Save the adapter again")
        return
    copies = []
    for name in names:
        if name.role == "original":
            ledger.ignore_tensor(name.key, "the head before modules_to_save trained it")
        elif name.parameter != "weight" or name.role == "saved_base":
            why = f"expected a head {SCORE!r} of one weight, without a bias or a pair, as transformers has it"
            ledger.refuse_tensors([name.key], "form of the head", why)
        elif _has_shape(contents, name, ledger):
            copies.append(name)
    if not is_named and raw.get("task_type") != SEQ_CLS:
        why = f"neither modules_to_save nor task_type={SEQ_CLS!r} speaks of a head. Correct the configuration"
        ledger.refuse_tensors([name.key for name in copies], "parameter outside the configuration", why)
    elif copies:
        first, *others = copies
        changes.add(SCORE_WEIGHT, contents.entries[first.key].shape, replaced_by=first.key)
        changes.twins.extend((first.key, other.key) for other in others)
        for name in copies:
            ledger.use_tensor(name.key)


def _has_shape(contents: Contents, name: TensorName, ledger: Ledger) -> bool:
    shape, width = contents.entries[name.key].shape, contents.layout.embedding_size
    if len(shape) == 2 and shape[1] == width and 0 < shape[0] <= MAX_LABELS:
        return True
    ledger.refuse_tensors(
        [name.key], "shape of the head", f"has shape {list(shape)}, expected [number of labels, {width}]. {OTHER_BASE}"
    )
    return False


def task_of(raw: Mapping[str, Any], has_head: bool) -> Literal["", "classify", "embed"]:
    """The task of an adapter's rows, unless they say otherwise; "" for text. `raw`: its configuration."""
    return "classify" if has_head else OTHER_TASKS.get(str(raw.get("task_type")), "")


def labels_of(folder: Path, raw: Mapping[str, Any], num_labels: int, layout: BaseLayout) -> tuple[tuple[str, ...], str]:
    """Names of an adapter's labels, and what their numbers mean (`PROBLEM_TYPES`). Names are in its configuration, in a
    model's `config.json` beside it, or in that of the base if it has as many; else they are those of transformers.

    Raises `AdapterRefusedError` for names that cannot be read, or are not as many as the head has labels.
    """
    beside = _beside(folder)
    given: tuple[str, ...] = ()
    for place, values in ((CONFIG_NAME, raw), (MODEL_CONFIG, beside)):
        try:
            given = given or read_labels(values.get("id2label"))
        except ValueError as error:
            raise AdapterRefusedError(f"{place} id2label: expected {error}. Correct it or leave it out.") from None
        if given and len(given) != num_labels:
            if not are_default(given):
                raise AdapterRefusedError(
                    f"{place} id2label: names {len(given)} labels, the head has {num_labels}. Put the file that "
                    "belongs to the adapter beside it, or leave the key out."
                )
            given = ()
    stated = raw.get("problem_type") or beside.get("problem_type") or layout.problem_type
    if stated not in ("", *PROBLEM_TYPES):
        raise AdapterRefusedError(f"problem_type={stated!r}: expected one of {', '.join(PROBLEM_TYPES)}. Correct it.")
    of_base = layout.labels if len(layout.labels) == num_labels else ()
    return given or of_base or default_labels(num_labels), problem_type_of(stated, num_labels)


def _beside(folder: Path) -> Mapping[str, Any]:
    """The `config.json` in an adapter's folder; empty if there is none."""
    try:
        return parse_object(read_regular(folder / MODEL_CONFIG, MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, *MALFORMED) as error:
        raise AdapterRefusedError(
            f"{MODEL_CONFIG}: cannot be read ({error}). It may name the adapter's labels; save it again or remove it."
        ) from None
