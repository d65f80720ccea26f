"""A job through any order of runs, deaths and damage: what says "done" is right, and nothing is computed twice.

The product opens, plans, runs, counts and finishes; only Dask and the engine's process are stand-ins of one thread (see
`small_cluster`). The model beside it knows for each row who must answer it now, and what is kept for certain.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo_engine import answer
from examples import explore
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from one_thread import OneThread
from small_cluster import Death, Disk, SmallCluster, watched

from lorabatch.engine.errors import RUN_AGAIN
from lorabatch.jobs.errors import JobError, OutputConflictError
from lorabatch.jobs.spec import JobSpec
from lorabatch.jobs.status.job_status import read_status
from lorabatch.jobs.store import JobStore
from lorabatch.pipeline import run as run_module
from lorabatch.pipeline.result import JobResult

NUM_ROWS, MAX_TOKENS = 14, 3
NAMES = (None, "alpha", "beta")
Prompt = tuple[int, ...]
PROMPTS: dict[int, Prompt] = {i: (3 + i, 4) for i in range(NUM_ROWS)}
ADAPTER_OF = {i: NAMES[i % len(NAMES)] for i in range(NUM_ROWS)}
NUMBER_OF = {prompt: i for i, prompt in PROMPTS.items()}
#: A process dies at this change of a file, of those with this in their path.
FILES = ["/wip/", "/wip/", "/wip/", "part-", "part-", "job.", "plan.", "rows/", "s.json", "_SUCCESS"]
DEATHS = st.tuples(st.integers(1, 8), st.sampled_from(FILES)) | st.tuples(st.integers(1, 150), st.just(""))
SEEDS, NUMBERS = st.integers(0, 1000), st.integers(0, 99)
Blow = tuple[int, str] | None
#: Records that cannot be made again, and others.
FIRST_RECORDS = ("job.json", "plan.arrow")
RECORDS = (
    *FIRST_RECORDS,
    *("plan.json", "parts.json", "summary.json", "state.json", "events.jsonl"),
    *("index/chunk-00000.arrow", "index/chunk-00001.arrow", "rows/chunk-00001.arrow", "rows/chunk-00002.arrow"),
)


class Job(RuleBasedStateMachine):
    """One job and its output, from its first command on."""

    def __init__(self, product: OneThread) -> None:
        super().__init__()
        self.product = product
        product.errors.clear()
        self.folder = Path(tempfile.mkdtemp(prefix="job-"))
        self.disk = Disk(self.folder / "out")
        self.words: dict[str, str | None] = {"alpha": "one", "beta": "one"}
        for name in self.words:
            self._write_adapter(name)
        self._write_input(PROMPTS)
        self.input = (self.folder / "in.parquet").read_bytes()
        self.is_input_ours = True
        #: Rows that have failed for good once, with their errors.
        self.failed: dict[int, str] = {}
        #: Rows that are kept for certain, each with the hash of its adapter.
        self.kept: dict[int, str] = {}
        #: Contents of parts, and of records, that a blow has left, by name.
        self.blows: dict[str, bytes] = {}
        self.intact: dict[str, bytes | None] = {}
        #: Parts that were there once, with their names.
        self.old: list[tuple[str, bytes]] = []

    @initialize(
        is_local=st.booleans(),
        death=DEATHS,
        seed=SEEDS,
        errors=st.dictionaries(st.integers(0, NUM_ROWS - 1), st.booleans(), max_size=2),
    )
    def begin(self, is_local: bool, death: Blow, seed: int, errors: dict[int, bool]) -> None:
        """The first command, on an output of one of both kinds. `errors`: row -> whether another run may do better."""
        for row, is_curable in errors.items():
            self.fail_row(row, is_curable)
        self.url = str(self.folder / "out") if is_local else f"memory://{self.folder.name}/out"
        self.fs, self.root = fsspec.url_to_fs(self.url)
        self.store = JobStore(self.url)
        self.run(death, 1.0, False, False, seed)

    def teardown(self) -> None:
        """Whatever has happened, the command ends with the job done; the next one has nothing to do."""
        try:
            if hasattr(self, "store"):
                self.put_input_back()
                for verify in (False, True):
                    ends: list[bool] = []
                    while len(ends) < 3 and ends[-1:] != [True]:
                        ends.append(self.run(None, 1.0, False, verify, 0))
                    assert ends[-1], f"the command, with verify={verify}, does not end with the job done: {ends}"
                    self.product.errors.clear()
        finally:
            self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self.folder)
        if self.url.startswith("memory") and self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)

    def _write_adapter(self, name: str) -> None:
        folder, word = self.folder / "adapters" / name, self.words[name]
        shutil.rmtree(folder, ignore_errors=True)
        if word is not None:
            folder.mkdir(parents=True)
            (folder / "word").write_text(word)

    def _write_input(self, prompts: dict[int, Prompt]) -> None:
        rows = [{"id": i, "adapter": ADAPTER_OF[i], "prompt_token_ids": list(p)} for i, p in prompts.items()]
        pq.write_table(pa.Table.from_pylist(rows), self.folder / "in.parquet", row_group_size=5)

    # What the output holds, without the product

    def parts(self) -> dict[str, bytes]:
        return {name: data for name, data in self.files().items() if name.startswith("part-")}

    def files(self, folder: str = "") -> dict[str, bytes]:
        if not self.fs.exists(f"{self.root}/{folder}"):
            return {}
        found = self.fs.ls(f"{self.root}/{folder}", detail=True)
        return {e["name"].rpartition("/")[2]: self.fs.cat_file(e["name"]) for e in found if e["type"] == "file"}

    @staticmethod
    def rows_in(part: bytes) -> list[dict[str, Any]]:
        return pq.read_table(pa.BufferReader(part)).to_pylist()

    def sha(self, row: int) -> str | None:
        """Of the adapter that must answer it now; "" for none, None where it cannot be answered."""
        name = ADAPTER_OF[row]
        if name is None:
            return ""
        word = self.words[name]
        return None if word in (None, "refused") else f"{name}-{word}-".ljust(64, "0")

    # Commands

    @rule(death=DEATHS, torn=st.sampled_from([1.0, 0.5, 0.0]), is_only_one_lost=st.booleans(), seed=SEEDS)
    def run_and_die(self, death: Blow, torn: float, is_only_one_lost: bool, seed: int) -> None:
        """The same command again, until a process dies at some change of a file."""
        self.run(death, torn, is_only_one_lost, False, seed)

    @rule(verify=st.booleans(), seed=SEEDS)
    def run_to_the_end(self, verify: bool, seed: int) -> None:
        self.run(None, 1.0, False, verify, seed)

    def run(self, death: Blow, torn: float, is_only_one_lost: bool, verify: bool, seed: int) -> bool:
        """Whether it ends with the job done. `death`: None for none."""
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
            max_tokens=MAX_TOKENS,
            max_errors="100%",
            verify=verify,
        )
        kept = {row: sha for row, sha in self.kept.items() if sha == self.sha(row)}
        job_before = self._job_id()
        self.disk.torn, self.disk.torn_file = torn, ""
        self.disk.deadly, self.disk.where = death or (None, "")
        watched(self.disk)
        result: JobResult | None = None
        error: BaseException | None = None
        try:
            result = run_module.run(spec, client=cluster)  # type: ignore[arg-type]
        except (Death, JobError) as ended:
            error = ended
        finally:
            watched(None)
            self.disk.revive()
        if self._job_id() != job_before:
            kept = {}
        again = {row for row in kept if cluster.computed[PROMPTS[row]]}
        assert not again, f"computed again: rows {sorted(again)}"
        most = max(cluster.computed.values(), default=0)
        assert most <= 1 + cluster.num_lost, f"a row was computed {most} times, {cluster.num_lost} workers were lost"
        self.kept = kept
        self._keep(cluster)
        if isinstance(error, JobError):
            self._explain(error)
        elif result is not None:
            self._check_done(result, cluster)
        return result is not None

    def _job_id(self) -> str:
        try:
            return self.store.read_record().job_id
        except JobError:
            return ""

    def _keep(self, cluster: SmallCluster) -> None:
        """What is on the disk for certain after a run."""
        for name, part in self.parts().items():
            if self.blows.get(name) == part:
                continue
            self.old.append((name, part))
            rows = self.rows_in(part)
            self.kept |= {r["id"]: r["adapter_sha256"] or "" for r in rows if r["error"] is None}
        for shard_id, prompts in cluster.journalled.items():
            if f"/wip/{shard_id:05d}/" in self.disk.torn_file:
                continue  # the last of them are lost
            for row in (NUMBER_OF[prompt] for prompt in prompts):
                if (sha := self.sha(row)) is not None:
                    self.kept[row] = sha

    def _explain(self, error: JobError) -> None:
        """An error is of what a blow has changed, and names it. That is put right."""
        if not self.is_input_ours:
            assert isinstance(error, OutputConflictError), repr(error)
            assert "input: its files or columns have changed" in str(error)
            self.put_input_back()
            return
        first = [f"_lorabatch/{name}" for name in FIRST_RECORDS]
        records = [name for name in first if name in self.intact and self._read(name) == self.blows.get(name)]
        assert records, f"nothing is damaged, and the command ends with {error!r}"
        named = [name for name in records if Path(name).name in str(error) or self._read(name) is None]
        assert named, f"{records} are damaged, and the command says {error}"
        for name in records:
            self._write(name, self.intact.pop(name))

    def _check_done(self, result: JobResult, cluster: SmallCluster) -> None:
        """The output, row by row."""
        assert self.is_input_ours, "the command is done with an input that was replaced"
        files = self.files()
        parts = self.parts()
        assert files.keys() - parts.keys() == {"_SUCCESS"}
        rows = [row for part in parts.values() for row in self.rows_in(part)]
        assert Counter(row["id"] for row in rows) == Counter(PROMPTS.keys())
        for row in rows:
            number, sha = row["id"], self.sha(row["id"])
            if sha is None:
                assert "adapter=" in (row["error"] or ""), row
            elif row["error"] is None:
                expected = answer(PROMPTS[number], sha or None, MAX_TOKENS)
                assert (row["completion"], row["adapter_sha256"] or "") == (expected, sha), row
            else:
                # One that another run may not have is of this run; others stay.
                is_curable = RUN_AGAIN in row["error"]
                said = self.product.errors.get(PROMPTS[number]) if is_curable else self.failed.get(number)
                assert row["error"] == said, row
        assert (result.num_rows, result.num_parts) == (NUM_ROWS, len(parts))
        assert result.num_errors == sum(row["error"] is not None for row in rows)
        self._forget_mended()

    def _forget_mended(self) -> None:
        self.intact = {name: data for name, data in self.intact.items() if self._read(name) == self.blows.get(name)}
        self.blows = {name: left for name, left in self.blows.items() if self._read(name) == left}

    # What becomes of adapters, input and engines

    @rule(name=st.sampled_from(["alpha", "beta"]), word=st.sampled_from(["one", "two", "refused", None]))
    def change_adapter(self, name: str, word: str | None) -> None:
        if name == "beta" or word is not None:  # one is always there
            self.words[name] = word
            self._write_adapter(name)

    @precondition(lambda self: self.store.has_plan() and not self.intact)
    @rule()
    def replace_input(self) -> None:
        self._write_input({i: (*prompt, 9) for i, prompt in PROMPTS.items()})
        self.is_input_ours = False

    @precondition(lambda self: not self.is_input_ours)
    @rule()
    def put_input_back(self) -> None:
        """Byte for byte, at another time."""
        (self.folder / "in.parquet").write_bytes(self.input)
        self.is_input_ours = True

    @rule(row=st.integers(0, NUM_ROWS - 1), is_curable=st.booleans())
    def fail_row(self, row: int, is_curable: bool) -> None:
        error = f"the engine says no. {RUN_AGAIN if is_curable else ''}".strip()
        self.product.errors[PROMPTS[row]] = error
        if not is_curable:
            self.failed[row] = error

    @precondition(lambda self: self.product.errors)
    @rule(death=st.tuples(st.integers(1, 6), st.sampled_from(["/wip/", "part-"])))
    def heal_rows(self, death: Blow) -> None:
        """Their parts are opened again by a command that dies at that."""
        self.product.errors.clear()
        self.run(death, 1.0, False, False, 0)

    # Blows

    def _read(self, name: str) -> bytes | None:
        path = f"{self.root}/{name}"
        return self.fs.cat_file(path) if self.fs.exists(path) else None

    def _write(self, name: str, data: bytes | None) -> None:
        path = f"{self.root}/{name}"
        if data is not None:
            self.fs.pipe_file(path, data)
        elif self.fs.exists(path):
            self.fs.rm(path)

    @precondition(lambda self: self.old)
    @rule(
        which=NUMBERS,
        other=NUMBERS,
        how=st.sampled_from(["renamed", "gone", "cut", "empty", "garbage", "old", "renamed", "foreign"]),
    )
    def strike_part(self, which: int, other: int, how: str) -> None:
        name, part = self.old[which % len(self.old)]
        present = self._read(name)
        match how:
            case "gone" | "cut" | "empty" | "garbage" if present is None:
                return
            case "gone":
                left = None
            case "cut":
                left = present[: len(present) // 2]
            case "empty":
                left = b""
            case "garbage":
                left = bytes(len(present))
            case "old":
                left = part
            case "renamed":
                # Mostly in place of one of the job's, whether that is there or not.
                name, left = f"part-{(0, 1, 2, 0, 1, 2, 77)[other % 7]:05d}.parquet", part
                present = self._read(name)
            case "foreign":
                sink = pa.BufferOutputStream()
                pq.write_table(pa.table({"id": [1]}), sink)
                left = sink.getvalue().to_pybytes()
        if left == present:
            return
        if present is not None and self.blows.get(name) != present:
            for row in self.rows_in(present):
                self.kept.pop(row["id"], None)
        self._write(name, left)
        if left is None:
            self.blows.pop(name, None)
        else:
            self.blows[name] = left

    @precondition(lambda self: self.is_input_ours)
    @rule(name=st.sampled_from(RECORDS), how=st.sampled_from(["gone", "cut", "empty", "garbage"]))
    def strike_record(self, name: str, how: str) -> None:
        name = f"_lorabatch/{name}"
        data = self._read(name)
        if not data or name in self.intact:
            return
        left = {"gone": None, "cut": data[: len(data) // 2], "empty": b"", "garbage": b"\xff" * len(data)}[how]
        self.intact[name] = data
        self._write(name, left)
        if left is not None:
            self.blows[name] = left
        else:
            self.blows.pop(name, None)

    @rule(which=NUMBERS, how=st.sampled_from(["gone", "cut", "garbage"]))
    def strike_journal(self, which: int, how: str) -> None:
        """Of a shard that is open: what comes before the blow may be kept, the rest is computed again."""
        folder = "_lorabatch/wip"
        shards = self.fs.ls(f"{self.root}/{folder}", detail=False) if self.fs.exists(f"{self.root}/{folder}") else []
        journals = [path for shard in sorted(shards) for path in sorted(self.fs.ls(shard, detail=False))]
        if not journals:
            return
        path = journals[which % len(journals)]
        before = self.fs.cat_file(path)
        self.kept.clear()
        if how == "gone":
            self.fs.rm(path)
        else:
            self.fs.pipe_file(path, before[: len(before) // 2] if how == "cut" else b"\xff" * len(before))

    @precondition(lambda self: self.store.has_plan() and not self.store.is_finished())
    @rule()
    def forge_success(self) -> None:
        """As a sync may leave it that has not come to the parts."""
        self._write("_SUCCESS", b"")

    # What is said meanwhile

    @invariant()
    def status_is_true(self) -> None:
        if not hasattr(self, "store"):
            return
        said, is_done = "", False
        try:
            is_done = read_status(self.store).outcome == "done"
        except JobError as error:
            said = str(error)
        if is_done and not self.blows:
            rows = [row["id"] for part in self.parts().values() for row in self.rows_in(part)]
            assert sorted(rows) == sorted(PROMPTS), "status says done"
        assert not said or self.intact or "no job there" in said, f"nothing is damaged, and status says {said}"


def test_a_job_comes_to_its_end_whatever_happens(weightless_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product = OneThread(monkeypatch, weightless_model)
    explore(lambda: Job(product), num_short=3, num_steps=6, long_s=150)
