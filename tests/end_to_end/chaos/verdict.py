"""What the output of a disturbed job must be: every row once, right, and nothing half-written beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import echo_engine
import pyarrow as pa
import pyarrow.parquet as pq

from lorabatch.jobs.store import JobStore
from lorabatch.system.local_cache import scratch_folder, temporary_folder
from lorabatch.tests.end_to_end.chaos.material import Material
from lorabatch.tests.end_to_end.chaos.scenario import Scenario
from lorabatch.tests.end_to_end.chaos.sorted_output import digest, sorted_output, without_attempts

_ONLY_WHILE_RUNNING = ("rows", "wip", "tmp")
_OF_DASK = "dask-scratch-space"
_SHARED_MEMORY = Path("/dev/shm")
# Of Python's multiprocessing, by which Dask starts workers.
_OF_PYTHON = "sem.mp-*"


def faults_of_output(output: Path, store: JobStore, material: Material, scenario: Scenario) -> list[str]:
    """Everything that is wrong with a finished job's output, as sentences; empty when nothing is. `output`: as a local
    folder; `store`: where the job has it.
    """
    try:
        table = sorted_output(output)
    except (OSError, pa.ArrowException) as error:
        return [f"the output cannot be read: {error}"]
    faults = [*_lost_and_repeated(table, material, scenario), *_wrong(table, material, scenario)]
    faults += _leftovers(output, store)
    if not faults and digest(output) != material.undisturbed_digest(scenario.engine, scenario.tensor_parallel):
        faults.append("the sorted output differs from that of an undisturbed run")
    return faults


def faults_of_parts(store: JobStore, material: Material, scenario: Scenario, changed: Collection[str]) -> list[str]:
    """Sentences about the parts of a job that has ended while files of it are other ones: rows that are answered are
    answered as in an undisturbed run, but for those of adapters that were other ones when the client began.
    """
    right, ids = material.undisturbed_rows(scenario.engine, scenario.tensor_parallel), Counter[int]()
    wrong, errors = [], []
    for shard in store.committed_parts():
        with store.open_part(shard) as part:
            rows = pq.read_table(part).to_pylist()
        for row in rows:
            ids[row["id"]] += 1
            if row["error"] is not None:
                errors.append(row)
            elif without_attempts(row) != without_attempts(right[row["id"]]):
                wrong.append(row)
    faults = [f"a row is {row} while {[*changed]} changed" for row in wrong if not _is_of_other_adapter(row, right)]
    if "adapter" not in changed:
        faults += [f"row {row['id']} is an error while {[*changed]} changed: {row['error']}" for row in errors]
    return faults[:3] + [f"rows repeated: {row}" for row, count in ids.items() if count > 1][:3]


def _is_of_other_adapter(row: dict[str, Any], right: Mapping[int, dict[str, Any]]) -> bool:
    def adapters(one: dict[str, Any]) -> list[Any]:
        several = [value if isinstance(value, list) else [value] for value in one.values()]
        structs = [value for values in several for value in values if isinstance(value, dict)]
        return [one.get("adapter_sha256"), *(struct["adapter_sha256"] for struct in structs)]

    # A stage that another answer reaches may be skipped or not.
    now, before = set(adapters(row)), set(adapters(right[row["id"]]))
    return bool(now - before) if any(isinstance(value, dict) for value in row.values()) else now != before


def _lost_and_repeated(table: pa.Table, material: Material, scenario: Scenario) -> Iterator[str]:
    expected = {row["id"] for row in material.rows(scenario.engine)}
    found = Counter(table.column("id").to_pylist())
    lost = expected - found.keys()
    repeated = [row_id for row_id, count in found.items() if count > 1]
    strange = found.keys() - expected
    for what, ids in (("lost", lost), ("repeated", repeated), ("never asked", strange)):
        if ids:
            yield f"{len(ids)} rows {what}: {sorted(ids)[:5]}"


def _wrong(table: pa.Table, material: Material, scenario: Scenario) -> Iterator[str]:
    rows = table.to_pylist()
    errors = [row for row in rows if row["error"] is not None]
    if errors:
        yield f"{len(errors)} rows are errors, first {errors[0]['id']}: {errors[0]['error']}"
    if scenario.engine not in ("real", "staged"):
        tokens = material.max_tokens(scenario.engine)
        wrong = [
            row["id"]
            for row in rows
            if row["completion"] != echo_engine.answer(row["prompt_token_ids"], row["adapter_sha256"], tokens)
        ]
        if wrong:
            yield f"{len(wrong)} rows have another row's answer: {wrong[:5]}"
    inputs = {row["id"]: row for row in material.rows(scenario.engine)}
    changed = [row["id"] for row in rows if any(row[name] != inputs[row["id"]][name] for name in ("adapter", "note"))]
    if changed:
        yield f"{len(changed)} rows lost their columns: {changed[:5]}"


def faults_of_temporary_files(folder: Path) -> Iterator[str]:
    """Files left in the trial's folder for temporary files. Those of killed processes go when the next process has made
    a folder there; Dask's own are Dask's.
    """
    ours = scratch_folder(folder)
    with temporary_folder(ours) as own:
        left = [path for path in (*folder.iterdir(), *ours.iterdir()) if path not in (ours, own, folder / _OF_DASK)]
    if left:
        yield f"left behind in the folder for temporary files: {[str(path.relative_to(folder)) for path in left]}"


def named_shared_memory() -> set[Path]:
    """Shared memory of this machine that would outlive its processes, but for Python's own."""
    return {path for path in _SHARED_MEMORY.glob("*") if not path.match(_OF_PYTHON)}


def faults_of_shared_memory(before: set[Path]) -> Iterator[str]:
    """Shared memory that is there since the trial began and that no process uses."""
    left = named_shared_memory() - before
    if left:
        used = "".join(_maps(process) for process in Path("/proc").glob("[0-9]*"))
        left = {path for path in left if str(path) not in used}
    if left:
        yield f"left behind in {_SHARED_MEMORY}: {sorted(path.name for path in left)}"


def _maps(process: Path) -> str:
    """Files that a process has mapped; those of other users' processes are theirs."""
    with suppress(OSError):
        return (process / "maps").read_text()
    return ""


def _leftovers(output: Path, store: JobStore) -> Iterator[str]:
    """Files of a running job, or halves of files, in the output of a finished one."""
    ours = output / "_lorabatch"
    left = [name for name in _ONLY_WHILE_RUNNING if (ours / name).exists()]
    left += [str(path.relative_to(output)) for path in output.rglob("*") if path.name.endswith(".tmp")]
    if left:
        yield f"left behind in the output: {left}"
    for path in (*ours.glob("*.json"),):
        json.loads(path.read_text())
    # Torn lines would raise.
    store.read_events()
    state = store.read_state()
    if state is None or state.phase != "done":
        yield f"state.json says {state.phase if state else 'nothing'} of a job that is done"
