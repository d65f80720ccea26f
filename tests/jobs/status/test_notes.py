"""What is said of a job without being asked."""

from __future__ import annotations

from collections.abc import Callable

from lorabatch.jobs.record import AdapterRecord, JobRecord
from lorabatch.jobs.status.notes import job_notes, messages_note, row_notes

Record = Callable[..., JobRecord]


def adapters(*names: str) -> tuple[AdapterRecord, ...]:
    return tuple(AdapterRecord(name=name, url=f"/{name}", verdict="exact", sha256=name) for name in names)


def with_adapter_column(record: JobRecord) -> JobRecord:
    roles = record.input.roles | {"adapter": "tenant"}
    return record.model_copy(update={"input": record.input.model_copy(update={"roles": roles})})


def test_verdicts_refusals_and_own_tokenizers_are_said(record: Record) -> None:
    own = AdapterRecord(name="own", url="/own", verdict="exact", sha256="o", tokenizer_sha256="t")
    broken = AdapterRecord(name="broken", url="/broken", verdict="refused", reasons=("rank is 0.",))
    assert job_notes(record(adapters=(own, broken))) == [
        "2 adapters: 1 exact, 1 refused",
        "  adapter='broken': refused. rank is 0.",
        "  with their own tokenizer or chat template: own",
    ]
    assert job_notes(record(adapters=())) == []


def test_tensors_that_text_does_not_reach_are_said_once(record: Record) -> None:
    seeing = tuple(
        AdapterRecord(name=name, url=f"/{name}", verdict="exact", sha256=name, num_tower_tensors=count)
        for name, count in (("a", 18), ("b", 2), ("c", 0))
    )
    assert job_notes(record(adapters=seeing)) == [
        "3 adapters: 3 exact",
        "  exact for text; 20 tensors of the vision tower are not used: a, b",
    ]


def test_files_that_are_left_unread_are_said(record: Record) -> None:
    job = record(adapters=())
    job = job.model_copy(update={"input": job.input.model_copy(update={"unread": ("a.csv", "b.jsonl")})})
    assert job_notes(job) == ["input: files that are not read: a.csv, b.jsonl"]


def test_templates_that_end_prompts_without_a_header_are_said_by_adapter(record: Record) -> None:
    job = record(
        adapters=(
            AdapterRecord(name="own", url="/own", verdict="exact", sha256="o", tokenizer_sha256="t"),
            AdapterRecord(
                name="bad", url="/bad", verdict="exact", sha256="b", tokenizer_sha256="u", missing_header="<a>"
            ),
            AdapterRecord(name="plain", url="/plain", verdict="exact", sha256="p"),
        )
    )
    chat = job.model_copy(update={"input": job.input.model_copy(update={"roles": {"messages": "chat"}})})
    (note,) = [note for note in job_notes(chat) if "without '<a>'" in note]
    assert note.startswith("messages (adapter bad): the chat template ends prompts without '<a>'")
    lacking = chat.model_copy(update={"model": chat.model.model_copy(update={"missing_header": "<a>"})})
    (note,) = [note for note in job_notes(lacking) if "without '<a>'" in note]
    assert note.startswith("messages (the model, adapter bad, adapter plain):")
    for asked in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        assert not [
            n for n in job_notes(lacking.model_copy(update={"spec": chat.spec.model_copy(update=asked)})) if "<a>" in n
        ]
    assert not [n for n in job_notes(job) if "<a>" in n], "it has no messages"


def test_what_templates_drop_is_said_of_rows_that_have_it(record: Record) -> None:
    job = record(adapters=())
    dropping = job.model.model_copy(update={"template_drops": ("reasoning of earlier turns",)})
    job = job.model_copy(update={"model": dropping})
    counts = {"reasoning of earlier turns": 1200, "blanks at the ends of messages": 7}
    assert row_notes(job, {None: 9}, counts) == (
        "messages: the chat template drops by design: reasoning of earlier turns (1,200 rows)",
    )
    assert row_notes(job, {None: 9}, {}) == ()


def test_special_tokens_in_messages_that_act_are_named(record: Record) -> None:
    job = record(adapters=())
    assert messages_note(job) == ()
    chat = job.model_copy(update={"input": job.input.model_copy(update={"roles": {"messages": "chat"}})})
    assert messages_note(chat) == ()
    allowed = chat.model_copy(update={"spec": chat.spec.model_copy(update={"allow_special_tokens": True})})
    assert "are control tokens" in messages_note(allowed)[0]


def test_a_chat_template_of_the_job_is_said_with_those_that_it_takes_the_place_of(record: Record) -> None:
    own = AdapterRecord(name="own", url="/own", verdict="exact", sha256="o", tokenizer_sha256="t")
    job = record(adapters=(own,))
    spec = job.spec.model_copy(update={"chat_template": "{{ messages }}"})
    chat = job.input.model_copy(update={"roles": {"messages": "chat"}})
    said = "messages: rendered by the job's chat template, instead of the model's"
    assert messages_note(job.model_copy(update={"input": chat, "spec": spec}))[0] == (
        f"{said} and of those that adapters have: own"
    )
    alone = job.model_copy(update={"input": chat, "spec": spec, "adapters": ()})
    assert messages_note(alone)[0] == said


def test_adapters_that_no_row_names_are_said_in_one_line(record: Record) -> None:
    job = with_adapter_column(record(adapters=adapters("a", "b", "c")))
    assert row_notes(job, {"a": 3, None: 1}) == ("2 of 3 adapters are named by no row: b, c",)
    assert row_notes(job, {"a": 3, "b": 1, "c": 1}) == ()
    many = with_adapter_column(record(adapters=adapters(*(f"a{i:03}" for i in range(200)))))
    (line,) = row_notes(many, {"a000": 1})
    assert line.startswith("199 of 200 adapters are named by no row: a001, a002")
    assert line.endswith("a008 and 191 more")


def test_a_column_that_names_nothing_is_said(record: Record) -> None:
    said = "column 'tenant' (adapter): null or empty in all 1,200 rows; the base model answers them"
    job = with_adapter_column(record(adapters=adapters("a", "b")))
    assert row_notes(job, {None: 1200}) == (f"{said}, none of the 2 adapters does",)
    assert row_notes(with_adapter_column(record(adapters=())), {None: 1200}) == (said,)
    assert row_notes(record(adapters=()), {None: 1200}) == ()
    assert row_notes(job, {}) == ()
