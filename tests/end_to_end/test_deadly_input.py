"""Row groups that kill the Dask workers that read them: the job is refused and names them, and no others."""

from __future__ import annotations

import dask
import deadly_files
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster_under_test import own_cluster
from distributed import Client
from echo_job import EchoJob, make_rows

from lorabatch.jobs.errors import InputRowsError

pytestmark = pytest.mark.long
# More rows than the client reads itself, in chunks of four files.
NUM_FILES, FILE_ROWS = 20, 220


def num_lost(client: Client) -> int:
    events = [event for _, event in client.get_events("all")]
    return sum(event.get("action") == "remove-worker" and not event["expected"] for event in events)


# With one worker, the coordinator of the job is on the worker that dies.
@pytest.mark.parametrize(("num_workers", "killers"), [(1, [1]), (3, [1]), (2, [4, 5])])
def test_row_groups_that_kill_their_readers_twice_are_named_and_no_others(
    echo_job: EchoJob, num_workers: int, killers: list[int]
) -> None:
    folder = echo_job.folder / "input"
    folder.mkdir()
    rows = make_rows(NUM_FILES * FILE_ROWS)
    names = [
        f"{number:02d}-{deadly_files.MARK if number in killers else 'rows'}.parquet" for number in range(NUM_FILES)
    ]
    for number, name in enumerate(names):
        own = rows[number * FILE_ROWS :][:FILE_ROWS]
        pq.write_table(pa.Table.from_pylist(own), folder / name)
    source = f"{deadly_files.PROTOCOL}://{folder}"
    with dask.config.set({"distributed.worker.preload": [deadly_files.__name__]}), own_cluster(num_workers) as client:
        with pytest.raises(InputRowsError) as refusal:
            echo_job.run(client, input=source)
        # Killers that have shared a worker once are tried one at a time: first their chunks, then their files.
        assert num_lost(client) <= 6 * len(killers)
        assert [problem.partition(":")[0] for problem in refusal.value.problems] == [
            f"input file {names[number]!r}, row group 0 (rows 0 to {FILE_ROWS - 1})" for number in killers
        ]
        assert all("two workers or more were lost" in problem for problem in refusal.value.problems)
        for number in killers:
            (folder / names[number]).unlink()
        echo_job.run(client, input=source)
    echo_job.assert_answered([row for row in rows if row["id"] // FILE_ROWS not in killers])
