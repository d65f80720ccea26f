"""What a model's own file says of sampling: taken where a job asks for it and gives nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorabatch.jobs.errors import JobRequestError
from lorabatch.jobs.opening.generation_config import generation_defaults
from lorabatch.jobs.opening.opened_job import make_record
from lorabatch.jobs.opening.validation import check_job
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.notes import job_notes


@pytest.fixture
def folder(weightless_model: Path, tmp_path: Path) -> Path:
    shutil.copytree(weightless_model, tmp_path / "model")
    return tmp_path / "model"


def write(folder: Path, **values: Any) -> None:
    path = folder / "generation_config.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | values))


def job(folder: Path, **options: Any) -> JobSpec:
    pq.write_table(pa.table({"prompt": ["a"]}), folder.parent / "rows.parquet")
    given = {"model": folder, "input": folder.parent / "rows.parquet", "output": folder.parent / "out"}
    return JobSpec(**given, load_format="dummy", max_tokens=8, **options)


def test_values_that_are_given_are_taken_and_the_jobs_own_go_before(folder: Path) -> None:
    write(folder, temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=9, do_sample=True)
    found = check_job(job(folder, generation_config=True, top_p=0.5)).spec.sampling
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (0.6, 0.5, 20, 8)
    assert check_job(job(folder)).spec.sampling.temperature == 0.0


def test_do_sample_false_is_greedy_and_wrong_values_are_none(folder: Path) -> None:
    write(folder, temperature=0.6, do_sample=False, top_p=7, top_k="x", min_p=True, repetition_penalty=1)
    found = generation_defaults(folder)
    assert found == {"temperature": 0.0, "repetition_penalty": 1.0}
    (folder / "generation_config.json").write_text("{")
    assert generation_defaults(folder) == {}


def test_a_model_that_says_nothing_is_named(folder: Path) -> None:
    with pytest.raises(JobRequestError, match=r"generation_config: the model's generation_config.json says nothing"):
        check_job(job(folder, generation_config=True))


def test_what_differs_from_the_job_is_said(folder: Path) -> None:
    write(folder, temperature=0.6, top_p=0.95)
    (note,) = [note for note in job_notes(make_record(check_job(job(folder, top_p=0.95)))) if "generation" in note]
    assert note.startswith("model: its generation_config.json has temperature 0.6; this job has temperature 0.")
    assert not [n for n in job_notes(make_record(check_job(job(folder, generation_config=True)))) if "generation" in n]
