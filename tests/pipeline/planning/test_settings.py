"""Settings of runs, and the devices that they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lorabatch.engine.memory.limits import total_host_bytes
from lorabatch.kernels import cpu_instructions
from lorabatch.pipeline.cluster.devices import Device, find_device, least_device
from lorabatch.pipeline.planning.settings import RunSettings
from lorabatch.scheduler.costs.machines import MACHINES


def test_a_preset_machine_has_the_limits_of_its_engine() -> None:
    limits = {name: RunSettings.of_machine(name).limits for name in MACHINES}
    found = {name: (each.batch_rows, each.step_tokens) for name, each in limits.items()}
    assert found["cpu-smollm2-135m"] == (64, 512)
    assert found["h200-llama-3-8b"] == (512, 16384)
    assert all(rows <= 512 and tokens >= 512 for rows, tokens in found.values())


def test_migration_is_part_of_every_plan_unless_a_job_forbids_it() -> None:
    settings = RunSettings.of_machine("cpu-smollm2-135m")
    tail = settings.scheduler(3).tail
    assert tail is not None
    assert (settings.scheduler(3).cost, settings.scheduler(3).expected_replicas) == (settings.cost, 3)
    assert replace(settings, migrates=False).scheduler(3).tail is None


def test_the_processor_is_found_and_a_gpu_that_is_not_there_is_assumed() -> None:
    here = find_device("cpu")
    assert (here.kind, here.name, here.memory_bytes, here.assumption) == ("cpu", "CPU", total_host_bytes(), "")
    assert here.instructions == cpu_instructions()
    gpu = find_device("cuda:77")
    assert gpu.kind == "cuda"
    assert "is assumed" in gpu.assumption


@pytest.mark.parametrize("asked", ["auto", "cpu", "cuda"])
def test_of_several_workers_the_smallest_device_counts(asked: str) -> None:
    large, small = Device("cuda", "large", 80 << 30), Device("cuda", "small", 24 << 30)
    guess = Device("cuda", "guess", 8 << 30, "assumed")
    assert least_device([large, guess, small], asked) is small
    slow = Device("cpu", "CPU", 8 << 30, lacks_compiled_kernels=True)
    assert least_device([Device("cpu", "CPU", 8 << 30), slow], asked).notes == slow.notes != ()
    nothing: Callable[[], list[Device]] = list
    assumed = least_device(nothing(), asked)
    assert "no worker of the cluster has named its device" in assumed.assumption
    assert assumed.kind == ("cuda" if asked == "cuda" else assumed.kind)


def test_workers_that_share_a_gpu_are_noticed() -> None:
    one, other = (Device("cuda", "H100", 80 << 30, uuids=(f"GPU-{i}",)) for i in range(2))
    assert least_device([one, other], "cuda").notes == ()
    [note] = least_device([one, other, other, one, other], "cuda").notes
    assert note.startswith("3 workers use one GPU, GPU-1:")
    assert "CUDA_VISIBLE_DEVICES" in note


def test_workers_whose_engines_share_one_of_their_gpus_are_noticed() -> None:
    first, second, third = (
        Device("cuda", "H100", 80 << 30, uuids=uuids) for uuids in (("a", "b"), ("b", "c"), ("d", "e"))
    )
    assert least_device([first, third], "cuda").notes == ()
    [note] = least_device([first, second, third], "cuda").notes
    assert note.startswith("2 workers use one GPU, b:")
    assert "Start each worker with 2 GPUs of its own" in note


def test_the_scheduler_knows_which_share_of_max_tokens_a_plan_expects() -> None:
    """From it follows the longest that a row can have left."""
    settings = RunSettings.of_machine("cpu-smollm2-135m")
    shares = [replace(settings, length_share=share).scheduler(2).tail for share in (0.5, 1.0)]
    assert [tail.length_share for tail in shares if tail is not None] == [0.5, 1.0]
