from __future__ import annotations

from lorabatch.pipeline.engine_child import engine_environment


def test_an_engine_has_its_own_threads_and_keeps_its_memory() -> None:
    worker = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = engine_environment(worker, 4)
    assert (found["PATH"], found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("/bin", "4", "4")
    assert "MALLOC_TRIM_THRESHOLD_" not in found


def test_without_a_number_of_threads_the_workers_are_left_as_they_are() -> None:
    assert engine_environment({"OMP_NUM_THREADS": "1"}, None) == {"OMP_NUM_THREADS": "1"}
