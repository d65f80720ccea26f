"""Audits one adapter folder against one base: it is applied exactly, or refused by name.

Every key of the configuration and every tensor is used, known to be irrelevant, or a reason to refuse. `audit_rows`
gives audits as rows of text, for tables in a terminal or a document.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AdapterRefusedError
from ..model_config.model import ModelConfig
from ..untrusted import STOPS, printable, shown_name
from .config import AdapterConfig, judge_keys, read_adapter_config
from .content import Changes, ParameterChange, check_all_values, find_changes
from .findings import Ledger, Verdict
from .folder import CONFIG_NAME, AdapterFolder, check_links, open_folder, read_config_json, tokenizer_sha256
from .names import LORA_ROLES, BaseLayout, Renaming, TensorName, base_layout, choose_renaming, parse_name
from .parameters import resized_shapes
from .sites import Contents, LoraSite, find_sites
from .tensor_file import FLOAT_TYPES, TensorEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterAudit:
    """What became of one adapter.

    `reasons` say why the verdict is not `exact`; `notes` are remarks that change nothing. `content_sha256`
    identifies what the adapter computes (None when refused, or when values were not read). `changes` list how
    merging makes each base parameter it touches; `sites` are the LoRA pairs. Uses: `used`, `irrelevant: why` or
    `refused: why` for each key and tensor. `vocab_size` is the base's unless the adapter resized it.
    """

    name: str
    folder: Path
    verdict: Verdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    content_sha256: str | None
    sites: tuple[LoraSite, ...] = ()
    changes: tuple[ParameterChange, ...] = ()
    key_uses: Mapping[str, str] = field(default_factory=dict)
    tensor_uses: Mapping[str, str] = field(default_factory=dict)
    max_rank: int = 0
    weight_bytes: int = 0
    vocab_size: int = 0
    unties_embeddings: bool = False
    tokenizer_sha256: str = ""

    @property
    def has_own_tokenizer(self) -> bool:
        """Whether the folder ships a tokenizer or a chat template of its own."""
        return bool(self.tokenizer_sha256)

    @property
    def identity_sha256(self) -> str | None:
        """Hash of all that decides the adapter's answers: its content, and its tokenizer if it ships one."""
        return None if self.content_sha256 is None else self.identity_of(self.content_sha256)

    def identity_of(self, content_sha256: str) -> str:
        """`identity_sha256` of an adapter with this tokenizer and content."""
        if not self.tokenizer_sha256:
            return content_sha256
        return hashlib.sha256(f"{content_sha256} {self.tokenizer_sha256}".encode()).hexdigest()

    @property
    def touched_parameters(self) -> tuple[str, ...]:
        """Names of the base parameters that merging changes. A tied head is listed by its own name."""
        return tuple(change.parameter for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with every field."""
        return asdict(self) | {"folder": str(self.folder)}


def audit_adapter(folder: Path, model: ModelConfig, name: str, *, check_values: bool = True) -> AdapterAudit:
    """Audit one adapter. Never raises for a bad adapter: that is the verdict `refused`.

    With `check_values` every weight is read once (NaN, infinity, no effect, content hash); without, headers only.
    """
    folder = Path(folder)
    ledger = Ledger(name)
    layout = base_layout(model)
    found = _Found(layout.vocab_size)
    try:
        _examine(folder, layout, found, ledger, check_values=check_values)
    except AdapterRefusedError as error:
        ledger.refuse(str(error))
    except STOPS:
        raise
    except BaseException as error:
        # Also what no rule above has foreseen is this folder's own, and costs no other adapter anything.
        logger.debug("audit of %s", folder, exc_info=True)
        what = f"cannot be audited ({type(error).__name__}: {shown_name(str(error))}). Save the adapter again"
        ledger.refuse(what)
    return AdapterAudit(
        name=name,
        folder=folder,
        verdict=ledger.verdict,
        reasons=ledger.reasons(),
        notes=tuple(map(printable, ledger.notes)),
        content_sha256=None if ledger.is_refused else found.content_sha256,
        sites=found.sites,
        changes=found.changes.by_parameter,
        key_uses=dict(sorted(ledger.key_uses.items())),
        tensor_uses=dict(sorted(ledger.tensor_uses.items())),
        max_rank=max((site.rank for site in found.sites), default=0),
        weight_bytes=found.weight_bytes,
        vocab_size=found.vocab_size,
        unties_embeddings=layout.is_tied and found.changes.unties(layout.embedding),
        tokenizer_sha256=found.tokenizer_sha256,
    )


@dataclass(slots=True)
class _Found:
    """What an audit has found so far."""

    vocab_size: int
    sites: tuple[LoraSite, ...] = ()
    changes: Changes = field(default_factory=lambda: Changes((), ()))
    content_sha256: str | None = None
    weight_bytes: int = 0
    tokenizer_sha256: str = ""


def _examine(folder: Path, layout: BaseLayout, found: _Found, ledger: Ledger, *, check_values: bool) -> None:
    """Read the folder as far as it can be read. Raises whatever bad data can make the readers raise."""
    check_links(folder)
    raw, files = _read(folder, ledger)
    config = AdapterConfig()
    if raw is not None:
        config = read_adapter_config(raw, ledger)
        judge_keys(raw, ledger)
    found.weight_bytes = files.weight_bytes if files else 0
    found.tokenizer_sha256 = tokenizer_sha256(folder)
    if raw is None or files is None:
        return
    ledger.notes.extend(files.notes)
    contents = _contents(config, layout, files, ledger)
    found.vocab_size = contents.shapes[f"{layout.embedding}.weight"][0]
    found.sites = find_sites(contents, ledger)
    found.changes = find_changes(contents, found.sites, ledger)
    _check_all_used(contents, found.changes, ledger)
    if check_values and not ledger.is_refused:
        found.content_sha256 = check_all_values(found.changes, files.entries, ledger)


def find_adapters(root: Path) -> dict[str, Path]:
    """The adapter folders right below `root`, by folder name: those with a configuration or adapter weights."""
    return {
        folder.name: folder
        for folder in sorted(Path(root).iterdir())
        if folder.is_dir() and ((folder / CONFIG_NAME).exists() or any(folder.glob("adapter_model*")))
    }


def _read(folder: Path, ledger: Ledger) -> tuple[dict[str, Any] | None, AdapterFolder | None]:
    """Configuration and weight headers, each as far as it can be read."""
    raw, files = None, None
    try:
        raw = read_config_json(folder)
    except AdapterRefusedError as error:
        ledger.refuse(str(error))
    if folder.is_dir():
        try:
            files = open_folder(folder)
        except AdapterRefusedError as error:
            ledger.refuse(str(error))
    return raw, files


def _contents(config: AdapterConfig, layout: BaseLayout, files: AdapterFolder, ledger: Ledger) -> Contents:
    names = _parse_names(files.entries, ledger)
    adaptable = frozenset(layout.adaptable)
    renaming = choose_renaming((n.module for n in names if n.role in LORA_ROLES), adaptable)
    _check_one_to_one(names, renaming, ledger)
    if renaming.note:
        ledger.notes.append(renaming.note)
    draft = Contents(config, layout, renaming, names, files.entries, layout.parameters)
    return Contents(config, layout, renaming, names, files.entries, resized_shapes(draft, ledger))


def _parse_names(entries: Mapping[str, TensorEntry], ledger: Ledger) -> tuple[TensorName, ...]:
    """Names of all tensors that are of a known form and type, each part of a module at most once."""
    parsed: dict[tuple[object, ...], TensorName] = {}
    adapters: set[str] = set()
    for key, entry in entries.items():
        name = parse_name(key)
        if name is None:
            why = "not a tensor this audit knows, so what it does is not known. Save a plain LoRA adapter with PEFT"
            ledger.refuse_tensors([key], "unknown tensor", why)
        elif entry.dtype not in FLOAT_TYPES:
            why = f"stored as {entry.dtype}, expected one of {', '.join(FLOAT_TYPES)}. Save the adapter unquantised"
            ledger.refuse_tensors([key], "dtype", why)
        elif (slot := (name.module, name.role, name.parameter)) in parsed:
            why = f"plays the same part as {shown_name(parsed[slot].key)}, unclear which one is meant. Remove one"
            ledger.refuse_tensors([key], "twice", why)
        else:
            parsed[slot] = name
            adapters |= {name.adapter} if name.adapter else set()
    if len(adapters) > 1:
        ledger.refuse(
            f"tensor names hold several adapters ({', '.join(sorted(adapters))}), expected one. "
            "Save each adapter to its own folder"
        )
    return tuple(parsed.values())


def _check_one_to_one(names: tuple[TensorName, ...], renaming: Renaming, ledger: Ledger) -> None:
    """Two modules of the file must not stand for one module of the base: one of them would be lost."""
    trained_of: dict[str, str] = {}
    for name in names:
        first = trained_of.setdefault(renaming.to_base(name.module), name.module)
        if first != name.module:
            why = f"means the same layer as {first}, unclear which one is meant. Remove one"
            ledger.refuse_tensors([name.key], "same layer", why)


def _check_all_used(contents: Contents, changes: Changes, ledger: Ledger) -> None:
    """Refuse tensors without a use, and an adapter that changes nothing."""
    silent = [key for key in contents.entries if key not in ledger.tensor_uses]
    ledger.refuse_tensors(
        silent, "unused tensor", "nothing in the configuration uses this tensor. Save the adapter again with PEFT"
    )
    if not changes.by_parameter and not ledger.is_refused:
        ledger.refuse("no module of the base matches, so this adapter would change nothing. Check target_modules")


AUDIT_COLUMNS = ("adapter", "verdict", "rank", "layers", "MB", "remarks")


def audit_rows(audits: Iterable[AdapterAudit]) -> list[tuple[str, ...]]:
    """One row per adapter, in the order of `AUDIT_COLUMNS`; remarks are the reasons, then the notes."""
    return [
        (
            audit.name,
            audit.verdict,
            str(audit.max_rank),
            str(len(audit.sites)),
            f"{audit.weight_bytes / 1e6:.1f}",
            "\n".join(audit.reasons + audit.notes + _own_tokenizer(audit)),
        )
        for audit in audits
    ]


def _own_tokenizer(audit: AdapterAudit) -> tuple[str, ...]:
    return ("has its own tokenizer or chat template",) if audit.has_own_tokenizer else ()
