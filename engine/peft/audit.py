"""Audits one adapter folder against one base: it is applied exactly, or refused by name.

Every key of the configuration and every tensor is used, known to be irrelevant, or a reason to refuse. `audit_rows`
gives audits as rows of text, for tables in a terminal or a document.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ...system.html import facts_table
from ...system.untrusted import MALFORMED, STOPS, printable, shortened, shown_name
from ..errors import AdapterRefusedError, ModelFilesError
from ..model_config.model import ModelConfig
from ..tokenizer_files import has_vocabulary, tokenizer_sha256, whose_tokenizer
from .config import AdapterConfig
from .content import check_all_values, find_changes
from .dialects import translate
from .findings import Ledger, Verdict
from .folder import (
    CONFIG_NAME,
    GGUF_SUFFIX,
    ZERO3,
    AdapterFolder,
    check_links,
    is_adapter,
    is_in_gguf,
    open_folder,
    parse_config,
    read_config,
)
from .heads import SCORE_WEIGHT, labels_of, task_of
from .names import LORA_ROLES, BaseLayout, Renaming, TensorName, base_layout, choose_renaming, parse_name
from .other_engines import EngineFindings, in_words, other_engines
from .parameters import Changes, resized_shapes
from .sites import MAX_NAMES_IN_NOTE, Contents, LoraSite, ParameterChange, find_sites, targeted_modules
from .tensor_file import FLOAT_TYPES, MAX_SHARED, MAX_SHARED_BYTES, TensorEntry

logger = logging.getLogger(__name__)


# Why tensors of towers beside the text model do not matter.
_OF_TOWERS = "of the vision tower, which text does not reach"
_UNREAD = "of a layer that reads the keys and values of an earlier one"
_IN_TOWER = f"irrelevant: {_OF_TOWERS}"
#: Version of the JSON of an audit: fields may be added within one, and keep their name and meaning.
JSON_FORMAT = 1


@dataclass(frozen=True, slots=True)
class AdapterAudit:
    """Findings about one adapter: its verdict, and how merging would change the base."""

    #: Name of the adapter.
    name: str
    #: Its folder.
    folder: Path
    #: Whether it is applied exactly.
    verdict: Verdict
    #: Why the verdict is not `exact`.
    reasons: tuple[str, ...]
    #: Remarks that change nothing.
    notes: tuple[str, ...]
    #: Hash of what the adapter computes; None when it is refused, or values were not read.
    content_sha256: str | None
    #: Its LoRA pairs.
    sites: tuple[LoraSite, ...] = ()
    #: How merging makes each base parameter that it touches.
    changes: tuple[ParameterChange, ...] = ()
    #: Key of the configuration -> `used`, `irrelevant: why` or `refused: why`.
    key_uses: Mapping[str, str] = field(default_factory=dict)
    #: Tensor -> `used`, `irrelevant: why` or `refused: why`.
    tensor_uses: Mapping[str, str] = field(default_factory=dict)
    #: Other engine (`peft`, `vllm`) -> kind of finding (`leaves_out`: tensors; `refuses`, `differs`: clauses) -> what
    #: is known of how it reads the adapter.
    other_engines: Mapping[str, EngineFindings] = field(default_factory=dict)
    #: Largest rank of a pair; 0 without pairs.
    max_rank: int = 0
    #: Stored bytes of all tensors.
    weight_bytes: int = 0
    #: Tokens of the vocabulary: the base's unless the adapter resized it.
    vocab_size: int = 0
    #: Whether it makes embedding and head differ that are one in the base.
    unties_embeddings: bool = False
    #: Hash of its own tokenizer and chat templates; "" where it ships none.
    tokenizer_sha256: str = ""
    #: Whose tokenizer serves its rows, as a clause; "" for the base's alone.
    tokenizer: str = ""
    #: Whether it ships a vocabulary.
    has_own_vocabulary: bool = False
    #: Text that stands before an answer in conversations and is missing at the end of its prompts; "" where nothing is
    #: missing.
    missing_header: str = ""
    #: Tensors of the vision tower beside a text model, which are not used.
    num_tower_tensors: int = 0
    #: Its tensors by PEFT's names, where its files have others; empty for PEFT's own.
    sources: Mapping[str, TensorEntry] = field(default_factory=dict)
    #: Task of its rows unless they say otherwise: `classify`, `embed`, or "" for text.
    task: Literal["", "classify", "embed"] = ""
    #: Names of the labels of its head; empty where it has no head.
    labels: tuple[str, ...] = ()
    #: Kind of its head's numbers (`model_config.classifier.PROBLEM_TYPES`); "" where it has no head.
    problem_type: str = ""

    def __repr__(self) -> str:
        why = f": {shortened(self.reasons[0])}" if self.reasons else f", rank {self.max_rank}"
        return f"<AdapterAudit: {self.name!r} {self.verdict}{why}>"

    def _repr_html_(self) -> str:
        facts = {
            "verdict": self.verdict,
            "reasons": "\n".join(self.reasons),
            "notes": "\n".join(self.notes),
            "rank": self.max_rank or None,
            "bytes": self.weight_bytes,
            "pairs": len(self.sites),
            "content": self.content_sha256,
        }
        return facts_table(f"Adapter {self.name}", facts)

    @property
    def has_own_tokenizer(self) -> bool:
        """Whether the folder ships a tokenizer or a chat template of its own."""
        return bool(self.tokenizer_sha256)

    @property
    def identity_sha256(self) -> str | None:
        """Hash of all that decides the adapter's answers: its content, and its tokenizer if it ships one."""
        return None if self.content_sha256 is None else self.identity_of(self.content_sha256)

    def identity_of(self, content_sha256: str) -> str:
        """`identity_sha256` of an adapter with this tokenizer, these labels and this content."""
        of_labels = [json.dumps([self.labels, self.problem_type])] if self.labels else []
        parts = [*([self.tokenizer_sha256] if self.tokenizer_sha256 else []), *of_labels]
        return hashlib.sha256(" ".join([content_sha256, *parts]).encode()).hexdigest() if parts else content_sha256

    @property
    def touched_parameters(self) -> tuple[str, ...]:
        """Names of the base parameters that merging changes. A tied head is listed by its own name."""
        return tuple(change.parameter for change in self.changes if change.parameter != SCORE_WEIGHT)

    @property
    def head(self) -> ParameterChange | None:
        """The head of a classifier; None for an adapter without one."""
        return next((change for change in self.changes if change.parameter == SCORE_WEIGHT), None)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready object with every field but `sources`; `docs/reference/adapters.md` describes its form."""
        uses = {"key_uses": dict(sorted(self.key_uses.items())), "tensor_uses": dict(sorted(self.tensor_uses.items()))}
        found = {"format": JSON_FORMAT} | asdict(self) | uses | {"folder": str(self.folder)}
        del found["sources"]
        return found


def audit_adapter(
    folder: Path, model: ModelConfig, name: str, *, check_values: bool = True, base_name: str = ""
) -> AdapterAudit:
    """Audit one adapter. Never raises for a bad adapter: that is the verdict `refused`.

    With `check_values` every weight is read once (NaN, infinity, no effect, content hash); without, headers only.
    `base_name`: what the served base is called, for messages about an adapter that names another one; "": unknown.
    """
    folder, layout = Path(folder), base_layout(model)
    read = _read(folder)
    judged = _judge(read, layout)
    ledger = read.ledger | judged.ledger
    head = judged.changes.by_parameter.get(SCORE_WEIGHT)
    labels: tuple[str, ...] = ()
    problem_type = ""
    if head is not None:
        of_labels = Ledger()
        with _refusing(of_labels, folder):
            labels, problem_type = labels_of(folder, _raw(read.config), head.shape[0], layout)
        ledger |= of_labels
    content_sha256 = None
    if check_values and read.files is not None and not ledger.is_refused:
        of_values = Ledger()
        with _refusing(of_values, folder):
            content_sha256 = check_all_values(folder, judged.changes, judged.entries, of_values)
        ledger |= of_values
    other_base = _other_base(read.config, base_name)
    return AdapterAudit(
        name=name,
        folder=folder,
        verdict=ledger.verdict,
        reasons=ledger.reasons(name, other_base) if ledger.is_refused else ledger.reasons(name),
        notes=tuple(map(printable, [*ledger.notes, *([other_base] if other_base and not ledger.is_refused else [])])),
        content_sha256=None if ledger.is_refused else content_sha256,
        sites=judged.sites,
        changes=tuple(judged.changes.by_parameter.values()),
        key_uses=ledger.key_uses,
        tensor_uses=ledger.tensor_uses,
        other_engines=judged.other_engines,
        max_rank=max((site.rank for site in judged.sites), default=0),
        weight_bytes=read.files.weight_bytes if read.files else 0,
        vocab_size=judged.vocab_size,
        unties_embeddings=layout.is_tied and judged.changes.unties(layout.embedding),
        tokenizer_sha256=read.tokenizer_sha256,
        tokenizer=whose_tokenizer(folder) if read.tokenizer_sha256 else "",
        has_own_vocabulary=bool(read.tokenizer_sha256) and has_vocabulary(folder),
        sources=judged.entries if read.files and judged.entries.keys() != read.files.entries.keys() else {},
        task="" if ledger.is_refused else task_of(_raw(read.config), head is not None),
        labels=labels,
        problem_type=problem_type,
        num_tower_tensors=sum(use == _IN_TOWER for use in ledger.tensor_uses.values()),
    )


def _raw(content: bytes | None) -> Mapping[str, Any]:
    """The configuration of an adapter; empty where it cannot be read."""
    with suppress(AdapterRefusedError, *MALFORMED):
        return parse_config(content or b"{}")
    return {}


def _other_base(content: bytes | None, base_name: str) -> str:
    """A clause that the configuration names another base than the one that is served; "" where it does not."""
    named: Any = None
    with suppress(AdapterRefusedError, *MALFORMED):
        raw = parse_config(content or b"{}")
        named = raw.get("base_model_name_or_path") or raw.get("model")
    if not base_name or not isinstance(named, str) or not named.strip():
        return ""
    own, served = (name.strip().replace("\\", "/").rstrip("/").rpartition("/")[2] for name in (named, base_name))
    if own.lower() == served.lower():
        return ""
    return f"its configuration names the base {shown_name(own)}, the one that is served is {shown_name(served)}"


@contextmanager
def _refusing(ledger: Ledger, folder: Path | None = None) -> Iterator[None]:
    """Enter whatever bad data makes its readers raise as a reason to refuse the adapter."""
    try:
        yield
    except (AdapterRefusedError, ModelFilesError) as error:
        ledger.refuse(str(error).rstrip("."))
    except STOPS:
        raise
    except BaseException as error:
        # An error that no rule above has foreseen is this folder's own, too, and costs no other adapter anything.
        logger.debug("audit of %s", folder or "an adapter", exc_info=True)
        what = f"cannot be audited ({type(error).__name__}: {shown_name(str(error))}). Save the adapter again"
        ledger.refuse(what)


@dataclass(slots=True)
class _Read:
    """Content of a folder, as far as it can be read; `ledger` says what cannot."""

    ledger: Ledger = field(default_factory=Ledger)
    config: bytes | None = None
    files: AdapterFolder | None = None
    tokenizer_sha256: str = ""


def _read(folder: Path) -> _Read:
    read = _Read()
    with _refusing(read.ledger, folder):
        check_links(folder)
        needs_config = (folder / CONFIG_NAME).exists() or not is_in_gguf(folder)
        if needs_config:
            with _refusing(read.ledger, folder):
                read.config = read_config(folder)
        if folder.is_dir():
            with _refusing(read.ledger, folder):
                read.files = open_folder(folder)
                read.config = read.config if needs_config else b"{}"
        read.tokenizer_sha256 = tokenizer_sha256(folder)
    return read


@dataclass(slots=True)
class _Judged:
    """Judgement of an adapter by its configuration and headers. Adapters with equal ones may share it: it does not
    change once it is returned.
    """

    #: Tokens of the vocabulary, with the adapter's resizing.
    vocab_size: int
    #: Uses of keys and tensors, and refusals.
    ledger: Ledger = field(default_factory=Ledger)
    #: Its tensors by PEFT's names.
    entries: Mapping[str, TensorEntry] = field(default_factory=dict)
    #: Its LoRA pairs.
    sites: tuple[LoraSite, ...] = ()
    #: Changes of base parameters.
    changes: Changes = field(default_factory=Changes)
    #: Findings about other engines.
    other_engines: Mapping[str, EngineFindings] = field(default_factory=dict)


def _judge(read: _Read, layout: BaseLayout) -> _Judged:
    if read.config is None or read.files is None:
        return _judgement(read.config, AdapterFolder((), ()), layout)
    is_shared = read.files.is_shared and len(read.config) <= MAX_SHARED_BYTES
    judgement = _shared_judgement if is_shared else _judgement
    return judgement(_in_order(read.config), read.files, layout)


def _in_order(content: bytes) -> bytes:
    """A configuration with its target modules in order: PEFT writes a set, which has another order in each process."""
    with suppress(AdapterRefusedError, *MALFORMED):
        raw = parse_config(content)
        targets = raw.get("target_modules")
        if isinstance(targets, list) and all(isinstance(name, str) for name in targets):
            return json.dumps(raw | {"target_modules": sorted(targets)}).encode()
    return content


def _judgement(content: bytes | None, files: AdapterFolder, layout: BaseLayout) -> _Judged:
    """The judgement of one adapter. `content`: its configuration; None if there is none. `files`: without headers where
    they cannot be read.
    """
    judged = _Judged(layout.vocab_size)
    ledger = judged.ledger
    with _refusing(ledger):
        if content is None:
            return judged
        raw = parse_config(content)
        config, judged.entries = translate(files.dialect, raw, files.headers, layout, ledger)
        if layout.says_tied:
            _judge_ties(config, ledger)
        if not files.headers:
            return judged
        ledger.notes.extend(files.notes)
        shells = [key for key, entry in judged.entries.items() if entry.shape == (0,)]
        if shells:
            ledger.refuse_tensors(shells, "ZeRO-3", f"has shape [0], {ZERO3}")
            return judged
        contents = _contents(config, layout, judged.entries, ledger)
        judged.vocab_size = contents.shapes[f"{layout.embedding}.weight"][0]
        judged.sites = find_sites(contents, ledger)
        judged.other_engines = other_engines(contents, raw, files.entries, files.dialect, targeted_modules(contents))
        judged.changes = find_changes(contents, raw, judged.sites, ledger)
        _check_all_used(contents, judged.changes, ledger)
    return judged


def _judge_ties(config: AdapterConfig, ledger: Ledger) -> None:
    """PEFT goes by `tie_word_embeddings` where transformers goes by the tensors, so that what is meant is unclear."""
    for key in ("ensure_weight_tying", "trainable_token_indices"):
        value = getattr(config, key)
        if value:
            ledger.refuse_key(
                key,
                value,
                "the base's config.json ties its head to the embedding, and its checkpoint holds another head. Set "
                "tie_word_embeddings to false in the base's config.json, where that is what the adapter was trained on",
            )


# The adapters of a job are most often trained alike: one model, one configuration, one form of the files.
_shared_judgement = lru_cache(maxsize=MAX_SHARED)(_judgement)


def find_adapter_folders(root: Path) -> dict[str, Path]:
    """The adapters right below `root`, by name: folders with a configuration or weights, and files in GGUF."""
    entries = sorted(Path(root).iterdir())
    found = {folder.name: folder for folder in entries if folder.is_dir() and is_adapter(folder)}
    files = [file for file in entries if file.suffix == GGUF_SUFFIX and file.is_file()]
    return {file.stem: file for file in files} | found


def _contents(
    config: AdapterConfig, layout: BaseLayout, entries: Mapping[str, TensorEntry], ledger: Ledger
) -> Contents:
    passed_over = _modules_passed_over(entries, layout, ledger)
    read = {key: entry for key, entry in entries.items() if not (layout.is_in_tower(key) or layout.is_unread(key))}
    names = _parse_names(read, ledger)
    adaptable = frozenset(layout.adaptable)
    renaming = choose_renaming((n.module for n in names if n.role in LORA_ROLES), adaptable)
    _check_one_to_one(names, renaming, ledger)
    if renaming.note:
        ledger.notes.append(renaming.note)
    draft = Contents(config, layout, renaming, names, entries, layout.parameters, passed_over)
    return replace(draft, shapes=resized_shapes(draft, ledger))


def _modules_passed_over(entries: Mapping[str, TensorEntry], layout: BaseLayout, ledger: Ledger) -> tuple[str, ...]:
    """Modules with tensors that no answer depends on: those of towers beside the text model, which no token of text
    reaches, and keys and values of layers that read those of another.
    """
    towers = [key for key in entries if layout.is_in_tower(key)]
    unread = [key for key in entries if layout.is_unread(key) and not layout.is_in_tower(key)]
    for keys, why in ((towers, _OF_TOWERS), (unread, _UNREAD)):
        for key in keys:
            ledger.ignore_tensor(key, why)
    if towers:
        ledger.notes.append(f"exact for text; {len(towers)} tensors of the vision tower are not used")
    if unread:
        ledger.notes.append(f"{len(unread)} tensors are {_UNREAD}, and are not used")
    return tuple(dict.fromkeys(name.module for name in map(parse_name, towers + unread) if name is not None))


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
    """Refuse two modules of the file that stand for one module of the base: one of them would be lost."""
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
    if not changes.by_parameter and not ledger.is_refused and any(map(contents.layout.is_in_tower, contents.entries)):
        ledger.refuse(
            "all its tensors are of the vision tower, so this adapter would change nothing for text. Train it on "
            "layers of the text model, too"
        )
    if not changes.by_parameter and not ledger.is_refused:
        ledger.refuse("no module of the base matches, so this adapter would change nothing. Check target_modules")


AUDIT_COLUMNS = ("adapter", "verdict", "rank", "layers", "MB", "remarks")


def audit_rows(audits: Sequence[AdapterAudit]) -> tuple[list[tuple[str, ...]], list[str]]:
    """One row per adapter, in the order of `AUDIT_COLUMNS`; remarks are the reasons, then the notes. Behind the rows,
    the notes that several adapters share, each once with the adapters' names.
    """
    holders: dict[str, list[str]] = {}
    for audit in audits:
        for note in audit.notes:
            holders.setdefault(note, []).append(audit.name)
    shared = {note: names for note, names in holders.items() if len(names) > 1}
    rows: list[tuple[str, ...]] = [
        (
            audit.name,
            audit.verdict,
            str(audit.max_rank),
            str(len(audit.sites)),
            f"{audit.weight_bytes / 1e6:.1f}",
            "\n".join(
                (
                    *audit.reasons,
                    *(note for note in audit.notes if note not in shared),
                    *([audit.tokenizer] if audit.tokenizer else []),
                    *_task_in_words(audit),
                    *in_words(audit.other_engines),
                )
            ),
        )
        for audit in audits
    ]
    return rows, [f"{_few_names(names)}: {note}" for note, names in shared.items()]


def _task_in_words(audit: AdapterAudit) -> list[str]:
    """The task of an adapter's rows as a clause; none for text."""
    if audit.labels:
        return [f"classifies by {len(audit.labels)} labels: {printable(_few_names(audit.labels))}"]
    return ["embeds its rows"] if audit.task == "embed" else []


def _few_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES_IN_NOTE
    return ", ".join(names[:MAX_NAMES_IN_NOTE]) + (f" and {more} more" if more > 0 else "")
