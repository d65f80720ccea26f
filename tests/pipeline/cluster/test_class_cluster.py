"""Clusters by the name of their class, and schedulers by their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.spec import JobSpec
from lorabatch.pipeline.cluster.class_cluster import (
    address_in_file,
    class_cluster,
    cluster_class,
    planned_workers,
)
from lorabatch.pipeline.cluster.connect import connected, open_client

LOCAL = "dask.distributed.LocalCluster"
# One process for scheduler and workers, without a dashboard.
IN_PROCESS = {"processes": False, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}


def make_spec(**options: Any) -> JobSpec:
    return JobSpec(**{"model": "m", "input": "i", "output": "o", "cluster": LOCAL} | options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "no_such_package.SLURMCluster",
            "module 'no_such_package' cannot be imported .* `pip install no-such-package`",
        ),
        ("dask.distributed.LocalCluste", "has no LocalCluste; did you mean 'dask.distributed.LocalCluster'"),
        ("dask.distributed.Client", "this is no class of Dask clusters"),
        ("collections.OrderedDict", "this is no class of Dask clusters"),
    ],
)
def test_a_name_that_is_no_class_of_clusters_is_refused_with_what_is_wrong(name: str, said: str) -> None:
    with pytest.raises(JobRequestError, match=f"cluster='{name}': .*{said}"):
        cluster_class(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 3, "cluster_options": {"n_workers": 2}}, "workers=3, cluster_options n_workers=2: each is"),
        ({"cluster_options": {"asynchronous": True}}, "cluster_options asynchronous: a job waits"),
        (
            {"cluster_options": IN_PROCESS | {"no_such_argument": 1}},
            r"\(TypeError: .*no_such_argument",
        ),
        ({"cluster_options": IN_PROCESS | {"host": "hush hush hush"}}, r"could not be started \(\w+: "),
    ],
)
def test_options_that_a_class_does_not_take_are_a_wrong_request(options: dict[str, Any], said: str) -> None:
    spec = make_spec(**options)
    with pytest.raises(JobRequestError, match=said) as raised, class_cluster(spec, open_client):
        raise AssertionError("started")
    assert "hush" not in str(raised.value)


def test_options_of_a_class_need_one_and_two_names_of_a_cluster_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(JobRequestError, match="cluster_options, cluster='local': these are arguments"):
        make_spec(cluster="local", cluster_options={"queue": "gpu"})
    with pytest.raises(JobRequestError, match=r"scheduler_file='s\.json': each names a cluster"):
        make_spec(scheduler_file="s.json")


@pytest.mark.parametrize(
    ("given", "expected"), [({"workers": 3}, 3), ({}, 2), ({"cluster_options": {"n_workers": 1}}, 1)]
)
def test_a_class_gets_the_workers_that_are_asked_for_by_either_name(given: dict[str, Any], expected: int) -> None:
    given = given | {"cluster_options": IN_PROCESS | {"n_workers": 0} | given.get("cluster_options", {})}
    if "workers" in given:
        del given["cluster_options"]["n_workers"]
    spec = make_spec(**given)
    assert planned_workers(spec) == expected
    with connected(spec) as client:
        client.wait_for_workers(expected, timeout=60)
        cluster = client.cluster
        assert isinstance(cluster, LocalCluster)
        assert len(cluster.worker_spec) == expected
    assert cluster.status.name == "closed"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "no address"),
        ("[]", "no address"),
        ('{"address": 5}', "its key address is 5"),
        ('{"id": "Scheduler-1"}', "'address'"),
    ],
)
def test_a_file_without_the_address_of_a_scheduler_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "scheduler.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(JobRequestError, match=rf"scheduler_file='.*scheduler\.json': .*{said}"):
        address_in_file(str(file), patience_s=0.0)
