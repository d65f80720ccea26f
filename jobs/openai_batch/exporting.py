"""`export_batch`: writes the rows of a job's output as an output file of OpenAI's Batch API, a line each, in bounded
memory.

An output always gives the same bytes: ids are made from the job's id and the row's, and every response has the job's
time of creation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..contents import part_name
from ..errors import JobRequestError, StorageError, naming_damage
from ..input.columns import (
    ANSWER_FIELDS,
    ASKED_FIELDS,
    DEFAULT_ID_COLUMN,
    LOGPROB_FIELDS,
    SAMPLE_FIELD,
    SAMPLING_PARAMS,
    output_name,
    readable_values,
    role_values,
)
from ..input.completions import OF_ROWS, completions, listed
from ..progress import counted
from ..record import JobRecord
from ..stages import refuse_stages
from ..status.job_status import read_status
from ..storage.redaction import redacted_url, storage_reason
from ..storage.single_file import replaced_file
from ..storage.urls import absolute
from ..store import JobStore
from .importing import ERROR_COLUMN, MODEL_COLUMN

_BATCH_ROWS = 1024
_NAMES_SHOWN = 10
# Log-probability that OpenAI writes for tokens that are as good as impossible: JSON has no infinite numbers.
_LEAST_LOGPROB = -9999.0
# One row of a part: role -> value, of the columns from which responses are made.
_Row = dict[str, Any]


def export_batch(
    store: JobStore,
    results: str,
    storage_options: Mapping[str, Any],
    *,
    is_partial: bool = False,
    adapter: str | None = None,
) -> str:
    """Write the rows of the job in `store` as lines of JSON, in the order of its parts. Returns a line for people: the
    file, without passwords and signatures, and its numbers of responses and errors. `is_partial`: also while parts are
    missing. `adapter`: the adapter ("": base model) whose rows are written; None for all rows.

    Raises `JobRequestError` for an output without a job, for a job that has not finished, and for a file inside its
    output; `StorageError` when storage fails. After an error the file is as it was.
    """
    status = read_status(store)
    _check(store, results)
    refuse_stages(status.record, status.output)
    if not (status.is_finished or is_partial):
        raise JobRequestError(
            f"output={status.output!r}: this job has not finished. Wait for it, `lorabatch resume` it, or export the "
            "parts that are there with --partial."
        )
    _check_adapter(status.record, status.output, adapter)
    num_lines = num_errors = 0
    layout = _Layout.of(status.record)
    with replaced_file(results, storage_options) as file:
        groups = _Groups()

        def write(of_row: list[_Row]) -> None:
            nonlocal num_lines, num_errors
            line = layout.line(of_row)
            num_lines += 1
            num_errors += line["error"] is not None
            file.write(json.dumps(line).encode() + b"\n")

        for shard_id in sorted(store.committed_parts()):
            for row in _rows(store, shard_id, layout):
                if adapter not in (None, row.get("adapter") or ""):
                    continue
                if found := layout.completions(row) if layout.has_lists else groups.add(row):
                    write(found)
        for found in groups.unfinished():
            write(found)
        store.check_holder(status.record.job_id)
    return f"{redacted_url(results)}: {counted(num_lines - num_errors, 'response')}, {counted(num_errors, 'error')}"


def _check_adapter(record: JobRecord, shown: str, adapter: str | None) -> None:
    """Raise `JobRequestError` for a sweep of which no adapter is chosen, and for an adapter that the job does not have.
    `shown`: URL of the output.
    """
    names = [name or "" for name in record.swept] or ["", *(each.name for each in record.adapters)]
    if adapter is None and record.swept:
        raise JobRequestError(
            f"output={shown!r}: a sweep has answers of {len(names)} adapters to each request, and a results file has "
            f"one. Choose an adapter with --adapter: {_listed(names)}."
        )
    if adapter is not None and adapter not in names:
        raise JobRequestError(
            f"adapter={adapter!r}: the job in {shown!r} has no such adapter. It has {_listed(names)}."
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) if name else "'' (base model)" for name in names[:_NAMES_SHOWN])
    return shown + (", …" if len(names) > _NAMES_SHOWN else "")


def _check(store: JobStore, results: str) -> None:
    shown = redacted_url(results)
    if not results.lower().endswith(".jsonl"):
        raise JobRequestError(f"results={shown!r}: expected a name that ends with .jsonl.")
    if absolute(results).startswith(f"{absolute(store.url).rstrip('/')}/"):
        raise JobRequestError(
            f"results={shown!r}: lies in the job's output, whose files are read as Parquet. Name a file elsewhere."
        )


class _Groups:
    """Puts completions of one row together. A row's completions are near each other, so few groups wait at a time."""

    def __init__(self) -> None:
        self._waiting: dict[Any, list[_Row]] = {}

    def add(self, row: _Row) -> list[_Row]:
        """Adds one completion. Returns all completions of its row when this was the last one missing, else none."""
        if row["finish_reason"] == "error" and not row["attempts"]:
            return [] if row.get("sample") else [row]  # wrong before any engine saw it, in all its completions alike
        group = self._waiting.setdefault(row["id"], [])
        group.append(row)
        return self._waiting.pop(row["id"]) if len(group) == _num_completions(row) else []

    def unfinished(self) -> Iterator[list[_Row]]:
        """The completions found so far of each row whose other completions are in missing parts."""
        yield from self._waiting.values()


def _num_completions(row: _Row) -> int:
    continuation = row.get("continuation")
    if continuation is not None:
        return len(continuation) if isinstance(continuation, list) else 1
    return int(row["n"])


def _rows(store: JobStore, shard_id: int, layout: _Layout) -> Iterator[_Row]:
    """The rows of a part, with the columns from which responses are made."""
    name = part_name(shard_id)
    try:
        with naming_damage(name), store.open_part(shard_id) as part:
            file = pq.ParquetFile(part)
            columns = layout.columns_of(file.schema_arrow)
            for batch in file.iter_batches(_BATCH_ROWS, columns=sorted(set(columns.values()))):
                found = {key: readable_values(role_values(batch, column)) for key, column in columns.items()}
                for values in zip(*found.values(), strict=True):
                    row = dict(zip(found, values, strict=True))
                    yield row | {"n": row.get("n") or layout.num_completions}
    except StorageError:
        raise
    except OSError as error:
        reason = storage_reason(error, store.location.storage_options, store.url)
        raise StorageError(f"cannot read {name}: {reason}") from None


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of one job's rows, from which lines are made."""

    #: Id of the job.
    job_id: str
    #: Time at which the job was created, in seconds since the epoch.
    created: int
    #: Role -> column of the input.
    roles: Mapping[str, str]
    #: Name of the base model in responses.
    base_model: str
    #: Completions of a row that does not give a number.
    num_completions: int
    #: Whether a row has its completions as lists.
    has_lists: bool = False
    #: Text before the names of lorabatch's own columns.
    prefix: str = ""
    #: Whether a chat template has rendered the prompts.
    is_chat: bool = False

    @classmethod
    def of(cls, record: JobRecord) -> _Layout:
        """The layout of a frozen job's rows."""
        return cls(
            job_id=record.job_id,
            created=int(datetime.fromisoformat(record.created_at).timestamp()),
            roles=record.input.roles,
            base_model=redacted_url(record.model.url).rstrip("/").rpartition("/")[2],
            num_completions=record.spec.sampling.n,
            has_lists=record.has_lists,
            prefix=output_name(record, ""),
            is_chat=record.renders_messages,
        )

    def columns_of(self, schema: pa.Schema) -> dict[str, str]:
        """Role -> column, for the columns that a part with this schema has. Raises `KeyError` when a required column is
        missing.
        """
        columns = {column.name: f"{self.prefix}{column.name}" for column in ANSWER_FIELDS}
        columns["id"] = self.roles.get("id", DEFAULT_ID_COLUMN)
        columns |= {role: self.roles[role] for role in ("adapter", "n", "continuation") if role in self.roles}
        added = (*LOGPROB_FIELDS, *ASKED_FIELDS.values(), SAMPLE_FIELD)
        # an input from elsewhere may have these columns with any type
        shape = listed if self.has_lists else (lambda field: field)
        columns |= {
            field.name: f"{self.prefix}{field.name}"
            for field in added
            if shape(field).with_name(f"{self.prefix}{field.name}") in schema
        }
        for name in (MODEL_COLUMN, ERROR_COLUMN):
            # an input from elsewhere may have this column with any type
            if name in schema.names and pa.types.is_string(schema.field(name).type):
                columns[name] = name
        for column in columns.values():
            schema.field(column.partition(".")[0] if column.startswith(f"{SAMPLING_PARAMS}.") else column)
        return columns

    def completions(self, row: _Row) -> list[_Row]:
        """The completions of a row that has them as lists, each with its number as `sample`."""
        lists = row.keys() - {*OF_ROWS, *self.roles, "id", "n", MODEL_COLUMN, ERROR_COLUMN}
        return [each | {"sample": number} for number, each in enumerate(completions(row, lists))]

    def line(self, of_row: list[_Row]) -> dict[str, Any]:
        """The line of one row from its completions; an error when one of them is an error."""
        row = next((each for each in of_row if each["finish_reason"] == "error"), of_row[0])
        custom_id = None if row["id"] is None else str(row["id"])
        name = blake2b(f"{self.job_id}\n{custom_id}".encode(), digest_size=12).hexdigest()
        line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": custom_id}
        if row["finish_reason"] == "error":
            error = {
                # no engine has seen it: the request was wrong
                "code": "server_error" if row["attempts"] else "invalid_request",
                "message": row.get(ERROR_COLUMN) or row["error"],
            }
            return line | {"response": None, "error": error}
        response = {"status_code": 200, "request_id": f"req_{name}", "body": self._body(of_row, name)}
        return line | {"response": response, "error": None}

    def _body(self, of_row: list[_Row], name: str) -> dict[str, Any]:
        prefix, kind, choice_of = _CHAT if self.is_chat else _COMPLETION
        ordered = sorted(of_row, key=lambda row: row.get("sample") or 0)
        row, num_tokens = ordered[0], sum(each["completion_tokens"] for each in ordered)
        return {
            "id": f"{prefix}-{name}",
            "object": kind,
            "created": self.created,
            "model": row.get(MODEL_COLUMN) or row.get("adapter") or self.base_model,
            "choices": [{"index": each.get("sample") or 0, **choice_of(each)} for each in ordered],
            "usage": {
                "prompt_tokens": row["prompt_tokens"],
                "completion_tokens": num_tokens,
                "total_tokens": row["prompt_tokens"] + num_tokens,
            },
        }


def _chat(row: _Row) -> dict[str, Any]:
    message = {"role": "assistant", "content": row["completion"], "refusal": None}
    if row.get("reasoning") is not None:
        message["reasoning_content"] = row["reasoning"]  # not OpenAI's; the name that others have for it
    reason = row["finish_reason"]
    if row.get("tool_calls"):
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in row["tool_calls"]
        ]
        reason = "tool_calls" if reason == "stop" else reason
    return {"message": message, "logprobs": _logprobs(row, _chat_logprobs), "finish_reason": reason}


def _completion(row: _Row) -> dict[str, Any]:
    logprobs = _logprobs(row, _completion_logprobs)
    return {"text": row["completion"], "logprobs": logprobs, "finish_reason": row["finish_reason"]}


# Prefix of the id, name of the object, and function that makes a choice.
_CHAT = ("chatcmpl", "chat.completion", _chat)
_COMPLETION = ("cmpl", "text_completion", _completion)
# A token's name, bytes and log-probability.
_Token = tuple[str, list[int] | None, float]


def _logprobs(row: _Row, shape: Callable[[list[_Token], list[list[_Token]]], dict[str, Any]]) -> Any:
    """Log-probabilities of a completion's tokens, named by their texts, or by their ids when the output has no texts.
    None for a completion without log-probabilities.
    """
    if row.get("token_logprobs") is None:
        return None
    unknown = [None] * len(row["token_ids"])
    texts, data = row.get("token_texts") or unknown, row.get("token_bytes") or unknown
    tokens = [_token(*each) for each in zip(row["token_ids"], row["token_logprobs"], texts, data, strict=True)]
    tops = row.get("token_top_logprobs") or [[]] * len(tokens)
    return shape(
        tokens,
        [[_token(t["token_id"], t["logprob"], t.get("text"), t.get("bytes")) for t in top] for top in tops],
    )


def _token(token_id: int, logprob: float, text: str | None, data: bytes | None) -> _Token:
    name = f"token_id:{token_id}" if text is None else text
    return name, None if data is None else list(data), max(logprob, _LEAST_LOGPROB)


def _chat_logprobs(tokens: list[_Token], tops: list[list[_Token]]) -> dict[str, Any]:
    def entry(token: _Token) -> dict[str, Any]:
        return {"token": token[0], "bytes": token[1], "logprob": token[2]}

    content = [entry(token) | {"top_logprobs": list(map(entry, top))} for token, top in zip(tokens, tops, strict=True)]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: list[_Token], tops: list[list[_Token]]) -> dict[str, Any]:
    names, values = [name for name, _, _ in tokens], [value for _, _, value in tokens]
    top = [{name: value for name, _, value in each} for each in tops] if any(tops) else None
    return {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": None}
