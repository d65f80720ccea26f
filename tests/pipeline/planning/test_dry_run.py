from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from lorabatch.console.plan_tables import plan_json, print_plan, totals, workers
from lorabatch.engine.config import BLOCKS_KEY, read_model_config
from lorabatch.engine.memory.limits import live_weight_bytes, weight_bytes
from lorabatch.jobs.errors import ErrorBudgetError, JobRequestError
from lorabatch.pipeline.cluster.devices import Device
from lorabatch.pipeline.planning import prediction
from lorabatch.pipeline.planning.dry_run import adapter_forecasts, dry_run
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.estimates.lengths import AnswerLengths
from lorabatch.scheduler.simulation.synthetic import make_workload
from lorabatch.scheduler.workload import AdapterInfo

# A cluster that a plan does not start, so that its devices are not known.
ELSEWHERE = "hpc.GpuCluster"
NAMES = (None, "rank1", "rank8", "rank20")


@pytest.fixture
def options(tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """A job of 80 rows over three adapters and the base model; its output does not exist."""
    rows = [{"id": i, "adapter": NAMES[i % 4], "prompt": f"the quick brown fox {i}"} for i in range(80)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet", row_group_size=32)
    return {
        "model": str(tiny_llama),
        "adapters": str(next(iter(tiny_adapters.values())).parent),
        "input": str(tmp_path / "input.parquet"),
        "output": str(tmp_path / "output"),
        "workers": 2,
        "batch_rows": 8,
        "max_tokens": 16,
    }


def test_a_plan_accounts_for_every_row_and_writes_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    found = plan_json(dry_run(options | {"placement": "planned"}), gpu_hour_price=3.6)
    assert not (tmp_path / "output").exists()
    assert found["rows"] == sum(a["num_rows"] for a in found["adapters"]) == 80
    assert sum(wave["num_rows"] for wave in found["waves"]) == 80
    assert sum(worker["num_rows"] for worker in found["placement"]) == 80
    assert {a["name"]: a["rank"] for a in found["adapters"]} == {"": 0, "rank1": 1, "rank8": 8, "rank20": 20}
    assert [a["verdict"] for a in found["audit"]] == ["exact"] * 4
    # Half of max_tokens is expected while no row has finished.
    assert found["predicted_output_tokens"] == 80 * 8
    assert found["placement_lower_bound_s"] <= found["placement_s"]
    assert 0 < found["bound_s"] <= found["predicted_s"]
    assert found["price"] == pytest.approx(found["predicted_s"] * 2 / 1000)
    json.dumps(found)


def test_a_plan_shows_the_first_prompt_that_is_made(options: dict[str, Any]) -> None:
    made = dry_run(options | {"prompt_template": r"Say:\n{{ prompt }}", "system_prompt": "s " * 60})
    place, prompt = made.example or ("", "")
    assert place == "input.parquet:0"
    assert "<|im_start|>user\nSay:\nthe quick brown fox 0<|im_end|>\n<|im_start|>assistant\n" in prompt
    assert plan_json(made, None)["example"] == {"row": place, "prompt": prompt}
    printed = StringIO()
    print_plan(made, None, Console(file=printed, width=200))
    assert "Prompt of row input.parquet:0, as the model gets it:\n  <|im_start|>system\n  s s" in printed.getvalue()
    assert "  Say:\n  the quick brown fox 0<|im_end|>\n" in printed.getvalue()
    print_plan(replace(made, example=(place, "a" * 1000 + "b" * 10 + "c" * 300)), None, Console(file=printed, width=80))
    assert "a\n  … 10 characters …\n  c" in printed.getvalue()
    assert dry_run(options).example is None


@pytest.mark.long
def test_nothing_is_merged_into_a_base_in_blocks_unless_it_is_asked_for(
    options: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    assert dry_run(options).settings.engine.mode == "auto"
    in_blocks = options | {"model": str(shutil.copytree(tiny_llama, tmp_path / "blocks"))}
    path = tmp_path / "blocks" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {BLOCKS_KEY: True}))
    assert dry_run(in_blocks).settings.engine.mode == "unmerged"
    assert dry_run(in_blocks | {"mode": "merged"}).settings.engine.mode == "merged"
    assert dry_run(in_blocks | {"policy": "dlora"}).settings.engine.mode == "auto"
    assert dry_run(in_blocks | {"cluster": ELSEWHERE, "device": "cuda"}).settings.engine.mode == "auto"


@pytest.mark.long
def test_nothing_is_merged_on_a_gpu_that_would_lose_its_pool_to_merged_weights(
    options: dict[str, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_model_config(tiny_llama)
    for copies, expected in ((2, "unmerged"), (4, "auto")):
        left = copies * live_weight_bytes(model, 2)
        of_gpu = (1 << 30) + weight_bytes(model, 2) + left
        monkeypatch.setattr("lorabatch.pipeline.cluster.devices._ASSUMED_GPU_BYTES", of_gpu)
        on_gpu = options | {"cluster": ELSEWHERE, "device": "cuda", "pool_bytes": 1 << 20}
        modes = {mode: dry_run(on_gpu | {"mode": mode}).settings.engine.mode for mode in ("auto", "merged", "unmerged")}
        assert modes == {"auto": expected, "merged": "merged", "unmerged": "unmerged"}


def test_groups_on_gpus_take_as_many_as_they_have_processes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Device("cuda", "H100", 2 << 30, uuids=("a", "b"))
    monkeypatch.setattr("lorabatch.pipeline.planning.dry_run.find_device", lambda asked, num_gpus: gpu)
    pair, alone = (dry_run(options | {"tensor_parallel": n}).settings for n in (2, 1))
    assert pair.notes[0].startswith("an engine is 2 processes that share the model and take a GPU each")
    assert (pair.engine.mode, alone.engine.mode) == ("unmerged", "auto")
    assert "without what sums among 2 GPUs take" in pair.cost_origin
    assert pair.cost.decode_row_s < alone.cost.decode_row_s
    assert pair.limits.pool_bytes > 2 * alone.limits.pool_bytes, "two GPUs, and half of the weights on each"
    assert pair.limits.token_bytes == alone.limits.token_bytes
    gpu = replace(gpu, uuids=("a",))
    with pytest.raises(JobRequestError, match="tensor_parallel=2: a worker sees 1 GPU, expected one for each"):
        dry_run(options | {"tensor_parallel": 2})


def test_lengths_are_known_when_the_stop_token_is_ignored(options: dict[str, Any]) -> None:
    found = plan_json(dry_run(options | {"ignore_eos": True}), None)
    assert found["predicted_output_tokens"] == 80 * 16
    assert found["price"] is None
    assert found["predicted_range_s"] is None


def test_where_lengths_are_unknown_the_plan_says_what_it_assumes_and_how_far_it_may_be_off(
    options: dict[str, Any],
) -> None:
    found = dry_run(options)
    shortest_s, longest_s = plan_json(found, None)["predicted_range_s"]
    assert shortest_s < found.forecast.predicted_s < longest_s
    known = dry_run(options | {"ignore_eos": True})
    assert longest_s == pytest.approx(known.forecast.predicted_s)
    console = Console(width=150, record=True)
    print_plan(found, 2.0, console)
    text = " ".join(console.export_text().split())
    assert "any length up to max_tokens, half of it on average" in text
    over = found.forecast.predicted_s / found.bound_s
    assert f"takes less than {found.bound_s:.1f} s; predicted are {over:.2f} times as long" in text
    assert f"{shortest_s:.1f} s if they take a quarter of it, {longest_s:.1f} s if they take all" in text


def test_where_earlier_jobs_had_all_adapters_the_plan_says_so_and_gives_no_range(options: dict[str, Any]) -> None:
    found = dry_run(options)
    adapter_ids = (None, *(adapter.adapter_id for adapter in found.workload.adapters))
    tasks = np.unique(found.workload.task).tolist()
    known = dict.fromkeys(product(adapter_ids, tasks), AnswerLengths.of([(40, 200, False)]))
    learned = replace(found, settings=replace(found.settings, lengths=known), range_s=None)
    lines = totals(learned, None)
    assert "Answers of 4 adapters are taken to be as long as in earlier jobs, for the same task" in lines
    assert not any("max_tokens" in line for line in lines)
    some = totals(replace(learned, range_s=(1.0, 2.0)), None)
    said = "Other answers are assumed to have any length up to max_tokens, half of it on average. 1.0 s if they take"
    assert said in " ".join(some)
    assert not any("Placement" in line for line in totals(replace(found, slowness=(1.0, 4.0)), None))


@pytest.mark.long
def test_speeds_of_workers_count_in_seconds_and_bound_and_are_said(options: dict[str, Any]) -> None:
    alike = dry_run(options)
    same = dry_run(options, speeds="1,1")
    assert same.forecast.predicted_s == alike.forecast.predicted_s
    found = dry_run(options, speeds="1, 0.25")
    assert alike.forecast.predicted_s < found.forecast.predicted_s < 4 * alike.forecast.predicted_s
    # Both of one speed: 2; now: 1.25.
    assert found.bound_s == pytest.approx(alike.bound_s * 2 / 1.25)
    console = Console(width=150, record=True)
    print_plan(found, None, console)
    assert "taken to be 1, 0.25 times as fast as the cost model says" in " ".join(console.export_text().split())
    assert plan_json(found, None)["speeds"] == [1.0, 0.25]
    assert plan_json(alike, None)["speeds"] is None


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ("1,fast", "speeds='1,fast': expected a number above 0 for each worker"),
        ("1,0", "speeds='1,0': expected a number above 0"),
        ("1,nan", "expected a number above 0"),
        ("", "expected a number above 0"),
        ("1,1,1", "speeds: 3 given for 2 workers, expected one for each. Give 2 of them, or --workers 3."),
    ],
)
def test_speeds_that_are_none_are_refused(options: dict[str, Any], speeds: str, expected: str) -> None:
    with pytest.raises(JobRequestError, match=expected):
        dry_run(options, speeds=speeds)


@pytest.mark.long
def test_beginnings_that_rows_of_an_adapter_share_are_predicted_once(options: dict[str, Any]) -> None:
    rows = [{"id": i, "adapter": "rank8", "prompt_token_ids": [*range(5, 45), 60 + i]} for i in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), options["input"])
    found = plan_json(dry_run(options), None)
    # Two whole pages of 16 tokens, in all rows but one.
    assert found["shared_prompt_tokens"] == 19 * 32
    exact = plan_json(dry_run(options | {"mode": "exact"}), None)
    assert exact["shared_prompt_tokens"] == 19 * 32
    # on the GPUs of a cluster that a plan does not start, since this machine may have none
    of_gpu = dry_run(options | {"mode": "exact", "device": "cuda", "cluster": ELSEWHERE})
    assert of_gpu.settings.device.kind == "cuda"
    on_gpu = plan_json(of_gpu, None)
    assert on_gpu["shared_prompt_tokens"] == 19 * 32
    rows = [row | {"prompt_token_ids": row["prompt_token_ids"][::-1]} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), options["input"])
    apart = plan_json(dry_run(options), None)
    assert apart["shared_prompt_tokens"] == 0
    assert found["predicted_s"] < apart["predicted_s"]


def test_a_job_file_is_planned_and_what_is_printed_names_adapters_waves_workers_and_totals(
    options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(options))
    console = Console(width=150, record=True)
    found = dry_run({"placement": "planned"}, tmp_path / "job.yaml")
    print_plan(found, None, console)
    text = console.export_text()
    assert "3 adapters: 3 exact" in text
    assert all(word in text for word in ("rank20", "(base model)", "unmerged", "80 rows", "a guess from"))
    assert found.forecast.placement is not None
    assert f"Priced alone, they take {found.forecast.placement.makespan_s:.1f} s" in " ".join(text.split())
    assert [worker.num_shards for worker in workers(found)] == [
        sum(shard.replica == worker for shard in found.forecast.plan.shards) for worker in range(found.num_workers)
    ]


def test_a_plan_without_placement_shows_none(options: dict[str, Any]) -> None:
    console = Console(width=150, record=True)
    found = dry_run(options)
    print_plan(found, None, console)
    text = console.export_text()
    assert "lacement" not in text
    assert "base files MB" not in text
    assert plan_json(found, None)["placement"] == []
    assert all(shard.replica is None for shard in found.forecast.plan.shards)


def test_a_plan_names_the_engines_limits_and_says_when_their_device_is_assumed(options: dict[str, Any]) -> None:
    def printed(**more: Any) -> str:
        console = Console(width=200, record=True)
        print_plan(dry_run(options | more), None, console)
        return console.export_text()

    found = printed(device="cpu")
    assert "Engines: 8 rows and 512 tokens a step" in found
    assert re.search(r"Each engine takes at most \d\.\d GB of memory: .* more once adapters are merged", found)
    assert "once adapters are merged" not in printed(device="cpu", mode="unmerged")
    assert "The device is not known" not in found
    assert "Engines of 2 processes each: 8 rows and 512 tokens a step" in printed(device="cpu", tensor_parallel=2)
    # a cluster that a plan does not start
    assumed = printed(cluster=ELSEWHERE, device="cuda", batch_rows=None)
    assert re.search(r"Engines: 512 rows and 16384 tokens a step, \d+\.\d GB for keys, values and adapters", assumed)
    assert "Each engine takes" not in assumed
    assert "a GPU with the 141 GB of an H200 is assumed. Seconds and price depend on it" in assumed


@pytest.mark.long
def test_a_plan_in_8_bits_on_a_gpu_says_so_and_takes_less_time(options: dict[str, Any]) -> None:
    on_gpu = options | {"cluster": ELSEWHERE, "device": "cuda", "mode": "unmerged"}
    plain, found = dry_run(on_gpu), dry_run(on_gpu | {"base_quantization": "fp8"})
    said = "fp8 was not compared with float32 yet: `lorabatch compare OUTPUT` does after a job"
    multiply, weights, compared = found.settings.notes
    assert (multiply, compared) == (f"linear layers multiply in fp8 ({found.settings.device.title})", said)
    now, before = map(float, re.findall(r"([\d.e-]+) GB instead of ([\d.e-]+);", weights)[0])
    assert before / 2 < now < before, weights
    assert "adapters are added unmerged in bfloat16" in weights
    assert plain.settings.notes == ()
    console = Console(width=200, record=True)
    print_plan(found, None, console)
    text = console.export_text()
    assert "linear layers multiply in fp8" in text
    assert weights in text.replace("\n", " ")
    assert said in text
    assert found.settings.cost.to_json() == pytest.approx(plain.settings.cost.scaled(0.7).to_json())
    assert found.forecast.predicted_s < plain.forecast.predicted_s


def test_a_plan_says_first_that_compiled_kernels_are_missing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabatch.pipeline.cluster.devices.lacks_compiled_kernels", lambda: True)
    found = dry_run(options | {"device": "cpu"})
    assert found.notes[0].startswith("no compiled kernels for this CPU: about ")
    assert "C compiler" in found.notes[0]
    assert dry_run(options | {"cluster": ELSEWHERE, "device": "cuda"}).notes == found.notes[1:]


def test_what_run_would_refuse_plan_refuses(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(JobRequestError, match="max_tokens=0"):
        dry_run(options | {"max_tokens": 0})
    rows = [{"id": i, "adapter": "no-such-adapter", "prompt": "x"} for i in range(10)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "input.parquet")
    with pytest.raises(ErrorBudgetError, match="10 of 10 rows"):
        dry_run(options)


def test_a_cost_model_that_is_none_is_refused_with_everything_else(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text("{}")
    with pytest.raises(JobRequestError) as caught:
        dry_run(options | {"cost_model": str(tmp_path / "cost.json"), "input": str(tmp_path / "nothing")})
    assert len(caught.value.problems) == 2
    assert "not a file that `lorabatch profile` wrote" in str(caught.value)


def test_the_rows_of_two_names_of_one_content_are_counted_apart() -> None:
    adapters = (AdapterInfo("sha-a", 8, 1000), AdapterInfo("sha-b", 16, 1000))
    rows = make_workload(
        adapters,
        np.array([0, 0, 0, 1, -1], np.int32),
        np.array([10, 20, 40, 80, 160], np.int32),
        np.full(5, 8, np.int32),
    )
    settings = RunSettings.of_machine("h200-llama-3-8b", batch_rows=8)
    forecast = prediction.forecast(settings, rows, 1, max_rows=100)
    shares = adapter_forecasts(["a", "b", "twin"], np.array([0, 2, 2, 1, -1], np.int32), rows, forecast)
    found = [(share.name, share.rank, share.num_rows, share.prompt_tokens) for share in shares]
    assert found == [("a", 8, 1, 10), ("b", 16, 1, 80), ("twin", 8, 2, 60), (None, 0, 1, 160)]
    assert sum(share.predicted_output_tokens for share in shares) == forecast.predicted.sum()
    assert sum(share.engine_s for share in shares) == pytest.approx(forecast.row_s.sum())
