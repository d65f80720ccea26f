"""Audits adapters in child processes, so that a folder that crashes the libraries which read it fails alone.

`Auditors` holds the child processes; `run` is the task that they execute. `system/confinement.py` confines them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from queue import LifoQueue
from typing import Any

from ...engine.config import read_model_config
from ...engine.errors import ModelFilesError
from ...engine.model_config.model import ModelConfig
from ...engine.peft.audit import AdapterAudit, audit_adapter
from ...engine.peft.findings import reason
from ...engine.peft.names import base_layout
from ...engine.text.chat.conversation import header_note
from ...engine.text.tokenizers.template_probe import missing_header_of
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...system.codec import MessageError, from_plain, to_plain
from ...system.confinement import MEMORY_BYTES, ConfinedError, ConfinedProcess
from ..storage.redaction import redacted_url
from ..storage.urls import hub_parts, is_hub_id

MAX_PROCESSES = 4
_TASK = "jobs.opening.confined_audit"
_CPU_S = 60
# Checking and hashing take a tenth of this time, or less.
_CHECKED_BYTES_PER_CPU_S = 50_000_000
_BYTES_PER_NUMBER = 4
_MAX_CONFLICTS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Question:
    #: Name of the adapter.
    name: str
    #: Its folder.
    folder: str
    #: Folder of the base.
    model_folder: str
    #: Whether every weight is read.
    check_values: bool
    #: Name of the base, for messages.
    base_name: str
    #: Whether what is found of single tensors and keys is left out.
    is_brief: bool


class Auditors:
    """Child processes that audit adapters against one base. Safe to share between threads; a context manager.

    `base_name`: path, URL or hub id that the base was given by, for messages; "": the folder's.
    """

    def __init__(self, model_folder: Path, model: ModelConfig, base_name: str = "") -> None:
        self._model_folder = model_folder
        self._base_name = _name_of_base(base_name or str(model_folder))
        # Folder of a chat template -> header that its prompts lack; most adapters use the base's template.
        self._missing_headers: dict[Path, str] = {}
        # Bytes of the base's tensors, all and the largest: an adapter replaces only these, so the time and memory of
        # an audit need not grow with larger files.
        sizes = [_BYTES_PER_NUMBER * math.prod(shape) for shape in base_layout(model).parameters.values()]
        self._model_bytes, self._largest_bytes = sum(sizes), max(sizes)
        self._processes = [ConfinedProcess() for _ in range(min(MAX_PROCESSES, os.cpu_count() or 1))]
        # Last in, first out: the process that was used last has started already.
        self._free: LifoQueue[ConfinedProcess] = LifoQueue()
        for process in self._processes:
            self._free.put(process)

    def __enter__(self) -> Auditors:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    def audit(
        self, name: str, folder: Path, *, check_values: bool = True, is_patient: bool = True, is_brief: bool = False
    ) -> AdapterAudit:
        """Audits one adapter and its tokenizer in a child process; returns the findings of `audit_adapter`. `is_brief`:
        without those of single tensors and keys, which take longer on their way than the audit of an adapter that is
        small.

        A bad adapter is refused and raises nothing. Raises `NoProcessError` when the machine cannot start a child and,
        unless it `is_patient`, `ConfinedError` where a child breaks a limit or is ended, which says that the adapter is
        bad only as long as nothing else has ended the child.
        """
        question = _Question(
            name, str(folder.absolute()), str(self._model_folder.absolute()), check_values, self._base_name, is_brief
        )
        num_bytes = _bytes_of(folder)
        cpu_s = _CPU_S + min(num_bytes, self._model_bytes) // _CHECKED_BYTES_PER_CPU_S
        # Tensors are read one by one, tensors of tied layers two by two.
        memory_bytes = MEMORY_BYTES + 2 * min(num_bytes, self._largest_bytes)
        process = self._free.get()
        try:
            audit: AdapterAudit = from_plain(AdapterAudit, process.run(_TASK, to_plain(question), cpu_s, memory_bytes))
            audit = self._with_template(audit, folder, process)
        except (ConfinedError, MessageError) as error:
            if not is_patient:
                raise
            what = f"cannot be audited: {error}. Save the adapter again, without a tokenizer where the base's will do"
            return AdapterAudit(name, folder, "refused", (reason(name, what),), (), None)
        finally:
            self._free.put(process)
        return replace(audit, folder=folder)

    def _with_template(self, audit: AdapterAudit, folder: Path, process: ConfinedProcess) -> AdapterAudit:
        """The audit with a note on a chat template that ends prompts without the header of an answer."""
        if audit.verdict == "refused":
            return audit
        source = folder if audit.has_own_tokenizer else self._model_folder
        header = self._missing_headers.get(source)
        if header is None:
            header = self._missing_headers[source] = missing_header_of(source, self._model_folder, process)
        return replace(audit, missing_header=header, notes=(*audit.notes, header_note(header))) if header else audit


def run(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Audits one adapter and its tokenizer; the task of a child process."""
    question: _Question = from_plain(_Question, payload)
    folder, model_folder = Path(question.folder), Path(question.model_folder)
    audit = audit_adapter(
        folder,
        _model_config(model_folder),
        question.name,
        check_values=question.check_values,
        base_name=question.base_name,
    )
    problem = _tokenizer_problem(folder, model_folder, audit)
    if problem is not None:
        reasons = (reason(question.name, problem),)
        audit = replace(audit, verdict="refused", reasons=reasons, content_sha256=None)
    if question.is_brief:
        audit = replace(audit, sites=(), changes=(), key_uses={}, tensor_uses={}, other_engines={}, sources={})
    return to_plain(audit)


def _name_of_base(given: str) -> str:
    """Name of a base for messages: the last part of where it was found, in a hub's cache that of its repository."""
    if is_hub_id(given):
        return hub_parts(given)[1]
    parts = redacted_url(given).rstrip("/").split("/")
    repository = next((part for part in parts if part.startswith("models--")), "")
    return repository.rpartition("--")[2] if repository else parts[-1].removesuffix(".gguf")


def _tokenizer_problem(folder: Path, model_folder: Path, audit: AdapterAudit) -> str | None:
    """Why the adapter's own tokenizer cannot be used with this base, as a clause, or None."""
    if not audit.has_own_tokenizer or audit.verdict == "refused":
        return None
    try:
        own = Tokenizer.from_folder(folder, base=model_folder, sha256=audit.tokenizer_sha256)
    except ModelFilesError as error:
        return str(error).rstrip(".")
    if not audit.has_own_vocabulary:
        return None
    foreign = own.foreign_problem()
    if foreign is not None:
        return f"its tokenizer is refused: {foreign}. Repair it, or take another one"
    conflicts = own.conflicts(_base_tokenizer(model_folder))
    if conflicts:
        shown = "; ".join(conflicts[:_MAX_CONFLICTS_SHOWN])
        return f"its tokenizer contradicts the base's: {shown}. Use the base and tokenizer it was trained with"
    if own.num_tokens_of_prompts > audit.vocab_size:
        return (
            f"its tokenizer has {own.num_tokens_of_prompts} tokens, its embedding {audit.vocab_size}. Save the adapter "
            "with its resized embedding, or remove the tokenizer from its folder"
        )
    return None


@cache
def _model_config(model_folder: Path) -> ModelConfig:
    return read_model_config(model_folder)


@cache
def _base_tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


def _bytes_of(folder: Path) -> int:
    """Total size of the files directly in a folder."""
    num_bytes = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            num_bytes += entry.stat().st_size if entry.is_file() else 0
    return num_bytes
