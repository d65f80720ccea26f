"""`StageReader`: makes the requests of a stage from the values of rows, as the index makes those of a job's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ...engine.request import Request
from ...engine.text.chat.prompt_template import PromptTemplate
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...jobs.input.adapter_names import adapter_problem
from ...jobs.options.stages import Stage
from ...jobs.record import JobRecord
from ...jobs.spec import JobSpec
from .answers import RowAnswer
from .chunk import IndexJob
from .fingerprints import row_fingerprint
from .prompt_reader import PromptReader
from .row_checks import RowDraft, templated_messages
from .row_program import Ask, Flow

#: A request with its fingerprint, or the error in place of its answer.
MadeRequest = tuple[bytes, Request | RowAnswer]


@dataclass(frozen=True, slots=True)
class AskOfRow:
    """An ask with the row that it is of."""

    #: Number of the row in its shard.
    row: int
    #: Id by which requests of the row are told apart in an engine.
    request_id: str
    #: Id of the row.
    row_id: Any
    #: Name of the adapter that answers; None for the base model.
    adapter: str | None
    #: The request that is to be made.
    ask: Ask


class StageReader:
    """Makes requests of asks, all asks of one stage together. `spec`: the job with its secrets. `tokenizer_of`: the
    tokenizer of an adapter's rows.
    """

    def __init__(
        self, record: JobRecord, spec: JobSpec, flow: Flow, tokenizer_of: Callable[[IndexJob, str | None], Tokenizer]
    ) -> None:
        self._record = record
        self._spec = spec
        self._flow = flow
        self._tokenizer_of = tokenizer_of
        self._adapters = {adapter.name: adapter for adapter in record.adapters}
        self._readers: dict[str, tuple[IndexJob, PromptReader]] = {}

    def read(self, asks: Sequence[AskOfRow]) -> list[tuple[list[MadeRequest], list[dict[str, Any]]]]:
        """For each ask, all of one stage, the requests of its completions, and the messages that were rendered; no
        messages for a prompt without a chat template. An ask that cannot be made has one error.
        """
        stage = asks[0].ask.stage
        scopes = [{name: one.ask.scope.get(name) for name in self._flow.reads[stage.name]} for one in asks]
        given: dict[str, list[Any]] = {}
        conversations: list[list[dict[str, Any]] | str] = [[] for _ in asks]
        if stage.messages:
            conversations = self._conversations(stage, asks, scopes)
        else:
            given = {name: [scope[name] for scope in scopes] for name in self._flow.reads[stage.name]}
        right = [place for place, messages in enumerate(conversations) if not isinstance(messages, str)]
        drafts = self._drafts(stage, [asks[place] for place in right], given, [conversations[place] for place in right])
        made: list[tuple[list[MadeRequest], list[dict[str, Any]]]] = []
        for place, (one, messages) in enumerate(zip(asks, conversations, strict=True)):
            if isinstance(messages, str):
                made.append(([self._refused(one, [messages], 0)], []))
            else:
                made.append(([self._request(one, draft) for draft in drafts[right.index(place)]], messages))
        return made

    def _conversations(
        self, stage: Stage, asks: Sequence[AskOfRow], scopes: Sequence[dict[str, Any]]
    ) -> list[list[dict[str, Any]] | str]:
        """The whole conversation of each ask, or a sentence that says why there is none."""
        roles, sources = zip(*stage.messages, strict=True)
        now = self._record.local_time or self._record.created_at
        texts = PromptTemplate(sources, datetime.fromisoformat(now)).render_all(scopes)
        found: list[list[dict[str, Any]] | str] = []
        for one, of_ask in zip(asks, texts, strict=True):
            messages = templated_messages(roles, of_ask, f"stages.{stage.name}", None)
            found.append(messages if isinstance(messages, str) else [*one.ask.before, *messages])
        return found

    def _drafts(
        self,
        stage: Stage,
        asks: Sequence[AskOfRow],
        given: dict[str, list[Any]],
        conversations: Sequence[list[dict[str, Any]] | str],
    ) -> list[list[RowDraft]]:
        """The drafts of each ask's completions."""
        if not asks:
            return []
        _, reader = self._reader(stage)
        columns: dict[str, list[Any]] = {
            "id": [one.row_id for one in asks],
            "adapter": [one.adapter for one in asks],
        }
        if stage.messages:
            columns["messages"] = list(conversations)
        found: list[list[RowDraft]] = [[] for _ in asks]
        for draft in reader.read_columns(columns, given, [f"row {one.row_id}" for one in asks]):
            found[draft.row].append(draft)
        return found

    def _reader(self, stage: Stage) -> tuple[IndexJob, PromptReader]:
        if stage.name not in self._readers:
            job = IndexJob.of_stage(self._record, self._spec, stage)
            job = replace(job, sampling=replace(job.sampling, n=stage.num_samples), id_from_content=False)
            if stage.messages:
                job = replace(job, templates=(), roles={"messages": "messages"}, renders_messages=True)
            self._readers[stage.name] = job, PromptReader(job, lambda adapter: self._tokenizer_of(job, adapter))
        return self._readers[stage.name]

    def _request(self, one: AskOfRow, draft: RowDraft) -> MadeRequest:
        problem = adapter_problem(one.adapter, self._adapters)
        problems = [*draft.problems, *([problem] if problem else [])]
        if problems:
            return self._refused(one, problems, len(draft.tokens or ()))
        request = Request(
            request_id=f"{one.request_id}/{draft.sample}",
            prompt_token_ids=tuple(draft.tokens or ()),
            adapter_id=self._adapters[one.adapter].sha256 if one.adapter in self._adapters else None,
            sampling=draft.sampling,
        )
        return with_stream(one, request, draft.sample)

    def _refused(self, one: AskOfRow, problems: Sequence[str], prompt_tokens: int) -> MadeRequest:
        sha256 = self._adapters[one.adapter].sha256 if one.adapter in self._adapters else None
        return b"", RowAnswer.refused(b"", sha256 or None, " ".join(problems), prompt_tokens)


def with_stream(one: AskOfRow, request: Request, sample: int) -> tuple[bytes, Request]:
    """The fingerprint of a request of a stage, and the request with the random numbers that it stands for."""
    ask = one.ask
    asked_by = f"{ask.stage.name}/{ask.round}/{ask.item}/{type(one.row_id).__name__}/{one.row_id}"
    fingerprint = row_fingerprint(asked_by, request.prompt_token_ids, request.sampling, sample)
    return fingerprint, replace(request, stream_id=int.from_bytes(fingerprint[:8], "little"))


def continued_stages(flow: Flow) -> frozenset[str]:
    """Names of the stages whose conversations others go on with."""
    by_name = {stage.name: stage for stage in flow.stages}
    turns = [by_name[stage.continues] for stage in flow.stages if stage.continues]
    return frozenset(turn.pick or turn.name for turn in turns)
