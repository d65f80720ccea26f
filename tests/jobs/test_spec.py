"""A job as people write it: every option a key, and every wrong value reported at once with its expectation."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lorabatch
from lorabatch.engine.request import SAMPLING_OPTIONS
from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.opening.job_file import read_job_file
from lorabatch.jobs.options.values import COLUMN_ROLES, SAMPLING_COLUMNS, TLS_FIELDS, ErrorBudget, TlsFiles
from lorabatch.jobs.spec import JobSpec, PolicyName

BASICS = {"model": "m", "input": "in.parquet", "output": "out"}


# Nine lists of nine of the list before: a hundred bytes that stand for 400 million values.
ALIAS_BOMB = (
    "max_tokens: [&a0 [1], " + ", ".join(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)) + "]"
)


def problems(**values: Any) -> str:
    with pytest.raises(JobRequestError) as caught:
        JobSpec(**values)
    return "\n".join(caught.value.problems)


def test_everything_wrong_is_said_at_once_with_field_and_value() -> None:
    found = problems(
        model="m",
        inptu="typo",
        mode="fast",
        workers=0,
        max_errors="lots",
        adapters=["a", "b"],
        columns={"pompt": "text"},
        temperature="hot",
    )
    for part in (
        "inptu: not an option; did you mean 'input'",
        "input: required and not given",
        "output: required and not given",
        "mode='fast'",
        "workers=0",
        "max_errors='lots': 'lots': expected a count of rows",
        "'a': expected NAME=URL",
        "'pompt' is not a role; did you mean 'prompt'?",
        "temperature='hot'",
    ):
        assert part in found


@pytest.mark.parametrize(
    "place",
    [
        "https://host/adapters?key=a=b",
        "runs/lr=1e-4/adapters",
        "/data/date=2026-11-30",
        "s3://b/run=3",
        "zip://a=b::s3://x",
    ],
)
def test_a_place_with_an_equals_sign_has_no_name(place: str) -> None:
    assert JobSpec(**BASICS, adapters=[place]).adapters == place
    named = JobSpec(**BASICS, adapters=[f"a={place}", f"b={place}"])
    assert named.adapters == {"a": place, "b": place}


def test_a_place_without_a_name_is_told_without_its_secrets() -> None:
    found = problems(**BASICS, adapters=["a=s3://b/a", "https://host/a?signature=secret"])
    assert "'https://host/a?***': expected NAME=URL" in found
    assert "secret" not in found


def test_every_problem_says_what_to_do() -> None:
    with pytest.raises(JobRequestError) as caught:
        JobSpec(model="m", output="", name="a/b", workers=0, mode="fast", nonsense=1, max_errors="lots", seed="x")
    steps = {problem.split("=")[0].split(":")[0]: problem for problem in caught.value.problems}
    assert steps.keys() == {"output", "name", "workers", "mode", "nonsense", "max_errors", "seed", "input"}
    assert steps.pop("input") == "input: required and not given. Add --input, or the key input in the job file."
    assert all(problem.endswith(". See `lorabatch run --help`.") for problem in steps.values())
    assert steps["workers"].startswith("workers=0: expected at least 1.")


def test_sampling_out_of_range_is_said_with_its_expectation() -> None:
    found = problems(**BASICS, temperature=-1, top_p=0, max_tokens=0, seed=-1, stop="")
    for part in ("temperature=-1.0", "top_p=0.0", "max_tokens=0: expected at least 1", "seed=-1", "stop=['']"):
        assert part in found


@pytest.mark.parametrize("wrong", [{"mode": "fast"}, {"model": None}, {"workers": "x"}, {"columns": {"zzz": "y"}}])
def test_a_wrong_choice_does_not_hide_wrong_numbers_or_files(wrong: dict[str, Any]) -> None:
    found = problems(**BASICS | {"temperature": -1, "max_tokens": 0, "tls_ca": "/nowhere.pem"} | wrong)
    for part in (*wrong, "temperature=-1.0", "max_tokens=0", "tls_ca='/nowhere.pem': no such file"):
        assert part in found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    assert "temperature" in problems(**BASICS, temperature=value)


def test_a_job_file_has_every_option_as_a_key_and_options_beside_it_win(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: base\ninput: s3://b/in\noutput: s3://b/out\nmax-tokens: 5\nstop: [a, b]\nmax_errors: 3\n"
        "adapters:\n  x: s3://b/x\ncolumn: {prompt: text}\nstorage_options: {key: k}\n"
    )
    spec = JobSpec(**read_job_file(path, {"max-tokens": 9, "workers": 2}))
    assert (spec.max_tokens, spec.workers, spec.stop, spec.max_errors) == (9, 2, ("a", "b"), "3")
    assert (spec.adapters, spec.columns) == ({"x": "s3://b/x"}, {"prompt": "text"})
    assert spec.sampling.max_tokens == 9
    assert spec.storage_options == {"key": "k"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "not found"),
        ("- a\n- b", "expected a mapping such as `model: …`, found list"),
        ("a: [", "not valid YAML"),
        ("", "found NoneType"),
        ("temprature: 1\nmodel: m\ninput: i\noutput: o", "temprature: not an option; did you mean 'temperature'?"),
        ("model: m\ninput: i\noutput: o\nmax_tokens: [1]", "max_tokens=[1]"),
        (ALIAS_BOMB, "line 1: its aliases stand for more than 10000 values, expected at most that. Write them out"),
        ("model: &m [*m]", "line 1: an alias that is part of what it stands for"),
        ("? [a]\n: 1", "line 1: a key that is no text"),
        ("model: " + "[" * 5000, "it nests too deeply"),
        ("seed: " + "9" * 5000, "not valid YAML (Exceeds the limit"),
        ("seed: 010", "line 1: 010 begins with 0"),
        ("model: " + "m" * (5 << 20), "5242887 bytes, expected at most 4194304"),
        ("model: m\ninput: i\noutput: o\nmax_tokens: [" + "1, " * 5000 + "]", "1, 1, 1,"),
    ],
)
def test_job_files_that_cannot_be_used_are_explained(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobRequestError) as caught:
        JobSpec(**read_job_file(path, {}))
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_job_file_may_use_aliases_and_merge_keys(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: &place /data\ninput: [*place, /more]\noutput: o\n"
        "storage_options:\n  s3: &keys {key: k}\n  gs: {<<: *keys, project: p}\n"
    )
    spec = JobSpec(**read_job_file(path, {}))
    assert spec.inputs == ("/data", "/more")
    assert spec.storage_options == {"s3": {"key": "k"}, "gs": {"key": "k", "project": "p"}}


def test_a_key_that_stands_twice_in_a_job_file_is_refused_with_its_lines(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("max_tokens: 1\nmodel: a\nmax-tokens: 2\ncolumns: {id: a, id: b}\ncolumn: {}\n")
    with pytest.raises(JobRequestError) as caught:
        read_job_file(tmp_path / "job.yaml", {})
    assert [problem.partition("job.yaml: ")[2] for problem in caught.value.problems] == [
        "max_tokens: given 2 times, line 1 and 3; keep one.",
        "columns: given 2 times, line 4 and 5; keep one.",
        "id: given 2 times, line 4; keep one.",
    ]


def test_one_input_is_a_text_and_several_are_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert JobSpec(**BASICS | {"input": ["/a"]}) == JobSpec(**BASICS | {"input": "/a"})
    spec = JobSpec(**BASICS | {"input": ["/a", "b", "s3://u:hush@c"]})
    assert spec.inputs == ("/a", "b", "s3://u:hush@c")
    assert "hush" not in repr(spec) + str(spec.without_secrets().model_dump())
    monkeypatch.chdir(tmp_path)
    assert spec.with_absolute_paths().inputs == ("/a", str(tmp_path / "b"), "s3://u:hush@c")
    for wrong in ([], ["/a", ""], 3):
        with pytest.raises(JobRequestError, match=r"expected a file, folder, glob or URL, or several"):
            JobSpec(**BASICS | {"input": wrong})


def test_adapters_are_one_folder_or_names_with_urls() -> None:
    assert JobSpec(**BASICS).adapters is None
    assert JobSpec(**BASICS, adapters="folder").adapters == "folder"
    assert JobSpec(**BASICS, adapters=["folder"]).adapters == "folder"
    assert JobSpec(**BASICS, adapters=["a=x", "b=s3://k=v/y"]).adapters == {"a": "x", "b": "s3://k=v/y"}
    assert JobSpec(**BASICS, adapters=[]).adapters is None
    assert "'a' is given twice: 'x' and 'y'" in problems(**BASICS, adapters=["a=x", "a=y"])


def test_columns_come_as_pairs_or_as_a_mapping() -> None:
    assert JobSpec(**BASICS, column=["prompt=my text", "id=uid"]).columns == {"prompt": "my text", "id": "uid"}
    assert JobSpec(**BASICS, columns={"seed": "s"}).columns == {"seed": "s"}
    found = problems(**BASICS, columns={"promt": "x", "zzz": "y"})
    assert "'promt' is not a role; did you mean 'prompt'?" in found
    assert "'zzz' is not a role" in found
    assert all(role in found for role in COLUMN_ROLES)


def test_storage_options_are_json_or_a_mapping_and_never_shown() -> None:
    spec = JobSpec(**BASICS, storage_options='{"key": "AKIA", "secret": "hush-hush"}')
    assert spec.storage_options == {"key": "AKIA", "secret": "hush-hush"}
    assert "hush" not in repr(spec)
    for broken in ('{"secret": "hush-hush"', '["hush-hush"]', 7):
        found = problems(**BASICS, storage_options=broken)
        assert "storage_options" in found
        assert "hush" not in found


def test_a_job_name_is_fit_for_file_names() -> None:
    assert JobSpec(**BASICS, name="nightly-2024.1").name == "nightly-2024.1"
    assert "name='../x'" in problems(**BASICS, name="../x")


def test_local_paths_become_absolute_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    spec = JobSpec(
        model="base", input="in/*.parquet", output="s3://b/out", adapters={"a": "base", "h": "org/adapter"}
    ).with_absolute_paths()
    assert spec.model == str(tmp_path / "base")
    assert spec.input == str(tmp_path / "in/*.parquet")
    assert spec.output == "s3://b/out"
    assert spec.adapters == {"a": str(tmp_path / "base"), "h": "org/adapter"}
    assert JobSpec(**BASICS | {"model": "org/model"}).with_absolute_paths().model == "org/model"


def test_the_files_that_open_a_cluster_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.pem").touch()
    spec = JobSpec(**BASICS, cluster="tls://h:1", **dict.fromkeys(TLS_FIELDS, "own.pem")).with_absolute_paths()
    assert spec.tls_files == TlsFiles(*[str(tmp_path / "own.pem")] * 3)
    assert JobSpec(**BASICS).with_absolute_paths().tls_files == TlsFiles()


def test_a_spec_is_frozen_and_travels() -> None:
    spec = JobSpec(**BASICS, seed=3)
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(ValueError, match="frozen"):
        spec.seed = 4  # type: ignore[misc]


def test_tls_files_belong_together_and_to_a_tls_cluster(tmp_path: Path) -> None:
    pem = tmp_path / "ca.pem"
    pem.touch()
    with pytest.raises(JobRequestError) as caught:
        JobSpec(model="m", input="i", output="o", cluster="tcp://h:1", tls_ca=str(pem), tls_cert="/nowhere.pem")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "tls_cert='/nowhere.pem'",
        "tls_key",
        "cluster='tcp",
    ]
    files = dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), str(pem))
    assert JobSpec(model="m", input="i", output="o", cluster="tls://h:1", **files).tls_key == str(pem)


@pytest.mark.parametrize("cluster", ["local", "local-cuda", "tcp://10.0.0.5:8786", "10.0.0.5:8786", "tls://[::1]:1"])
def test_a_cluster_is_one_of_our_own_or_an_address(cluster: str) -> None:
    job = JobSpec(model="m", input="i", output="o", cluster=cluster)
    assert job.is_embedded == cluster.startswith("local")


@pytest.mark.parametrize("cluster", ["", "loacl", "10.0.0.5", "scheduler.json"])
def test_what_is_no_address_is_not_waited_for(cluster: str) -> None:
    with pytest.raises(
        JobRequestError, match=r"cluster='.*': expected local, local-cuda, an address such as .*, or a class"
    ):
        JobSpec(model="m", input="i", output="o", cluster=cluster)


def test_what_is_not_served_is_refused_and_not_passed_over() -> None:
    asked = BASICS | {"tensor_parallel": 2}
    assert "tensor_parallel=2, mode='exact': what parts add up rounds otherwise" in problems(**asked, mode="exact")
    assert JobSpec(**asked, base_quantization="int8").tensor_parallel == 2
    assert JobSpec(**asked, base_quantization="fp8", device="cuda", cluster="local-cuda").tensor_parallel == 2


def test_number_formats_that_are_not_served_are_refused() -> None:
    assert "dtype='float16': CPUs multiply in float32 or bfloat16" in problems(**BASICS, device="cpu", dtype="float16")
    quantised = BASICS | {"base_quantization": "int8"}
    assert "mode='merged', base_quantization='int8': adapters are not merged" in problems(**quantised, mode="merged")
    assert "base_quantization='int3'" in problems(**BASICS, base_quantization="int3")
    for values in ({"dtype": "bfloat16"}, {"dtype": "auto"}, {"base_quantization": "int8"}):
        JobSpec(**BASICS | {"mode": "exact", "device": "cpu"} | values)


def test_a_word_like_no_option_gets_no_suggestion() -> None:
    assert "zzzzzz: not an option. See `lorabatch run --help`." in problems(**BASICS, zzzzzz=1)


@pytest.mark.parametrize(
    ("text", "num_rows", "limit"),
    [("10%", 100, 10), ("10%", 9, 0), ("10%", 10, 1), ("0", 50, 0), ("7", 3, 7), ("100%", 3, 3), ("0.1%", 2000, 2)],
)
def test_the_limit_is_a_count_or_a_share_rounded_down(text: str, num_rows: int, limit: int) -> None:
    budget = ErrorBudget.parse(text)
    assert budget.limit(num_rows) == limit
    assert budget.allows(limit, num_rows)
    assert not budget.allows(limit + 1, num_rows)


@pytest.mark.parametrize("text", ["", "%", "ten", "-1", "101%", "-5%", "1.5", "nan%"])
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="expected a count of rows such as 25, or a share of them such as 10%"):
        ErrorBudget.parse(text)


@given(percent=st.integers(0, 100), hundreds=st.integers(0, 10**6))
def test_whole_percentages_of_round_numbers_are_exact(percent: int, hundreds: int) -> None:
    assert ErrorBudget.parse(f"{percent}%").limit(hundreds * 100) == percent * hundreds


@pytest.mark.parametrize(
    ("policy", "mode", "expected"),
    [
        ("dlora", "exact", "dlora merges adapters by itself. Use mode auto, or policy planner."),
        ("s-lora", "merged", "s-lora never merges an adapter. Use mode auto or unmerged or exact, or policy planner."),
        ("merged-only", "exact", "merged-only merges adapters by itself. Use mode auto or merged, or policy planner."),
        ("peft-like", "unmerged", "policy='peft-like', mode='unmerged'"),
    ],
)
def test_a_policy_that_decides_about_merging_refuses_modes_that_do(policy: str, mode: str, expected: str) -> None:
    assert expected in problems(**BASICS, policy=policy, mode=mode)


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_every_policy_goes_with_mode_auto(policy: str) -> None:
    assert JobSpec(**BASICS, policy=policy, placement="loraserve").policy == policy


@pytest.mark.parametrize("value", ["!!timestamp x", "!!bool x", "!!int []", "!!float x", "!!binary é", "010"])
def test_values_that_are_not_of_their_tags_kind_are_no_yaml(tmp_path: Path, value: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"seed: {value}\n")
    with pytest.raises(JobRequestError, match=r"job file .*job\.yaml: not valid YAML"):
        read_job_file(path, {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("num_beams", "beam search is not served"),
        ("best_of", "beam search is not served"),
        ("use_beam_search", "beam search is not served"),
        ("guided_json", "its name is json_schema here"),
        ("logits_processors", "code of jobs is not run"),
    ],
)
def test_what_other_systems_have_is_refused_by_name_with_what_to_do(name: str, said: str) -> None:
    with pytest.raises(JobRequestError, match=f"{name}: not an option; {said}"):
        JobSpec(**BASICS, **{name: 2})


def test_no_option_is_declared_and_read_nowhere() -> None:
    """An option that only parses would do nothing, and no other test would notice."""
    root = Path(lorabatch.__file__).parent
    files = [
        root / "api.py",
        *(file for room in ("console", "pipeline", "jobs") for file in (root / room).rglob("*.py")),
    ]
    code = "\n".join(file.read_text("utf-8") for file in files if file.name != "spec.py")
    read = set(re.findall(r"spec\.(\w+)", code))
    # properties of `JobSpec`; rows are answered by `sampling`
    read_as = (
        {"input": "inputs", "max_errors": "error_budget"}
        | dict.fromkeys(TLS_FIELDS, "tls_files")
        | dict.fromkeys((*SAMPLING_COLUMNS, *SAMPLING_OPTIONS), "sampling")
    )
    assert {name for name in JobSpec.model_fields if read_as.get(name, name) not in read} == set()
    engine = [file for file in (root / "engine").rglob("*.py") if file.name != "request.py"]
    code += "\n".join(file.read_text("utf-8") for file in engine)
    assert {name for name in SAMPLING_OPTIONS if not re.search(rf"\.{name}\b|\"{name}\"", code)} == set()


@pytest.mark.parametrize("placement", ["planned", "none"])
@pytest.mark.parametrize("policy", ["dlora", "s-lora", "merged-only"])
def test_a_placement_of_shards_beside_a_policy_that_deals_rows_out_is_refused(policy: str, placement: str) -> None:
    with pytest.raises(
        JobRequestError, match=f"placement='{placement}', policy='{policy}': this policy deals rows out"
    ):
        JobSpec(**BASICS, policy=policy, placement=placement)
    assert JobSpec(**BASICS, placement=placement).placement == placement
