"""Errors travel from workers, keep every problem, and lead to their exit codes."""

from __future__ import annotations

import pickle

import pytest

from lorabatch.jobs import errors


def all_kinds(kind: type[errors.JobError] = errors.JobError) -> list[type[errors.JobError]]:
    """Of this room; others may have kinds of their own below them."""
    own = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return [kind, *(below for child in own for below in all_kinds(child))]


@pytest.mark.parametrize("kind", all_kinds())
def test_every_error_survives_the_journey_from_a_worker(kind: type[errors.JobError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("what is wrong")))
    assert type(copy) is kind
    assert str(copy) == "what is wrong"


@pytest.mark.parametrize("kind", all_kinds())
def test_every_error_stands_in_the_tree_with_its_exit_code(kind: type[errors.JobError]) -> None:
    (line,) = [line for line in (errors.__doc__ or "").splitlines() if f" {kind.__name__} " in f" {line.strip()} "]
    words = line.split(kind.__name__)[1].split()
    assert int(words[0]) == kind.exit_code


def test_all_problems_are_listed_and_kept() -> None:
    error = pickle.loads(pickle.dumps(errors.JobRequestError("one", "two")))
    assert error.problems == ("one", "two")
    assert str(error) == "2 problems with this job:\n  - one\n  - two"


def test_a_missing_file_is_what_python_calls_it_too() -> None:
    with pytest.raises(FileNotFoundError):
        raise errors.MissingFileError("gone")
