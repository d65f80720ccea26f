"""The parts of the GPU benchmark that need no GPU: its checks, its arithmetic, its report, and all of it when tiny."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

import lorabatch
from lorabatch.benchmarks.gpu import __main__ as command
from lorabatch.benchmarks.gpu import checks, correctness, engine_checks, engine_matrix, measure, run
from lorabatch.benchmarks.gpu.budget import Deadline
from lorabatch.benchmarks.gpu.device import Peaks, describe, peaks_of, warnings_about
from lorabatch.benchmarks.gpu.kernel_cases import kernel_cases
from lorabatch.benchmarks.gpu.layer import StepLayer
from lorabatch.benchmarks.gpu.measure import MIXED, ranks_for
from lorabatch.benchmarks.gpu.model_folder import write_model_folder
from lorabatch.benchmarks.gpu.points import Decoding, PagesNeeded, Point, engine_parts, full_matrix, planned_pages
from lorabatch.benchmarks.gpu.reading import measure_reading
from lorabatch.benchmarks.gpu.report import as_table, problems_of
from lorabatch.benchmarks.gpu.sanitizer import output_of_failure
from lorabatch.benchmarks.gpu.sections import SECTIONS, Place, Section, tiny_scale
from lorabatch.benchmarks.gpu.shapes import LLAMA_3_8B, TINY
from lorabatch.benchmarks.gpu.steady import Job, SteadyMatrix, job_requests, serve_job, steady_engine
from lorabatch.benchmarks.gpu.variants import variants_table
from lorabatch.benchmarks.provenance import COMMIT_VARIABLE
from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request
from lorabatch.engine.runner.gpu_graphs import StepExecutor
from lorabatch.engine.runner.gpu_plan import SPLIT_KEYS
from lorabatch.engine.runner.gpu_runner import GpuRunner, full_rows_of
from lorabatch.engine.runner.runner import LaunchedStep
from lorabatch.kernels.native import native_build
from lorabatch.scheduler.costs.cost import CostModel
from lorabatch.scheduler.costs.fitting import StepSample
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.tests.engine.stub_device import StubDevice, backend_of, tokens_and_seconds

KNOWN = CPU_SMOLLM2_135M.to_json().keys()
CPU = torch.device("cpu")


@pytest.mark.long
def test_the_checks_pass_on_right_kernels() -> None:
    assert correctness.check_all([torch.float32], CPU) == []


@pytest.mark.long
def test_the_checks_see_a_wrong_kernel() -> None:
    problems = correctness.check_all([torch.float32], CPU, kernel_limits={torch.float32: 0.0})
    assert any("attention decode" in problem for problem in problems)


def test_sizes_are_those_of_the_model() -> None:
    """Llama-3-8B: 218 million weights per layer in its linear layers, 41.9 million numbers in a rank-16 adapter."""
    assert LLAMA_3_8B.layer_weights == 218_103_808
    assert LLAMA_3_8B.adapter_numbers(16) * LLAMA_3_8B.num_layers == 41_943_040


def test_kernels_over_prompts_are_those_of_their_twins() -> None:
    ranks = [8, 20]
    layer = StepLayer(TINY, 2, 20, ranks, torch.float32, CPU, num_programs=2, new_tokens=13)
    for case in kernel_cases(layer, ranks):
        expected = case.twin()
        torch.testing.assert_close(case.run().double(), expected.double(), rtol=1e-4, atol=1e-4)


def test_a_layer_splits_contexts_as_an_engine_does() -> None:
    """Where few rows decode, and not where there are enough of them to fill the device, nor in prompts."""
    full_rows = full_rows_of(CPU, TINY.num_kv_heads)
    few, many = (
        StepLayer(TINY, batch, 600, [], torch.float32, CPU, num_programs=1) for batch in (full_rows - 1, full_rows)
    )
    prompts = StepLayer(TINY, 1, 600, [], torch.float32, CPU, num_programs=1, new_tokens=600)
    assert [layer.work.limits.split_keys for layer in (few, many, prompts)] == [SPLIT_KEYS, 0, 0]


def test_the_commit_of_copied_files_is_that_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    assert describe(CPU)["commit"] == "abc123"
    monkeypatch.delenv(COMMIT_VARIABLE)
    assert describe(CPU)["commit"] != "abc123"


def test_a_floor_is_the_slower_of_bytes_and_flops() -> None:
    peaks = Peaks(bytes_per_s=10.0, flops_per_s=100.0)
    assert peaks.floor_s(20.0, 10.0) == 2.0
    assert peaks.floor_s(1.0, 500.0) == 5.0


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H200", Peaks(4.8e12, 989e12)),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", Peaks(2.04e12, 312e12)),
        ("NVIDIA L4", Peaks(0.3e12, 121e12)),
        ("NVIDIA L40S", Peaks(0.864e12, 362e12)),
        ("NVIDIA B200", Peaks(8e12, 2250e12)),
        ("abacus", None),
    ],
)
def test_peaks_are_those_of_the_whole_name(name: str, peaks: Peaks | None) -> None:
    assert peaks_of(name) == peaks


def test_a_machine_that_is_not_listed_or_not_built_is_warned_of() -> None:
    facts, gpu = describe(CPU) | {"device": "NVIDIA H200", "compiled_kernels": "avx512"}, torch.device("cuda")
    assert warnings_about(gpu, facts) == []
    (unlisted,) = warnings_about(gpu, facts | {"device": "NVIDIA GH200 480GB"})
    assert unlisted.startswith("device 'NVIDIA GH200 480GB' is not in benchmarks/gpu/device.py")
    (not_built,) = warnings_about(CPU, facts | {"device": "", "compiled_kernels": None})
    assert not_built.startswith("the compiled CPU kernels are missing")
    assert describe(CPU)["compiled_kernels"] == native_build()


def test_mixed_ranks_come_in_turn() -> None:
    assert ranks_for(MIXED, 4) == [8, 16, 64, 8]
    assert ranks_for(8, 2) == [8, 8]


# What our other parts need and this command must not.
NOT_THERE = ["dask", "distributed", "pulp", "typer", "pydantic", "rich", "msgpack", "gguf", "bokeh", "fsspec", "duckdb"]
FORBIDDING = """
import sys

class Forbidding:
    def find_spec(self, name, path=None, target=None):
        caller = sys._getframe(1)
        while caller and "importlib" in caller.f_code.co_filename:
            caller = caller.f_back
        asker = caller.f_code.co_filename if caller else ""
        is_ours = asker.startswith({root!r}) and "site-packages" not in asker
        if name.partition(".")[0] in {names!r} and is_ours:
            raise ModuleNotFoundError(f"{{name}} is not on this machine", name=name)

sys.meta_path.insert(0, Forbidding())
"""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The one command, on a CPU, at the smallest sizes, on a machine that lacks most of our dependencies."""
    folder = tmp_path_factory.mktemp("run")
    root = str(Path(lorabatch.__file__).parent)
    (folder / "sitecustomize.py").write_text(FORBIDDING.format(names=NOT_THERE, root=root))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    # A third of it on a machine with nothing else to do.
    options = ["--tiny", "--seconds", "1000", "--json", str(folder / "result.json")]
    command = [sys.executable, "-m", "lorabatch.benchmarks.gpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1100, check=False)
    assert (folder / "result.json").exists(), done.stderr[-3000:]
    return done, json.loads((folder / "result.json").read_text())


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_whole_run_at_the_smallest_sizes(
    whole_run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    """Every section is there, and so is its line in the table, which comes last."""
    done, result = whole_run
    failed = {name: part for name, part in result.items() if isinstance(part, dict) and "failed" in part}
    assert not failed, done.stderr[-3000:]
    assert (done.returncode, result["problems"]) == (0, [])
    assert {row["kernel"] for row in result["kernels"] if row["tokens"] == 1} >= {
        "attention decode", "LoRA shrink qkv", "LoRA qkv + rotation", "LoRA o + residual", "argmax", "top-p sampling"
    }  # fmt: skip
    assert {row["kernel"] for row in result["kernels"] if row["tokens"] == 5} >= {"attention prompts"}
    assert result["left_out"] == {}
    assert {(row["batch"], row["adapters"]) for row in result["kernels"]} == {(2, 1), (2, 2)}
    assert result["compile"]["not_compiled"] == {}
    assert len(result["compile"]["kernels"]) >= result["compile"]["num_kernels"]["float32"] >= 14
    assert result["ceilings"].keys() >= {
        "copy_bytes_per_s",
        "pinned_bytes_per_s",
        "launch_us",
        "graph_node_us",
        "products",
    }
    decoding = [(row["batch"], row["context"], row["adapters"], row["repeats"]) for row in result["engine"]["decoding"]]
    assert decoding == [(3, 20, 1, 2), (3, 20, 2, 2)]
    assert [row["adapters"] for row in result["steady"]["jobs"]] == [0, 2]
    assert all(row["steps_with_prompts"] > 0 for row in result["steady"]["jobs"])
    decode, mixed = (result["steady"]["profiles"][kind] for kind in ("decode", "mixed"))
    assert all("aten::" in profile["kernels"] for profile in (decode, mixed))
    assert all(step["prompt_tokens"] == 0 < step["decode_rows"] for step in decode["steps"])
    assert any(step["prompt_tokens"] > 0 < step["decode_rows"] for step in mixed["steps"])
    assert [row["mode"] for row in result["engine"]["points"]] == [
        "unmerged", "unmerged", "merged", "mixture", "unmerged"
    ]  # fmt: skip
    assert result["engine"]["failed_points"] == []
    assert all(row["decode_tokens_per_s"] > 0 for row in result["engine"]["points"])
    assert "decode_of_base" in result["engine"]["points"][1]
    assert "switch_ms" in result["engine"]["points"][2]
    assert result["switches"].keys() >= {"merge_ms", "restore_ms", "load_rank16_ms"}
    assert result["peft"].keys() >= {"base_tokens_per_s", "mixed_2_adapters_tokens_per_s", "merged_tokens_per_s"}
    assert result["vllm"] == result["vllm_base"] == {"skipped": "vllm needs a GPU"}
    assert result["sanitizer"] == {"skipped": "compute-sanitizer needs a GPU"}
    assert result["loading"].keys() >= {"first_token_of_new_adapter_ms", "switch_from_pool_ms", "switch_from_host_ms"}
    assert result["loading"].keys() >= {"reading_hash_ms", "reading_adapters_per_s_2_threads"}
    assert [(row["peer"], row["adapters"]) for row in result["ours"]] == [("peft", 0), ("peft", 2)]
    assert CostModel.from_json({k: v for k, v in result["steady"]["cost_model"].items() if k in KNOWN}).step_s >= 0
    assert [(row["adapters"], row["rank"]) for row in result["layer"]] == [(0, None), (1, 8), (2, 8)]
    assert "attention decode" in done.stdout
    assert all(f"{name} skipped: " in done.stdout for name in ("vllm", "vllm_base", "sanitizer"))
    # four of the points, and the one of exact mode
    assert len([line for line in done.stdout.splitlines() if "  unmerged" in line or "  merged" in line]) == 5
    assert "mixture" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_results_say_where_and_with_what_they_were_measured(
    whole_run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    machine = whole_run[1]["machine"]
    assert machine.keys() >= {"device", "driver", "cuda", "python", "commit", "date", "versions"}
    assert machine["versions"]["torch"] == version("torch")
    assert whole_run[1]["seconds"].keys() == {section.name for section in SECTIONS}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_that_is_cut_short_leaves_what_its_sections_have_found(
    whole_run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    folder = Path(whole_run[0].args[-1]).with_suffix("")
    assert {path.stem for path in folder.glob("*.json")} == {section.name for section in SECTIONS} | {
        "trace-decode", "trace-mixed"
    }  # fmt: skip


@pytest.mark.long
def test_variants_are_measured_in_processes_of_their_own_environments(tmp_path: Path) -> None:
    """Three of them; the one that needs a GPU says so, and is launched like the first on a CPU."""
    command_line = [sys.executable, "-m", "lorabatch.benchmarks.gpu", "--tiny", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [*command_line, "--variants", "usual", "wider-tiles", "varlen"],
        capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "LORABATCH_PROMPT_ATTENTION='varlen': it needs a GPU" in done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["variants"]
    assert list(found) == ["usual", "wider-tiles", "varlen"]
    assert all(len(value["points"]) == len(value["decoding"]) == 1 for value in found.values()), done.stderr[-3000:]
    (usual, *others) = ([row["kernel"] for row in value["kernels"]] for value in found.values())
    assert others == [usual, usual]
    measured = [line[16:] for line in done.stdout.splitlines() if line.startswith("wider-tiles ")]
    assert [line.partition(",")[0] for line in measured] == [*usual, "decode", "decode", "prompts"]


def test_a_kernel_that_does_not_fit_the_gpu_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(call: Any, device: torch.device) -> float:
        if "shrink" in call.__qualname__:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return 1e-6

    monkeypatch.setattr(measure, "median_s", too_large)
    matrix, saved = replace(tiny_scale().kernels, adapters=(2,), prompts=()), []
    rows = measure.measure_kernels(TINY, matrix, Peaks(1e12, 1e12), CPU, Deadline.after(60.0), saved.append)
    assert "out of resource: shared memory" in rows[0]["failed"]
    assert (rows[0]["kernel"], len(rows)) == ("LoRA shrink qkv", 20)
    assert all(row["us"] == 1.0 for row in rows[1:])
    assert saved[-1] is rows
    found = {"model": "tiny", "machine": {"device": "x", "date": "y"}, "kernels": rows}
    assert "LoRA shrink qkv" in as_table(found)
    assert "failed: out of resource" in as_table(found)
    table = variants_table(found | {"variants": {"more-stages": {"kernels": rows}}})
    assert "more-stages: LoRA shrink qkv: out of resource: shared memory" in table


def test_an_unknown_variant_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command.main(["--tiny", "--variants", "faster"]) == 2
    assert "--variants faster: expected usual, early-launches" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("is_again", [False, True])
def test_what_spoils_a_process_ends_its_section(
    is_again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A device that takes no more work, and the same error twice in a row; what was measured before stands."""
    errors = ["illegal memory access", "illegal memory access" if is_again else "out of memory"]
    monkeypatch.setattr(engine_matrix, "_works", lambda device: is_again or len(errors) > 0)

    def failing(*arguments: Any) -> dict[str, float]:
        raise RuntimeError(errors.pop(0))

    monkeypatch.setattr(engine_matrix, "measure_point", failing)
    points, saved = tuple(Point(1, 0, None, "unmerged", 2 + i) for i in range(3)), []
    matrix = replace(tiny_scale().engine, points=points, decoding=())
    folder = write_model_folder(tmp_path / "model", TINY)
    with torch.inference_mode(), pytest.raises(RuntimeError):
        engine_matrix.measure_engine(folder, matrix, CPU, 8 << 20, Deadline.after(60.0), saved.append)
    assert len(saved[-1]["failed_points"]) == 2


def test_complete_sections_are_kept_by_a_run_that_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that failed, were skipped or left something out are measured again."""
    measured: list[str] = []

    def found(name: str, left: float, *rest: Any) -> tuple[Any, list[str]]:
        measured.append(name)
        return {"of": name}, []

    monkeypatch.setattr(run, "_measured", found)
    earlier = run.run_all(SECTIONS, "tiny", [], CPU, 60.0, lambda _: None)
    assert measured == [section.name for section in SECTIONS]
    earlier |= {"engine": {"failed": "ended after 9 s", "until_then": None}, "layer": {"skipped": "no time left"}}
    earlier["left_out"] = {"kernels": ["2 rows"]}
    measured.clear()
    again = run.run_all(SECTIONS, "tiny", [], CPU, 60.0, lambda _: None, earlier=earlier)
    assert measured == ["engine", "kernels", "layer"]
    assert again["steady"] == {"of": "steady"}
    assert again["left_out"] == {}


def test_a_resumed_run_has_one_device_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"model": "tiny", "machine": describe(CPU) | {"commit": "other"}}))
    with pytest.raises(SystemExit, match=r"--resume: .*'commit': 'other'.* expected .* Name another file"):
        command.main(["--tiny", "--resume", "--json", str(path)])


def test_an_allocator_that_fails_the_probe_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the probe, and for all sections after it."""
    seen: list[tuple[str, str]] = []

    def found(name: str, left: float, *rest: Any) -> tuple[Any, list[str]]:
        seen.append((name, rest[-1]["PYTORCH_ALLOC_CONF"]))
        is_failed = name == "probe" and len(seen) == 1
        return {"one pool": "failed: RuntimeError: no segment" if is_failed else "62 GiB"}, []

    monkeypatch.setattr(run, "_measured", found)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    run.run_all(SECTIONS, "tiny", [], CPU, 60.0, lambda _: None)
    assert seen[:2] == [("probe", "expandable_segments:True"), ("probe", "expandable_segments:False")]
    assert {setting for _, setting in seen[1:]} == {"expandable_segments:False"}


def test_a_sanitizer_that_takes_too_long_is_ended_with_its_program(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"sleep 600 & echo $! > {pid}; wait"
    assert output_of_failure(["sh", "-c", program], 1.0, os.environ) == "not done in time"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _is_running(int(pid.read_text())):
        time.sleep(0.05)
    assert not _is_running(int(pid.read_text()))
    assert output_of_failure(["sh", "-c", "echo out of bounds; exit 9"], 5.0, os.environ) == "out of bounds"
    assert output_of_failure(["true"], 5.0, os.environ) == ""


def _is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def place(seconds: float, saved: list[Any]) -> Place:
    return Place(CPU, Deadline.after(seconds), lambda value: saved.append(deepcopy(value)))


@pytest.mark.long
def test_without_time_sections_end_with_what_they_have() -> None:
    scale = replace(tiny_scale(), dtypes=())
    places = {s.name: place(0.0, []) for s in SECTIONS}
    with torch.inference_mode():
        found = {s.name: s.measure(scale, places[s.name]) for s in SECTIONS if s.name != "switches"}
    assert found["engine"]["points"] == []
    assert (found["kernels"], found["layer"], found["peft"]) == ([], [], {"skipped": "no time left"})
    left_out = {name: place.deadline.left_out for name, place in places.items()}
    assert found["problems"] == []
    assert left_out["problems"][:2] == ["engine beside the CPU path", "graphs"], "what was not reached is not wrong"
    assert left_out["kernels"] == ["2 x 1 tokens, 1 adapters", "2 x 1 tokens, 2 adapters", "2 x 5 tokens, 2 adapters"]
    assert left_out["layer"] == ["2 rows"]
    assert left_out["steady"] == ["0 adapters, greedy", "2 adapters, drawn"]
    assert left_out["ours"] == ["peft, 0 adapters", "peft, 2 adapters"]
    assert "copy_bytes_per_s" in left_out["ceilings"]
    assert left_out["engine"][:2] == [
        f"decoding 3 rows behind 20 tokens, {count} adapters, repeat 1" for count in (1, 2)
    ]
    assert left_out["engine"][-len(scale.engine.points) :] == [point.name for point in scale.engine.points]
    result = {"model": "tiny", "machine": {"device": "x", "date": "y"}, "left_out": left_out}
    table = as_table(result | {"peft": found["peft"], "loading": {"skipped": "no time left"}})
    assert "kernels, no time left for: 2 x 1 tokens, 1 adapters; 2 x 1 tokens, 2 adapters" in table
    assert "loading skipped: no time left" in table


@pytest.mark.long
def test_a_point_that_fails_is_reported_and_the_next_has_a_new_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, engines = engine_matrix.measure_point, []

    def failing(engine: Engine, batcher: Any, point: Any, *rest: Any) -> dict[str, float]:
        engines.append(weakref.ref(engine))
        if len(engines) == 2:
            raise RuntimeError("out of memory")
        return measure(engine, batcher, point, *rest)

    monkeypatch.setattr(engine_matrix, "measure_point", failing)
    scale = tiny_scale()
    scale = replace(scale, engine=replace(scale.engine, points=scale.engine.points[:3]))
    saved: list[Any] = []
    section = next(s for s in SECTIONS if s.name == "engine")
    with torch.inference_mode():
        found = section.measure(scale, place(600.0, saved))
    assert len(found["points"]) == 2
    assert [p["error"] for p in found["failed_points"]] == ["RuntimeError: out of memory"]
    assert engines[0] is engines[1] is not engines[2]
    assert [len(value["points"]) for value in saved][-3:] == [1, 1, 2]


@pytest.mark.long
def test_each_number_of_adapters_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third adapter's rows do not fit the pool; the second one fails, and the first one's repeats go on."""

    class Failing(Engine):
        def register_dummy_adapter(self, name: str, rank: int) -> str:
            if name == "16-1":
                raise RuntimeError("out of memory")
            return super().register_dummy_adapter(name, rank)

    monkeypatch.setattr(engine_matrix, "Engine", Failing)
    scale, saved = tiny_scale(), []
    points, decoding = (Point(1, 0, None, "unmerged", 2),), (Decoding(1, 4, (1, 2, 3)),)
    matrix = replace(scale.engine, points=points, decoding=decoding, decode_steps=1)
    page_bytes = 16 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = write_model_folder(Path(name) / "model", TINY)
        arguments = CPU, 30 * page_bytes, Deadline.after(600.0), lambda value: saved.append(deepcopy(value))
        found = engine_matrix.measure_engine(folder, matrix, *arguments)
    assert [(row["adapters"], row["repeats"]) for row in found["decoding"]] == [(1, 2)]
    assert [(row["adapters"], row["error"]) for row in found["failed_points"]] == [
        ((2,), "RuntimeError: out of memory")
    ]
    assert [(row["adapters"], row["pool_pages"]) for row in found["too_large"]] == [((3,), 30)]
    assert found["too_large"][0]["needed_pages"] > 30
    assert [row["batch"] for row in found["points"]] == [1]
    assert [row["mode"] for row in found["engines"]] == ["unmerged"] * 2, "the one that failed was dropped"
    result = {"model": "tiny", "machine": {"device": "x", "date": "y"}, "engine": found}
    assert "point too large for the pool: {'batch': 1, 'context': 4, 'adapters': (3,)" in as_table(result)


class StubRunner(GpuRunner):
    """Has the steps of a `StubDevice`, no graphs and no arithmetic."""

    def __init__(self, device: StubDevice) -> None:
        self._device, self._executor, self.steps_ahead = device, StepExecutor(), device.steps_ahead

    def launch(self, entries: Any) -> LaunchedStep:
        return self._device.launch(entries)


def test_a_jobs_samples_have_the_seconds_of_their_own_steps(tmp_path: Path) -> None:
    job = Job(6, 2, draws=False, prompt_tokens=6.0, answer_tokens=5.0)
    device = StubDevice(lambda entries: sum(1.0 if e.is_decode else 40.0 * e.num_tokens for e in entries))
    config = EngineConfig(load_format="dummy", mode="unmerged", max_batch_rows=3, max_step_tokens=8, pool_bytes=8 << 20)
    folder = write_model_folder(tmp_path / "model", TINY)
    engine = Engine(folder, config, None, backend_of(StubRunner(device)), device.clock)
    samples: list[StepSample] = []
    found = serve_job(engine, job_requests(engine, job), CPU, samples)
    assert found["num_steps"] == len(samples)
    assert [tokens_and_seconds(sample) for sample in samples] == device.steps[-len(samples) :]
    assert {sample.load.rank_sum for sample in samples} == {16.0, 32.0}
    assert all(s.seconds == 40.0 * s.load.prefill_tokens + s.load.decode_rows for s in samples)


@pytest.mark.long
def test_a_job_leaves_nothing_that_holds_its_runner(tmp_path: Path) -> None:
    """No garbage collection: the next engine would find the GPU's memory taken. Graphs serve all decode rows."""
    matrix = SteadyMatrix((Job(4, 0, draws=False, prompt_tokens=3.0, answer_tokens=3.0),), batch=2)
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode():
            engine = steady_engine(write_model_folder(tmp_path / "model", TINY), matrix, CPU, 8 << 20)
            runner = weakref.ref(engine._runner)
            found = serve_job(engine, job_requests(engine, matrix.jobs[0]), CPU, [])
        del engine
        assert runner() is None
    finally:
        gc.enable()
    assert found["steps_with_prompts"] > 0
    assert (found["decode_steps_by_graph"], found["mixed_steps_by_graph"], found["steps_without_graph"]) == (1, 1, 0)


def test_rows_beside_graphs_are_of_the_base_and_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rows of all adapters come before them, so that none is read while they run. None is served here."""
    served: list[list[str | None]] = []

    class Noting(Engine):
        def run(self, requests: Any) -> Any:
            rows: list[Request] = list(requests)
            served.append([row.adapter_id for row in rows])
            return iter(())

    monkeypatch.setattr(engine_checks, "Engine", Noting)
    assert engine_checks.check_graphs(CPU, 2) == []
    first, rows = served[:2]
    assert len(first) == len(set(first)) == 4
    assert set(rows) == set(first)
    assert served == [first, rows] * 2


# Free bytes of cards, and bytes of their pools for an 8B model beside merged weights and without them.
CARDS = {"H200": (139.2, 110.1, 124.1), "H100": (78.6, 48.3, 62.3), "L40S": (44.0, 13.0, 27.0)}


@pytest.mark.parametrize("card", CARDS)
def test_pools_are_what_weights_copies_and_steps_leave(card: str, tmp_path: Path) -> None:
    """On an H200 one engine measures everything. An H100 holds 256 adapters and 256 rows behind 1,024 tokens only where
    no copy of the weights is kept; an L40S holds shorter contexts, and one point is for an H200 alone."""
    model = read_model_config(write_model_folder(tmp_path / "model", LLAMA_3_8B))
    matrix, (gib, *pools) = full_matrix(), CARDS[card]
    config = EngineConfig(device="cuda", max_batch_rows=512, max_step_tokens=matrix.max_step_tokens)
    memory_bytes, page_bytes = int(gib * 2**30), 131_072 * config.page_tokens
    pages = {mode: planned_pages(replace(config, mode=mode), model, memory_bytes) for mode in ("auto", "unmerged")}
    assert [num_pages * page_bytes / 1e9 for num_pages in pages.values()] == pytest.approx(pools, abs=0.1)
    parts, needed = engine_parts(matrix, config, model, memory_bytes), PagesNeeded(matrix, model, config.page_tokens)
    assert sorted(map(str, (point for part in parts for point in part.points))) == sorted(map(str, matrix.points))
    assert [part.mode for part in parts] == (["auto"] if card == "H200" else ["unmerged", "auto"])
    assert parts[0].decoding == matrix.decoding
    assert all(point.mode == "unmerged" for part in parts for point in part.points if part.mode == "unmerged")
    many = matrix.decoding[0]
    found = [needed.largest_decoding(many, count, pages[parts[0].mode]) for count in many.adapters]
    contexts = [None if decoding is None else decoding.context for decoding in found]
    assert contexts == ([512, 512, 512, None] if card == "L40S" else [1024] * 4)
    too_large = [p.name for part in parts for p in part.points if needed.of_point(p) > pages[part.mode]]
    largest = "256 x 128 tokens, 256 adapters of rank 64, unmerged"
    assert (largest in too_large, len(too_large)) == {"H200": (False, 0), "H100": (True, 1), "L40S": (True, 4)}[card]


def test_a_section_that_fails_keeps_what_it_had(tmp_path: Path) -> None:
    def failing(scale: Any, place: Place) -> Any:
        place.save([1])
        assert not place.deadline.allows("256 rows")
        raise RuntimeError("a kernel hung")

    run.run_one(Section("kernels", 9.0, failing), tiny_scale(), CPU, 0.0, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "value": [1], "left_out": ["256 rows"], "failed": "RuntimeError: a kernel hung"
    }  # fmt: skip


@pytest.mark.long
def test_a_section_whose_process_dies_or_hangs_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the processes: one dies after it has saved, one never ends, one does its work."""
    child = (
        "import json, os, sys, time; a = sys.argv; name, path = a[a.index('--only') + 1], a[a.index('--json') + 1];"
        "open(path, 'w').write(json.dumps({'value': [name], 'left_out': [name + ' of 2 rows']}));"
        "name == 'ceilings' and os._exit(7); name == 'engine' and time.sleep(600)"
    )
    start = subprocess.run
    monkeypatch.setattr(
        run.subprocess, "run", lambda command, **rest: start([sys.executable, "-c", child, *command[3:]], **rest)
    )
    written: list[Any] = []
    result = run.run_all(SECTIONS, "tiny", [], CPU, 3.0, lambda partial: written.append(sorted(partial)), grace_s=1.0)
    assert result["problems"] == ["problems"]
    assert result["left_out"]["problems"] == ["problems of 2 rows"]
    assert result["ceilings"] == {"failed": "its process ended with 7", "until_then": ["ceilings"]}
    assert result["engine"]["until_then"] == ["engine"]
    assert result["layer"] == {"skipped": "no time left"}
    assert len(written) == len(SECTIONS)
    cut = {"model": "tiny", "machine": result["machine"], "engine": {"failed": "ended after 3 s", "until_then": None}}
    assert "engine failed: ended after 3 s" in as_table(cut)


def test_a_check_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> list[str]:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(checks, "check_all", failing)
    monkeypatch.setattr(checks, "check_engine", lambda *_: ["a token differs"])
    for others in ("check_graphs", "check_real_widths", "check_ahead", "check_exact"):
        monkeypatch.setattr(checks, others, lambda *_: [])
    saved: list[Any] = []
    found = checks.run_checks([torch.float32], 1, TINY, CPU, Deadline.after(60.0), saved.append)
    assert found == ["kernels in torch.float32 failed: RuntimeError: does not compile", "a token differs"]
    assert problems_of({"problems": found}) == found
    assert problems_of({"problems": {"failed": "hung", "until_then": ["x"]}}) == ["x", "checks failed: hung"]


def test_reading_is_measured_part_by_part_and_by_number_of_threads(tmp_path: Path) -> None:
    folder, reading = write_model_folder(tmp_path / "model", TINY), tiny_scale().reading
    saved: list[Any] = []
    found = measure_reading(folder, reading, CPU, Deadline.after(60.0), lambda value: saved.append(deepcopy(value)))
    numbers = TINY.adapter_numbers(reading.rank) * TINY.num_layers
    assert found["file_bytes"] > numbers * 4, "stored in fp32"
    parts = {"headers_ms", "read_ms", "hash_ms", "read_and_hash_ms", "pack_ms", "read_hash_and_pack_ms"}
    parts |= {"first_table_row_ms", "table_row_ms"}
    assert found.keys() == {"file_bytes", *parts, "adapters_per_s_1_threads", "adapters_per_s_2_threads"}
    assert min(found.values()) > 0
    assert saved[-1] == found
    assert measure_reading(folder, reading, CPU, Deadline.after(0.0), saved.append) == {}


def test_the_matrix_covers_what_was_asked_of_it() -> None:
    points = full_matrix().points
    assert {p.batch for p in points} == {1, 4, 64, 128, 256, 512}
    assert {p.adapters for p in points} == {0, 1, 4, 16, 64, 256}
    assert {p.rank for p in points} == {None, 8, 16, 64, MIXED}
    assert {p.mode for p in points} == {"unmerged", "merged", "mixture"}
    assert {p.prompt_tokens for p in points} == {128, 1024, 2048, 8000}
    assert len(points) == len(set(points))
    bases = {(p.batch, p.prompt_tokens) for p in points if p.adapters == 0}
    assert all((p.batch, p.prompt_tokens) in bases for p in points), "every point has a base beside it"
    assert all(p.adapters <= p.batch for p in points)


def test_deadlines_pass() -> None:
    now = [10.0]
    deadline = Deadline.after(5.0, lambda: now[0])
    assert deadline.within(2.0).left_s == 2.0
    assert deadline.within(9.0).left_s == 5.0
    now[0] = 16.0
    assert deadline.has_passed
    assert deadline.left_s == 0.0


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
