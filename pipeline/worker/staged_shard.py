"""`StagedShard`: the rows of one shard with stages, from the requests that begin them to their part.

It makes requests of rows whose earlier stages are answered, and takes an answer that an earlier attempt has left in
place of asking again: answers are known by the fingerprint of what was asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...engine.request import ExportedRow, Request
from ...engine.text.tokenizers.tokenizer import Tokenizer
from ...jobs.options.stages import stages_of, until_of
from ...jobs.record import JobRecord
from ...jobs.spec import JobSpec
from ..dataset.answers import BegunRow, RowAnswer
from ..dataset.chunk import IndexJob, given_columns
from ..dataset.reader import ShardRows, given_values, stage_adapter
from ..dataset.row_program import Ask, Flow, RowProgram
from ..dataset.schema import REQUEST_ID
from ..dataset.stage_reader import AskOfRow, MadeRequest, StageReader, continued_stages, with_stream
from ..dataset.task_columns import heads_of


@dataclass(frozen=True, slots=True)
class KeptAnswers:
    """Answers and begun requests that earlier attempts have left of a shard, by fingerprint of the request."""

    #: Answers.
    answers: Mapping[bytes, RowAnswer]
    #: Tokens of requests that were begun.
    begun: Mapping[bytes, BegunRow]
    #: Fingerprints of answers of earlier runs.
    earlier: Collection[bytes] = ()


class StagedShard:
    """`rows`: of the shard. `spec`: the job with its secrets. `tokenizer_of`: as `StageReader` takes it."""

    def __init__(
        self,
        rows: ShardRows,
        record: JobRecord,
        spec: JobSpec,
        kept: KeptAnswers,
        tokenizer_of: Callable[[IndexJob, str | None], Tokenizer],
    ) -> None:
        stages = stages_of(record.spec.stages)
        self._flow = Flow.of(stages, until_of(record.spec.until), given_columns(record), heads_of(record))
        self._reader = StageReader(record, spec, self._flow, tokenizer_of)
        self._record = record
        self._rows = rows
        self._kept = kept
        self._given = given_values(rows.table)
        self._adapters = [
            {stage.name: stage_adapter(stage, given, record) for stage in stages if stage.asks} for given in self._given
        ]
        self._ids = rows.table.column(record.input.roles.get("id", "id")).to_pylist()
        self._request_ids = rows.table.column(REQUEST_ID).to_pylist()
        self._continued = continued_stages(self._flow)
        #: The rows' programs.
        self.programs = [RowProgram(self._flow, given) for given in self._given]
        #: Answers by fingerprint of their request: kept ones that were needed, and new ones.
        self.answers: dict[bytes, RowAnswer] = {}
        #: Fingerprints of requests that engines have answered in this attempt.
        self.fresh: set[bytes] = set()
        self._waiting: dict[str, tuple[AskOfRow, int, Request, bytes]] = {}
        # Row and fingerprint of each answer that was taken.
        self._used: list[tuple[int, bytes]] = []

    @property
    def num_reused(self) -> int:
        """Rows whose answers are all of earlier runs."""
        used: defaultdict[int, bool] = defaultdict(lambda: True)
        for row, fingerprint in self._used:
            used[row] &= fingerprint in self._kept.earlier
        return sum(used.values())

    @property
    def adapter_ids(self) -> frozenset[str]:
        """Content hashes of the adapters that may answer stages of the rows."""
        names = {name for of_row in self._adapters for name in of_row.values() if name is not None}
        return frozenset(
            adapter.sha256 for adapter in self._record.adapters if adapter.name in names and not adapter.is_refused
        )

    def begin(self) -> list[ExportedRow]:
        """The first requests that engines must answer; more may follow from their answers."""
        return self._advance(range(len(self.programs)))

    def fingerprint_of(self, request_id: str) -> bytes:
        """The fingerprint of a request that waits for its answer."""
        return self._waiting[request_id][3]

    def request(self, request_id: str) -> Request:
        """A request that waits for its answer."""
        return self._waiting[request_id][2]

    def length_of(self, row: int) -> tuple[str | None, int]:
        """Content hash of the adapter of a row's first stage, and tokens of all its answers."""
        found = [answer for _, answer in self.programs[row].answers()]
        return found[0].adapter_sha256, sum(answer.completion_tokens for answer in found)

    def take(self, answers: Iterable[tuple[str, RowAnswer]]) -> tuple[list[ExportedRow], list[int]]:
        """Take answers of engines, by request id. Returns the requests that follow from them, and the rows that are
        done by them.
        """
        rows = []
        for request_id, answer in answers:
            one, sample, request, fingerprint = self._waiting.pop(request_id)
            self.fresh.add(fingerprint)
            self._put(one, sample, answer, request, fingerprint)
            rows.append(one.row)
        changed = dict.fromkeys(rows)
        following = self._advance(changed)
        return following, [row for row in changed if self.programs[row].is_done]

    def refuse(self, requests: list[ExportedRow], refused: Mapping[str, str]) -> tuple[list[ExportedRow], list[int]]:
        """Answer those of the requests whose adapters are refused, by the sentence of the adapter, and what follows
        from them. Returns the requests for engines, and the rows that are done by the refusals.
        """
        left: list[ExportedRow] = []
        done: list[int] = []
        while requests:
            bad = [row.request for row in requests if row.request.adapter_id in refused]
            left += [row for row in requests if row.request.adapter_id not in refused]
            answers = [
                (
                    request.request_id,
                    RowAnswer.refused(
                        self.fingerprint_of(request.request_id),
                        request.adapter_id,
                        refused[request.adapter_id or ""],
                        len(request.prompt_token_ids),
                    ),
                )
                for request in bad
            ]
            requests, rows = self.take(answers) if answers else ([], [])
            done += rows
        return left, done

    def _advance(self, rows: Iterable[int]) -> list[ExportedRow]:
        """The new requests of these rows. What can be answered at once, by a kept answer or an error, is."""
        found: list[ExportedRow] = []
        changed = list(rows)
        while changed:
            by_stage: defaultdict[str, list[AskOfRow]] = defaultdict(list)
            for row in changed:
                for ask in self.programs[row].asks():
                    by_stage[ask.stage.name].append(self._of_row(row, ask))
            again: dict[int, None] = {}
            for asks in by_stage.values():
                for one, requests in self._requests(asks):
                    for sample, made in enumerate(requests):
                        exported = self._ask(one, sample, made, len(requests))
                        if exported is None:
                            again[one.row] = None
                        else:
                            found.append(exported)
            changed = list(again)
        return found

    def _of_row(self, row: int, ask: Ask) -> AskOfRow:
        name = ask.stage.name
        request_id = f"{self._request_ids[row]}/{name}/{ask.round}/{ask.item}"
        return AskOfRow(row, request_id, self._ids[row], self._adapters[row][name], ask)

    def _requests(self, asks: Sequence[AskOfRow]) -> Iterable[tuple[AskOfRow, list[MadeRequest]]]:
        """Requests of asks of one stage. Those of the first stage were made by the index."""
        stage = asks[0].ask.stage
        if stage is self._flow.stages[0]:
            yield from ((one, self._indexed(one)) for one in asks)
            if stage.name not in self._continued:
                return
        for one, (requests, messages) in zip(asks, self._reader.read(asks), strict=True):
            if stage.name in self._continued:
                self.programs[one.row].keep_conversation(one.ask, messages)
            if stage is not self._flow.stages[0]:
                yield one, requests

    def _indexed(self, one: AskOfRow) -> list[MadeRequest]:
        request = self._rows.requests[one.row]
        if isinstance(request, RowAnswer):
            return [(b"", request)]
        return [
            with_stream(one, replace(request, request_id=f"{one.request_id}/{sample}"), sample)
            for sample in range(one.ask.stage.num_samples)
        ]

    def _ask(self, one: AskOfRow, sample: int, made: MadeRequest, num_made: int) -> ExportedRow | None:
        """The request as an engine gets it; None when it is answered already."""
        fingerprint, request = made
        if isinstance(request, RowAnswer):
            for place in range(one.ask.stage.num_samples if num_made == 1 else 1):
                self.programs[one.row].answer(one.ask, sample + place, request, None)
            return None
        kept = self._kept.answers.get(fingerprint)
        if kept is not None and kept.error is None and kept.adapter_sha256 == request.adapter_id:
            self._put(one, sample, kept, request, fingerprint)
            return None
        stage = one.ask.stage
        will_continue, is_continuation = stage.name in self._continued, stage.continues is not None
        request = replace(request, will_continue=will_continue, is_continuation=is_continuation)
        self._waiting[request.request_id] = one, sample, request, fingerprint
        return self._begun(request, fingerprint)

    def _put(self, one: AskOfRow, sample: int, answer: RowAnswer, request: Request, fingerprint: bytes) -> None:
        self.answers[fingerprint] = answer
        self._used.append((one.row, fingerprint))
        self.programs[one.row].answer(one.ask, sample, answer, request)

    def _begun(self, request: Request, fingerprint: bytes) -> ExportedRow:
        begun = self._kept.begun.get(fingerprint)
        if begun is not None and begun.adapter_sha256 == request.adapter_id:
            exported = ExportedRow(request, begun.token_ids, begun.token_logprobs, begun.top_logprobs, begun.teacher)
            if not exported.problems():
                return exported
        return ExportedRow(request)
