"""The frozen job: what makes it the same job, and what it must not hold.

The state that is read from storage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorabatch.engine.structured_output import FORMS
from lorabatch.jobs.errors import DamagedRecordError, JobRequestError
from lorabatch.jobs.input.adapter_names import adapter_problem
from lorabatch.jobs.options.values import TLS_FIELDS, TlsFiles
from lorabatch.jobs.record import (
    IDENTITY_FIELDS,
    AdapterRecord,
    JobRecord,
    JobState,
    WorkerState,
    differences,
    index_key,
)
from lorabatch.jobs.spec import JobSpec

Record = Callable[..., JobRecord]
BASICS = {"model": "/m", "input": "/in.parquet", "output": "/out"}
STAGES = {"draft": {"messages": "{{ question }}"}}
# Options that another one must be given beside.
BESIDE: dict[str, Any] = {
    "score_by": {"expected": "label"},
    "until": {"stages": STAGES},
    "output_columns": {"stages": STAGES},
    "confirm": {"canary": 3},
    "shape": {"for_each_adapter": "all", "adapters": "/adapters"},
    "max_cost": {"gpu_hour_price": "2 EUR"},
}
OTHER_VALUES: dict[str, Any] = {
    "input": "/other.parquet",
    "columns": {"prompt": "text"},
    "max_tokens": 7,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 9,
    "stop": ["x"],
    "logprobs": True,
    "ignore_eos": True,
    "top_logprobs": 2,
    "prompt_logprobs": True,
    "prompt_top_logprobs": 3,
    "teacher_top_k": 5,
    "stop_token_ids": [5],
    "n": 2,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
    "bad_words": ["x"],
    "allowed_token_ids": [5],
    "continuation_token_ids": [5],
    "json_schema": {"type": "object"},
    "regex": "x",
    "choice": ["x"],
    "score_choices": False,
    "grammar": 'start: "x"',
    "reasoning_markers": "<think>,</think>",
    "tool_call_parser": "hermes",
    "task": "embed",
    "pooling": "mean",
    "normalize_embeddings": False,
    "mode": "exact",
    "dtype": "bfloat16",
    "base_quantization": "int8",
    "load_format": "dummy",
    "rows_per_shard": 10,
    "allow_special_tokens": True,
    "system_prompt": "Be brief.",
    "chat_template": "{{ messages }}",
    "tools": '[{"type": "function", "function": {"name": "f"}}]',
    "chat_template_kwargs": '{"enable_thinking": false}',
    "add_generation_prompt": False,
    "continue_final_message": True,
    "split_answer": True,
    "prompt_template": "{{ question }}",
    "messages_template": [{"role": "user", "content": "{{ question }}"}],
    "chat": True,
    "row_settings": ["seed"],
    "keep": ["note"],
    "drop": ["note"],
    "id_from_content": True,
    "stages": STAGES,
    "until": {"stage": "draft", "is": "1 < 2", "rounds": 2},
    "output_columns": ["draft"],
    "output_prefix": "answer_",
    "policy": "s-lora",
    "placement": "loraserve",
    "samples": "lists",
    "expected": "label",
    "score_by": "number",
    "shape": "wide",
    "allowed_adapters": {"tenant": {"acme": "acme-*"}},
}
FREE_VALUES: dict[str, Any] = {
    "adapters": "/adapters",
    "workers": 7,
    "cluster": "tcp://host:1",
    "max_errors": "5%",
    "batch_rows": 9,
    "engine_threads": 1,
    "name": "renamed",
    "migration": False,
    "verify": True,
    "examples": False,
    "generation_config": True,
    "storage_options": {"key": "x"},
    "scheduler_file": "/scheduler.json",
    "canary": 3,
    "confirm": True,
    "stop_if": ["errors > 2%"],
    "max_seconds": 100.0,
    "max_cost": "20 EUR",
    "gpu_hour_price": "2 EUR",
    "adapter_disk_bytes": 1 << 30,
}


def test_a_record_read_back_is_the_record(record: Record) -> None:
    assert JobRecord.from_json(record().to_json()) == record()


def test_every_option_is_judged_to_be_part_of_the_job_or_not() -> None:
    judged = set(OTHER_VALUES) | set(FREE_VALUES)
    judged |= {
        "model",
        "output",
        "overwrite",
        "update",
        "device",
        "step_tokens",
        "pool_bytes",
        "host_tier_bytes",
        "cost_model",
        "cluster_options",
    }
    judged |= {"tensor_parallel", *TLS_FIELDS, *FORMS}
    # the adapters that these stand for are compared
    judged |= {"for_each_adapter", "include_base"}
    assert set(JobSpec.model_fields) == judged
    assert set(IDENTITY_FIELDS) == set(OTHER_VALUES)


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_another_value_of_what_is_asked_is_another_job(record: Record, field: str) -> None:
    basics = BASICS | BESIDE.get(field, {})
    old = record(spec=JobSpec(**basics).without_secrets())
    new = record(spec=JobSpec(**basics | {field: OTHER_VALUES[field]}).without_secrets())
    (line,) = differences(old, new)
    assert line.startswith(f"{field}: was ")
    assert index_key(old) != index_key(new)


@pytest.mark.parametrize("field", FREE_VALUES)
def test_where_and_how_fast_it_runs_is_not_part_of_the_job(record: Record, field: str) -> None:
    basics = BASICS | BESIDE.get(field, {})
    old = record(spec=JobSpec(**basics).without_secrets())
    new = record(spec=JobSpec(**basics | {field: FREE_VALUES[field]}).without_secrets())
    assert differences(old, new) == []
    assert index_key(old) == index_key(new)


def test_another_adapter_in_a_sweep_is_another_job(record: Record) -> None:
    old, new = record(swept=("a",)), record(swept=(None, "a"))
    assert differences(old, new) == ["for_each_adapter: was ['a'], now ['(base model)', 'a']"]
    assert len({index_key(record()), index_key(old), index_key(new)}) == 3


def test_adapters_of_a_sweep_that_no_longer_share_a_tokenizer_make_another_job(record: Record) -> None:
    def sweep(*tokenizers: str) -> JobRecord:
        adapters = tuple(
            AdapterRecord(name=name, url=f"/{name}", verdict="exact", sha256="a" * 64, tokenizer_sha256=tokenizer)
            for name, tokenizer in zip("abc", tokenizers, strict=True)
        )
        return record(adapters=adapters, swept=("a", "b", "c"))

    assert sweep("", "", "").adapter_groups == {None: ("a", "b", "c")}
    assert sweep("", "x", "x").adapter_groups == {None: ("a",), "b": ("b", "c")}
    assert differences(sweep("", "x", "x"), sweep("", "y", "y")) == []
    (line,) = differences(sweep("", "x", "x"), sweep("", "x", ""))
    assert "have a tokenizer or vocabulary in common" in line


def test_changed_content_under_the_same_name_is_another_job(record: Record) -> None:
    old = record()
    model = old.model.model_copy(update={"sha256": "x" * 64})
    assert differences(old, record(model=model)) == ["model: the content of /model is not the content of /model"]
    (file,) = old.input.files
    changed = old.input.model_copy(update={"files": (file.model_copy(update={"footer_sha256": "y" * 64}),)})
    (line,) = differences(old, record(input=changed))
    assert line == "input: its files or columns have changed since the job was started"
    moved = old.input.model_copy(update={"files": (file.model_copy(update={"url": "s3://elsewhere"}),)})
    assert differences(old, record(input=moved)) == []


def test_a_partition_is_content_and_files_that_are_left_unread_are_not(record: Record) -> None:
    old = record()
    (file,) = old.input.files
    moved = old.input.model_copy(update={"files": (file.model_copy(update={"partition": {"tenant": "b"}}),)})
    assert differences(old, record(input=moved))
    beside = old.input.model_copy(update={"unread": ("a.csv",)})
    assert differences(old, record(input=beside)) == []


def test_a_job_of_the_version_before_these_options_is_the_same_job_with_the_same_index(record: Record) -> None:
    raw = json.loads(record().to_json())
    for name in ("system_prompt", "policy", "placement", "chat_template", "tools", "chat_template_kwargs"):
        del raw["spec"][name]
    for name in ("add_generation_prompt", "continue_final_message", "reasoning_markers", "tool_call_parser", "choice"):
        del raw["spec"][name]
    del raw["input"]["unread"], raw["input"]["files"][0]["partition"]
    before = JobRecord.from_json(json.dumps(raw).encode())
    assert differences(before, record()) == []
    # As that version computed it.
    assert (
        index_key(before) == index_key(record()) == "2c8f2c6742a3c2873dcdd9c579edb18263777d48d45139f13fc06d307882a5f9"
    )


def test_a_record_of_the_version_before_is_the_same_job_with_the_same_index() -> None:
    data = Path(__file__).with_name("recorded_job.json").read_bytes()
    frozen = JobRecord.from_json(data)
    written = json.loads(frozen.to_json())
    assert [written.pop(name) for name in ("sources", "swept")] == [[], []]  # which it did not have either
    expected = json.loads(data)
    later = sorted(written["spec"].keys() - expected["spec"].keys())
    assert "scheduler_file" in later, "an option that the version before did not have"
    given = [written["spec"].pop(name) for name in later]
    assert given == json.loads(json.dumps([JobSpec.model_fields[name].default for name in later]))
    expected["input"] |= {"converted": [], "json_columns": [], "sole_adapter": ""}  # which it did not have
    head = {"task": "", "labels": [], "problem_type": ""}
    expected["model"] |= head | {"pad_token_id": None}
    expected["adapters"] = [adapter | head | {"files": {}, "num_tower_tensors": 0} for adapter in expected["adapters"]]
    assert written == expected
    assert index_key(frozen) == "04abca8e2ea70d9932b36a473bfe4db1c1b84ac84900a529e84b8185928afc67"
    again = frozen.job_spec({"key": "k"}, workers=2)
    assert differences(frozen, frozen.model_copy(update={"spec": again.without_secrets()})) == []
    assert (frozen.spec.workers, again.workers) == (7, 2)
    assert again.sampling == frozen.spec.sampling
    assert again.logit_bias == ((5, 1.0), (7, -2.0))


def test_options_of_another_version_are_kept_apart_and_refused_by_name(record: Record) -> None:
    raw = json.loads(record().to_json())
    raw["spec"]["max_token"] = 7
    frozen = JobRecord.from_json(json.dumps(raw).encode())
    assert frozen.unknown_options == {"max_token": 7}
    assert differences(frozen, record()) == []
    assert frozen.to_json() == record().to_json()
    with pytest.raises(JobRequestError, match=r"max_token: not an option; did you mean 'max_tokens'"):
        frozen.job_spec()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"max_errors": "some"}, "max_errors: 'some': expected a count of rows"),
        ({"mode": "fast", "workers": "x"}, "workers: expected a valid integer; mode: expected 'auto', .*"),
        ({"model": None}, "model: expected a valid string"),
    ],
)
def test_a_damaged_option_is_named(record: Record, changes: dict[str, Any], found: str) -> None:
    raw = json.loads(record().to_json())
    raw["spec"] |= changes
    with pytest.raises(DamagedRecordError, match=rf"job\.json spec: cannot be read back \({found}"):
        JobRecord.from_json(json.dumps(raw).encode())
    for spec in ([], None, {"mode": "auto"}):
        with pytest.raises(DamagedRecordError, match=r"job\.json spec: cannot be read back"):
            JobRecord.from_json(json.dumps(raw | {"spec": spec}).encode())


def test_what_is_written_down_opens_nothing() -> None:
    spec = JobSpec(
        model="s3://me:hush@bucket/m",
        input="https://host/in.parquet?sig=hush",
        output="s3://me:hush@bucket/out",
        adapters={"a": "https://u:hush@host/a"},
        storage_options={"secret": "hush"},
    )
    for adapters in (spec.adapters, "s3://k:hush@b/x"):
        public = spec.model_copy(update={"adapters": adapters}).without_secrets()
        assert "hush" not in str(public.model_dump())


def test_the_spec_can_be_taken_up_again_with_fresh_options(record: Record) -> None:
    spec = JobSpec(**BASICS, stop=["a"], columns={"prompt": "t"}, adapters={"x": "/x"})
    frozen = JobRecord.from_json(record(spec=spec.without_secrets()).to_json())
    assert frozen.job_spec() == spec
    again = frozen.job_spec({"key": "k"}, workers=3)
    assert (again.storage_options, again.workers) == ({"key": "k"}, 3)
    assert frozen.spec.sampling == spec.sampling


def test_the_files_that_open_a_cluster_go_along_to_others_of_that_kind_only(record: Record, tmp_path: Path) -> None:
    files = dict.fromkeys(TLS_FIELDS, str(tmp_path / "own.pem"))
    (tmp_path / "own.pem").touch()
    spec = JobSpec(**BASICS, cluster="tls://gone:1", **files)
    frozen = record(spec=spec.without_secrets())
    assert frozen.job_spec() == spec
    assert frozen.job_spec(cluster="tls://new:1").tls_files == spec.tls_files
    assert frozen.job_spec(cluster="tcp://new:1").tls_files == TlsFiles()
    (tmp_path / "own.pem").rename(tmp_path / "moved.pem")
    with pytest.raises(JobRequestError, match=r"tls_key='.*own\.pem': no such file\. .*--tls-key"):
        frozen.job_spec()
    moved = dict.fromkeys(TLS_FIELDS, str(tmp_path / "moved.pem"))
    assert frozen.job_spec(**moved).tls_files == TlsFiles(**moved)


def test_an_adapter_that_cannot_serve_says_why_and_what_is_near() -> None:
    adapters = {name: AdapterRecord(name=name, url="", verdict="exact") for name in [f"tenant-{i}" for i in range(12)]}
    adapters["bad"] = AdapterRecord(name="bad", url="", verdict="refused", reasons=("NaN in q_proj.", "No config."))
    assert adapter_problem(None, adapters) is None
    assert adapter_problem("tenant-3", adapters) is None
    assert adapter_problem("bad", adapters) == "adapter='bad': refused. NaN in q_proj. No config."
    close = adapter_problem("tenant-33", adapters)
    assert close is not None
    assert "did you mean 'tenant-3'?" in close
    far = adapter_problem("zzz", adapters)
    assert far is not None
    assert far.endswith("tenant-4, …")
    spelled = adapter_problem("cafe\u0301", {"caf\u00e9": adapters["bad"]})
    assert spelled is not None
    assert "'cafe\\u0301': not among this job's adapters; 'caf\\xe9' looks the same" in spelled
    unknown = adapter_problem("x", {})
    assert unknown is not None
    assert "the job has no adapters" in unknown
    assert "--column adapter= " in unknown


STATE = JobState(
    phase="running",
    updated_at_s=12.5,
    rows=10,
    rows_done=4,
    eta_s=3.5,
    prefix_hit_rate=0.6,
    workers=(WorkerState("tcp://a", 1.5, 2, 1, "merged", ("x", "y")), WorkerState("tcp://b")),
    message="fine",
)


def test_a_state_read_back_is_the_state() -> None:
    assert JobState.from_json(STATE.to_json()) == STATE


def test_a_newer_versions_keys_are_passed_over() -> None:
    raw = json.loads(STATE.to_json())
    raw["future"] = 1
    raw["workers"][0]["future"] = 1
    assert JobState.from_json(json.dumps(raw).encode()) == STATE


def test_what_an_older_version_did_not_write_is_not_known() -> None:
    raw = json.loads(STATE.to_json())
    del raw["prefix_hit_rate"]
    assert JobState.from_json(json.dumps(raw).encode()).prefix_hit_rate is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"phase": "running"}', b'{"workers": [1]}'])
def test_a_damaged_state_is_said(data: bytes) -> None:
    with pytest.raises(DamagedRecordError, match=r"state\.json"):
        JobState.from_json(data)


@pytest.mark.parametrize(
    ("phase", "is_final"), [("running", False), ("indexing", False), ("done", True), ("cancelled", True)]
)
def test_some_phases_are_the_last(phase: str, is_final: bool) -> None:
    assert JobState(phase, 0.0).is_final == is_final  # type: ignore[arg-type]
