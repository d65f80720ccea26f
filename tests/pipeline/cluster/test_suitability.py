"""Options that the device of a job's engines cannot serve are refused before anything of the job starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from typer.testing import CliRunner

import lorabatch
from lorabatch.cli import app
from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.store import JobStore
from lorabatch.kernels import cpu_instructions
from lorabatch.pipeline.cluster.devices import Device, find_device
from lorabatch.pipeline.cluster.suitability import check_suitability, device_problems, unknown_note

PLAIN = Device("cpu", "CPU", 8 << 30, instructions=("AVX2",))
RECENT = Device("cpu", "CPU", 8 << 30, products=("bfloat16", "int8"))
A100 = Device("cuda", "A100", 80 << 30)
H100 = Device("cuda", "H100", 80 << 30, products=("fp8",))
WITHOUT_TRITON = Device("cuda", "H100", 80 << 30, lacks_triton=True, products=("fp8",))
ASSUMED = Device("cuda", "H200", 141 << 30, "no worker has named its device: a GPU is assumed")


def make_spec(**options: Any) -> JobSpec:
    return JobSpec(**{"model": "m", "input": "i", "output": "o"} | options)


@pytest.mark.parametrize(
    ("options", "cannot", "can"),
    [
        ({"base_quantization": "fp8"}, [PLAIN, RECENT, A100], [H100, ASSUMED]),
        ({"base_quantization": "int8"}, [PLAIN, A100, H100], [RECENT, ASSUMED]),
        ({"base_quantization": "fp8", "dtype": "float32"}, [RECENT, H100], [ASSUMED]),
        ({"dtype": "float16"}, [PLAIN, RECENT], [A100, H100, ASSUMED]),
        ({"dtype": "bfloat16"}, [PLAIN], [RECENT, A100, ASSUMED]),
        ({"dtype": "float32"}, [], [PLAIN, RECENT, A100, H100]),
        ({}, [], [PLAIN, RECENT, A100, H100, ASSUMED]),
    ],
)
def test_each_format_is_served_by_some_devices(
    options: dict[str, Any], cannot: list[Device], can: list[Device]
) -> None:
    spec = make_spec(**options)
    for device in cannot:
        [problem] = device_problems(spec, [device])
        assert any(f"{name}={value!r}" in problem for name, value in options.items())
        assert problem.endswith(".")
        assert " Use " in problem
    for device in can:
        assert device_problems(spec, [device, device]) == []


def test_workers_that_cannot_are_counted() -> None:
    [problem] = device_problems(make_spec(base_quantization="fp8"), [H100, A100, H100, A100, A100])
    assert "A100 does not multiply in 8-bit floating point" in problem
    assert problem.endswith("3 of 5 workers cannot.")


@pytest.mark.parametrize("options", [{}, {"device": "cuda:1"}, {"base_quantization": "fp8"}])
def test_gpus_without_triton_are_refused_with_what_to_install(options: dict[str, Any]) -> None:
    [problem] = device_problems(make_spec(**options), [WITHOUT_TRITON])
    assert problem.startswith(f"device={options.get('device', 'auto')!r}: engines on GPUs need Triton")
    assert problem.endswith("pip install triton.")
    [problem] = device_problems(make_spec(**options), [H100, WITHOUT_TRITON, H100])
    assert problem.endswith("pip install triton. 1 of 3 workers cannot.")


def test_what_is_not_known_is_noted() -> None:
    spec = make_spec(cluster="hpc.GpuCluster", device="cuda", base_quantization="fp8")
    [note] = unknown_note(spec, ASSUMED)
    assert note == "whether the workers can serve base_quantization fp8 is not known before they are there"
    assert unknown_note(spec, H100) == unknown_note(make_spec(device="cuda"), ASSUMED) == ()


def test_this_machine_multiplies_in_what_its_processor_has() -> None:
    found, instructions = find_device("cpu"), set(cpu_instructions())
    assert ("bfloat16" in found.products) <= ("AVX512_BF16" in instructions)
    assert ("int8" in found.products) <= bool({"AVX512_VNNI", "AVX_VNNI"} & instructions)


@pytest.fixture
def options(weightless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A job on a machine that shows no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pq.write_table(pa.table({"id": [1, 2], "prompt": ["one", "two"]}), tmp_path / "rows.parquet")
    places = {"model": str(weightless_model), "input": str(tmp_path / "rows.parquet"), "output": str(tmp_path / "out")}
    return places | {"load_format": "dummy", "max_tokens": 8}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"base_quantization": "fp8"}, ["base_quantization='fp8': served on GPUs only"]),
        ({"dtype": "float16"}, ["dtype='float16': this processor multiplies"]),
        ({"device": "cuda:1"}, ["device='cuda:1': no such NVIDIA GPU"]),
        ({"device": "cuda", "max_tokens": 4000}, ["device='cuda': no such NVIDIA GPU", "max_tokens=4000: leaves no"]),
    ],
)
def test_run_submit_and_plan_refuse_with_2_what_this_machine_cannot_do(
    options: dict[str, Any], more: dict[str, Any], said: list[str]
) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (options | more).items()]
    for command in ("run", "submit", "plan"):
        done = CliRunner().invoke(app, [command, *words])
        assert done.exit_code == 2, done.output
        assert all(text in done.stderr for text in said), done.stderr
    for call in (lorabatch.run, lorabatch.plan):
        with pytest.raises(lorabatch.JobRequestError) as raised:
            call(**options | more)
        assert len(raised.value.problems) == len(said)
    assert not Path(options["output"]).exists()


def test_workers_of_a_running_cluster_are_asked_before_the_job_is_recorded(options: dict[str, Any]) -> None:
    with (
        LocalCluster(n_workers=2, processes=False, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        for more in ({"base_quantization": "fp8"}, {"dtype": "float16"}, {"device": "cuda"}):
            with pytest.raises(JobRequestError, match=r"2 of 2 workers cannot\."):
                lorabatch.run(**options | more, client=client, progress=False)
            with pytest.raises(JobRequestError, match=r"2 of 2 workers cannot\."):
                lorabatch.plan(**options | more | {"cluster": cluster.scheduler_address})
    assert not Path(options["output"]).exists()


def test_a_job_that_is_done_needs_no_engines(options: dict[str, Any]) -> None:
    @contextmanager
    def connect(spec: JobSpec, client: Client | None) -> Iterator[Client]:
        raise AssertionError("asked")
        yield

    spec = make_spec(**options | {"base_quantization": "fp8"})
    with pytest.raises(JobRequestError, match="served on GPUs only"):
        check_suitability(spec, connect)
    JobStore(spec.output).mark_success()
    check_suitability(spec, connect)
    check_suitability(spec.model_copy(update={"cluster": "tcp://nowhere:1"}), connect)
    with pytest.raises(JobRequestError, match="served on GPUs only"):
        check_suitability(spec.model_copy(update={"overwrite": True}), connect)
    # nothing is asked of a cluster for options that every device serves
    check_suitability(make_spec(**options, cluster="tcp://nowhere:1"), connect)
