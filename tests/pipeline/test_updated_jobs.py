"""An output whose table, adapters and options change between its updates, which die anywhere: never half, never wrong.

After each command the answers in the output are those of one whole table, if the output says so: of the last table that
was answered, or of the one that the command was given. No row is computed whose answer was there.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo_engine import answer
from examples import explore
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from one_thread import OneThread
from small_cluster import Death, Disk, SmallCluster, watched

from lorabatch.jobs.errors import JobError
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.job_status import read_status
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline import run as run_module

NAMES = (None, "alpha", "beta")
#: A process dies at this change of a file, of those with this in their path.
FILES = ["/update-", "/update-", "/wip/", "part-", "part-", "job.json", "plan.", "s.json", "_SUCCESS", ""]
DEATHS = st.tuples(st.integers(1, 30), st.sampled_from(FILES))
SEEDS = st.integers(0, 10_000)


class Row(NamedTuple):
    """A row of the table."""

    adapter: str | None
    version: int
    note: str


class Answer(NamedTuple):
    """What the output has of a row."""

    prompt: tuple[int, ...]
    adapter_sha256: str | None
    completion: str
    note: str


Answers = dict[int, Answer]


def prompt_of(row_id: int, version: int) -> tuple[int, ...]:
    return (3 + row_id, 4 + version)


class UpdatedOutput(RuleBasedStateMachine):
    """One output, from its first command on."""

    def __init__(self, product: OneThread) -> None:
        super().__init__()
        self.product = product
        product.errors.clear()
        self.folder = Path(tempfile.mkdtemp(prefix="job-"))
        self.disk = Disk(self.folder / "out")
        self.words = {"alpha": "one", "beta": "one"}
        self.max_tokens = 3
        self.table: dict[int, Row] = {}
        self.num_rows = 0
        #: Answers of the last table that was answered whole; None before the first.
        self.whole: Answers | None = None
        #: Answers that commands since then were asked for.
        self.asked: list[Answers] = []

    @initialize(is_local=st.booleans(), num_rows=st.integers(1, 12), seed=SEEDS)
    def begin(self, is_local: bool, num_rows: int, seed: int) -> None:
        self.url = str(self.folder / "out") if is_local else f"memory://{self.folder.name}/out"
        self.fs, self.root = fsspec.url_to_fs(self.url)
        self.store = JobStore(self.url)
        for name in self.words:
            self.change_adapter(name, "one")
        self._add(num_rows, random.Random(seed))
        self._write_table(random.Random(seed))
        self.update(None, 1.0, False, seed)

    def teardown(self) -> None:
        """Whatever has happened, the command ends with the table answered."""
        try:
            if hasattr(self, "store"):
                ends = [self.update(None, 1.0, False, 0) for _ in range(2)]
                assert ends == [True, True]
        finally:
            shutil.rmtree(self.folder)
            if hasattr(self, "url") and self.url.startswith("memory") and self.fs.exists(self.root):
                self.fs.rm(self.root, recursive=True)

    # What changes

    def _add(self, num_rows: int, rng: random.Random) -> None:
        for _ in range(num_rows):
            self.table[self.num_rows] = Row(rng.choice(NAMES), 0, "new")
            self.num_rows += 1

    def _write_table(self, rng: random.Random) -> None:
        ids = list(self.table)
        rng.shuffle(ids)
        rows = [
            {"id": i, "adapter": row.adapter, "prompt_token_ids": list(prompt_of(i, row.version)), "note": row.note}
            for i, row in ((i, self.table[i]) for i in ids)
        ]
        kinds = {
            "id": pa.int64(),
            "adapter": pa.string(),
            "prompt_token_ids": pa.list_(pa.int64()),
            "note": pa.string(),
        }
        table = pa.Table.from_pylist(rows, pa.schema(list(kinds.items())))
        pq.write_table(table, self.folder / "in.parquet", row_group_size=rng.choice([3, 5, 50]))

    @rule(
        num_new=st.integers(0, 4),
        removed=st.sets(st.integers(0, 30), max_size=3),
        asking=st.sets(st.integers(0, 30), max_size=3),
        moved=st.sets(st.integers(0, 30), max_size=3),
        noted=st.sets(st.integers(0, 30), max_size=3),
        seed=SEEDS,
    )
    def edit(
        self, num_new: int, removed: set[int], asking: set[int], moved: set[int], noted: set[int], seed: int
    ) -> None:
        """Rows come, leave, ask something else, ask another adapter, or change in what no prompt uses; all move."""
        rng = random.Random(seed)
        self.table = {i: row for i, row in self.table.items() if i not in removed}
        for i in asking & self.table.keys():
            self.table[i] = self.table[i]._replace(version=self.table[i].version + 1)
        for i in moved & self.table.keys():
            self.table[i] = self.table[i]._replace(adapter=rng.choice(NAMES))
        for i in noted & self.table.keys():
            self.table[i] = self.table[i]._replace(note=f"note {seed}")
        self._add(num_new, rng)
        self._write_table(rng)

    @rule(name=st.sampled_from(["alpha", "beta"]), word=st.sampled_from(["one", "two", "three"]))
    def change_adapter(self, name: str, word: str) -> None:
        self.words[name] = word
        (self.folder / "adapters" / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "adapters" / name / "word").write_text(word)

    @rule(max_tokens=st.sampled_from([3, 4]))
    def change_max_tokens(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    # Commands

    @rule(death=DEATHS, torn=st.sampled_from([1.0, 0.5]), is_only_one_lost=st.booleans(), seed=SEEDS)
    def update_and_die(self, death: tuple[int, str], torn: float, is_only_one_lost: bool, seed: int) -> None:
        self.update(death, torn, is_only_one_lost, seed)

    @rule(seed=SEEDS)
    def update_to_the_end(self, seed: int) -> None:
        assert self.update(None, 1.0, False, seed)

    def update(self, death: tuple[int, str] | None, torn: float, is_only_one_lost: bool, seed: int) -> bool:
        """Whether the command ends with the table answered. `death`: None for none."""
        rng = random.Random(seed)
        self.product.is_only_one_lost = is_only_one_lost
        cluster = SmallCluster(2, self.disk, rng.randrange, lambda: is_only_one_lost)
        self.product.cluster = cluster
        spec = JobSpec(
            model=str(self.product.model),
            adapters=str(self.folder / "adapters"),
            input=str(self.folder / "in.parquet"),
            output=self.url,
            load_format="dummy",
            max_tokens=self.max_tokens,
            update=True,
        )
        wanted = self.answers()
        self.asked.append(wanted)
        there = self._there()
        expected = None if self.whole is None or self.store.updates() else self._counts(self.whole, wanted)
        job_before = self._job_id()
        self.disk.torn, self.disk.torn_file = torn, ""
        self.disk.deadly, self.disk.where = death or (None, "")
        watched(self.disk)
        is_done = False
        try:
            result = run_module.run(spec, client=cluster)  # type: ignore[arg-type]
            is_done = True
        except (Death, JobError):
            if death is None:
                raise
        finally:
            watched(None)
            self.disk.revive()
        again = [found for found in wanted.values() if self._key(found) in there and cluster.computed[found.prompt]]
        assert not again, f"computed again: {again}"
        if is_done:
            assert self._read() == wanted
            assert result.num_rows == len(wanted)
            assert not self.store.updates()
            if expected is not None and self._job_id() != job_before:
                found = self.store.read_plan_facts()["update"]
                assert {name: found[name] for name in expected} == expected
        return is_done

    def _job_id(self) -> str:
        return self.store.read_record().job_id if self.store.contents().has_job else ""

    # What is there

    def answers(self) -> Answers:
        """What the output must have of the table as it is now."""
        return {i: self._answer(i, row) for i, row in self.table.items()}

    def _answer(self, row_id: int, row: Row) -> Answer:
        prompt = prompt_of(row_id, row.version)
        sha = None if row.adapter is None else f"{row.adapter}-{self.words[row.adapter]}-".ljust(64, "0")
        return Answer(prompt, sha, answer(prompt, sha, self.max_tokens), row.note)

    @staticmethod
    def _key(found: Answer) -> tuple[Any, ...]:
        """All of an answer that the rest of its row does not change."""
        return (found.prompt, found.adapter_sha256, found.completion)

    @staticmethod
    def _counts(before: Mapping[int, Answer], now: Mapping[int, Answer]) -> dict[str, int]:
        same = [i for i in now if i in before and UpdatedOutput._key(now[i]) == UpdatedOutput._key(before[i])]
        new = now.keys() - before.keys()
        changed = len(now) - len(same) - len(new)
        removed = len(before.keys() - now.keys())
        return {"kept": len(same), "new": len(new), "changed": changed, "removed": removed, "unanswered": 0}

    def _names(self, folder: str = "") -> list[str]:
        path = f"{self.root}/{folder}".rstrip("/")
        if not self.fs.exists(path):
            return []
        return [name.rstrip("/").rpartition("/")[2] for name in self.fs.ls(path, detail=False)]

    def _rows(self, folder: str = "") -> list[dict[str, Any]]:
        parts = [name for name in self._names(folder) if name.startswith("part-")]
        data = [self.fs.cat_file(f"{self.root}/{folder}/{name}".replace("//", "/")) for name in parts]
        return [row for part in data for row in pq.read_table(pa.BufferReader(part)).to_pylist()]

    def _read(self, folder: str = "") -> Answers:
        rows = self._rows(folder)
        found = {
            row["id"]: Answer(tuple(row["prompt_token_ids"]), row["adapter_sha256"], row["completion"], row["note"])
            for row in rows
        }
        assert len(found) == len(rows), "a row is there twice"
        return found

    def _there(self) -> set[tuple[Any, ...]]:
        """Answers that are kept for certain: of the whole output, and of updates that were left."""
        found = list(self._read().values()) if "_SUCCESS" in self._names() else []
        for name in self._names("_lorabatch"):
            if name.startswith("update-") and "job.json" in self._names(f"_lorabatch/{name}/_lorabatch"):
                found += self._read(f"_lorabatch/{name}").values()
        return {self._key(one) for one in found}

    @invariant()
    def answers_are_whole(self) -> None:
        if not hasattr(self, "store"):
            return
        if "_SUCCESS" in self._names():
            found = self._read()
            known = [*self.asked, *([] if self.whole is None else [self.whole])]
            assert found in known, "the output says that it is whole, and is not"
            if found in self.asked:
                self.whole, self.asked = found, self.asked[self.asked.index(found) + 1 :]
        elif self.whole is not None:
            assert self.store.latest().is_finished(), "the old answers are gone, and the new ones are not there"

    @invariant()
    def status_is_true(self) -> None:
        if not hasattr(self, "store") or not self.store.contents().has_job:
            return
        status = read_status(self.store.latest())
        assert status.outcome != "done" or "_SUCCESS" in self._names()


def test_an_updated_output_is_never_half_and_never_wrong(
    weightless_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = OneThread(monkeypatch, weightless_model)
    explore(lambda: UpdatedOutput(product), num_short=2, num_steps=7, long_s=150)
