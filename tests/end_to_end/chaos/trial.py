"""One trial: a job as its user runs it, disturbed as its scenario says, resumed until it is done, and then judged."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from lorabatch.scheduler.messages import BEGINNING
from lorabatch.tests.end_to_end.chaos.files import ChangedFile, Words
from lorabatch.tests.end_to_end.chaos.material import Material
from lorabatch.tests.end_to_end.chaos.place import Place, make_place, strike_part
from lorabatch.tests.end_to_end.chaos.processes import (
    HOST,
    MARK,
    ExistingCluster,
    end_all,
    give_no_more_memory,
    listening_at,
    marked,
    of_kind,
    send,
    wait_until_gone,
)
from lorabatch.tests.end_to_end.chaos.scenario import AFTER_END, Blow, FileKind, Scenario, Victim
from lorabatch.tests.end_to_end.chaos.verdict import (
    faults_of_output,
    faults_of_parts,
    faults_of_shared_memory,
    faults_of_temporary_files,
    named_shared_memory,
)
from lorabatch.tests.end_to_end.hosts.network import Network, network, why_no_hosts

_POLL_S = 0.05
_LOOK_AGAIN_S = 0.2
# A job of some seconds that is not done by then hangs. An engine that is stopped while it loads is noticed after 300 s.
TIME_LIMIT_S = 570.0
_MAX_STARTS = 8
# How long the owner of a stopped client watches it do nothing.
_PATIENCE_S = 3.0
_GONE_AFTER_S = 60.0
# Workers that only the job's event log distinguishes: by the last event of a kind.
_NAMED_IN_JOURNAL: dict[Victim, tuple[str, str]] = {
    "coordinator": (BEGINNING, "coordinator"),
    "owner": ("MigrateRows", "from_replica_id"),
    "helper": ("MigrateRows", "to_replica_id"),
}
# An engine that is held up is let run so long, and then stopped so long.
_RUNS_S, _HELD_UP_S = 0.2, 0.8
# So long it takes a batch system to start a worker in place of one that has ended.
_REPLACED_AFTER_S = 2.0
# A disk fills and empties at this pace.
_TIDE_S = 0.5


@dataclass
class Outcome:
    """What happened in a trial: starts of the client, loans of rows between workers, coordinators one after another.
    `faults`: what must not have happened, as sentences.
    """

    scenario: Scenario
    seconds: float = 0.0
    num_starts: int = 0
    num_loans: int = 0
    num_coordinators: int = 0
    longest_silence_s: float = 0.0
    blows: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Trial:
    """Runs one scenario in a folder of its own."""

    def __init__(self, scenario: Scenario, material: Material, folder: Path) -> None:
        self._scenario = scenario
        self._material = material
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._environment = material.environment() | {MARK: self._mark, "TMPDIR": str(folder / "tmp")}
        # No copies of adapters that an earlier trial has fetched.
        self._environment |= {"XDG_CACHE_HOME": str(folder / "cache")}
        # Options of the job that name files.
        self._files: dict[str, Path | str] = {}
        self._place: Place
        self._net: Network | None = None
        self._clusters = 0
        self._cluster: ExistingCluster | None = None
        self._waiting: list[Blow] = list(scenario.blows)
        # What is to be done, and when.
        self._due: list[tuple[float, Callable[[], Any]]] = []
        # Processes stopped for good, and those that go on, at the end of the job at the latest.
        self._stopped: list[psutil.Process] = []
        self._paused: list[psutil.Process] = []
        self._ending: list[psutil.Process] = []
        self._held_up: psutil.Process | None = None
        # Pairs of hosts: nothing passes from the first to the second.
        self._cuts: list[tuple[str, str]] = []
        # Files of the job that are other than they were; whether a client has seen other adapters, and whether a part
        # was changed after a client's end: the job is done after one more client.
        self._changed: dict[FileKind, ChangedFile] = {}
        self._needs_another_run = False
        # Until then no worker comes in place of one that has ended.
        self._no_workers_until_s = 0.0
        self._words: Words
        # A client may fail when the ground under it is gone, and only then.
        self._may_fail = False
        # What others had there before.
        self._shared_memory: set[Path] = set()
        self._outcome = Outcome(scenario)

    def run(self) -> Outcome:
        """Carry it out. Leaves no process behind, whatever happens."""
        began_s = time.monotonic()
        (self._folder / "tmp").mkdir(parents=True)
        self._shared_memory = named_shared_memory()
        self._files = {**self._material.files_of_one_job(self._scenario.engine, self._folder)}
        if self._scenario.is_held_up:
            self._later(0.0, self._hold_up)
        with ExitStack() as stack:
            self._net = stack.enter_context(self._hosts())
            self._place = stack.enter_context(make_place(self._scenario.store, self._folder, self._net))
            # What changes files changes those on the disk.
            if not any(blow.victim == "adapter" for blow in self._scenario.blows):
                self._files["adapters"] = self._place.keep_adapters(self._folder / "adapters")
            self._finish_and_judge(began_s + TIME_LIMIT_S)
        self._outcome.seconds = time.monotonic() - began_s
        return self._outcome

    @contextmanager
    def _hosts(self) -> Iterator[Network | None]:
        """Those of the processes, where each has one and this machine can make them."""
        if self._scenario.cluster != "hosts" or why_no_hosts():
            yield None
            return
        workers = (f"worker{place}" for place in range(self._scenario.num_workers))
        with network("scheduler", "client", "store", *workers) as net:
            yield net

    def _finish_and_judge(self, give_up_s: float) -> None:
        try:
            self._finish_job(give_up_s)
            self._end_blows()
            self._check_leftovers("engine", "the job is done")
            self._check_leftovers("member", "the job is done")
            output, store = self._place.fetched(), self._place.store
            self._outcome.faults += faults_of_output(output, store, self._material, self._scenario)
            events = Counter(event["kind"] for event in store.read_events())
            self._outcome.num_loans = events["MigrateRows"]
            self._outcome.num_coordinators = events[BEGINNING]
            self._close_cluster()
            self._check_leftovers(None, "everything has ended")
            self._outcome.faults += faults_of_temporary_files(self._folder / "tmp")
            self._outcome.faults += faults_of_shared_memory(self._shared_memory)
        except TrialError as fault:
            self._outcome.faults.append(str(fault))
        finally:
            self._close_cluster()
            end_all(marked(self._mark))

    def _end_blows(self) -> None:
        """The job is done: what was stopped for good is killed, everything else goes on."""
        end_all(self._stopped)
        for process in self._paused:
            send(process, "CONT")
        self._let_go()
        self._place.relieve()
        self._mend(*self._cuts)

    def _finish_job(self, give_up_s: float) -> None:
        has_ended_well = False
        # One that was killed may have removed half of the working files of a job that was done.
        while not has_ended_well or self._needs_another_run or not self._place.store.is_finished():
            if self._outcome.num_starts >= _MAX_STARTS:
                raise TrialError(f"not done after {_MAX_STARTS} starts")
            self._outcome.num_starts += 1
            self._needs_another_run = "adapter" in self._changed
            with self._client() as client:
                self._disturb(client, give_up_s)
                self._judge_exit(client)
            has_ended_well = client.returncode == 0
            # Its user makes room, waits until the store is back, puts files back, or mends the own connection.
            self._place.relieve()
            self._mend(*(pair for pair in self._cuts if "client" in pair))
            self._strike_after_end()
            for kind, file in list(self._changed.items()):
                file.num_ends -= 1
                # A job that has no plan makes way for that of other files.
                if not file.num_ends or not self._place.store.has_plan():
                    self._put_back(kind)

    def _strike_after_end(self) -> None:
        """Judge the parts of a job some of whose files are other ones; then change parts, as a scenario says."""
        if self._changed and not any(blow.victim == "part" for blow in self._scenario.blows):
            store = self._place.store
            self._outcome.faults += faults_of_parts(store, self._material, self._scenario, self._changed)
        for blow in [blow for blow in self._waiting if blow.share == AFTER_END]:
            if strike_part(self._place.store, blow.signal, blow.pick):
                self._waiting.remove(blow)
                self._outcome.blows.append(f"{blow.signal} part, after a client's end")
                self._needs_another_run = True

    @contextmanager
    def _client(self) -> Iterator[subprocess.Popen[bytes]]:
        """`lorabatch run` in a process of its own, its words in a log."""
        command = [sys.executable, *self._material.command_line(self._scenario.engine), *self._arguments()]
        environment = self._environment
        if self._net is not None:
            command, environment = self._net.command("client", command), environment | {HOST: "client"}
        self._may_fail = self._has_trouble
        with (self._folder / "client.log").open("ab") as log:
            log.write(f"--- start {self._outcome.num_starts}\n".encode())
            log.flush()
            self._words = Words(self._folder / "client.log")
            client = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield client
        finally:
            client.kill()
            client.wait()
            self._words.close()
            self._outcome.longest_silence_s = max(self._outcome.longest_silence_s, self._words.longest_silence_s)
            self._outcome.faults += self._words.faults

    @property
    def _has_trouble(self) -> bool:
        """Whether a client may rightly fail now, whatever the processes do."""
        return self._place.is_in_trouble or bool(self._cuts or self._changed)

    def _arguments(self) -> list[str]:
        options: dict[str, Any] = self._material.options(self._scenario.engine, self._scenario.tensor_parallel) | {
            "rows_per_shard": self._scenario.rows_per_shard,
        }
        options |= self._files
        options |= self._place.options()
        if self._scenario.cluster != "embedded":
            options["cluster"] = self._address()
        else:
            options["workers"] = self._scenario.num_workers
        words = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
        return ["run", *words]

    def _address(self) -> str:
        # A scheduler that was asked to end is no more use, though it may still be there.
        psutil.wait_procs(self._ending, timeout=_GONE_AFTER_S)
        if self._cluster is None or not self._cluster.is_whole:
            self._close_cluster()
            self._mend(*self._cuts)
            self._clusters += 1
            folder = self._folder / f"cluster-{self._clusters}"
            self._cluster = ExistingCluster(folder, self._environment, self._scenario.num_workers, self._net)
        return self._cluster.address

    def _close_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _disturb(self, client: subprocess.Popen[bytes], give_up_s: float) -> None:
        """Deal the blows as they fall due until the client has ended."""
        while client.poll() is None:
            now_s = time.monotonic()
            if now_s > give_up_s:
                raise TrialError(f"hangs: not done after {TIME_LIMIT_S:.0f} s and {self._outcome.num_starts} starts")
            self._arm()
            self._words.listen(is_paused=self._is_paused(client))
            if self._cluster is not None:
                for host in self._cluster.ended_workers():
                    delay_s = max(_REPLACED_AFTER_S, self._no_workers_until_s - now_s)
                    self._later(delay_s, partial(self._cluster.start_nanny, host))
            for entry in [entry for entry in self._due if entry[0] <= now_s]:
                self._due.remove(entry)
                entry[1]()
            time.sleep(_POLL_S)

    def _later(self, delay_s: float, act: Callable[[], Any]) -> None:
        self._due.append((time.monotonic() + delay_s, act))

    def _arm(self) -> None:
        """Blows whose share of parts is committed fall due after their delay."""
        num_parts = len(self._place.store.committed_parts()) if self._waiting else 0
        share = num_parts / self._material.num_parts(self._scenario)
        for blow in [blow for blow in self._waiting if blow.share <= share]:
            self._waiting.remove(blow)
            self._later(blow.delay_s, partial(self._strike, blow))

    def _is_paused(self, client: subprocess.Popen[bytes]) -> bool:
        return any(process.pid == client.pid for process in self._stopped + self._paused)

    def _strike(self, blow: Blow) -> None:
        match blow.victim:
            case "store":
                self._trouble_store(blow)
            case "base" | "tokenizer" | "adapter" | "input":
                self._change_file(blow.victim, blow)
            case "part":
                self._change_part(blow)
            case "workers":
                self._end_workers(blow)
            case "worker" if blow.signal in ("TAKEN", "REFUSED"):
                self._have_other_user(blow)
            case _:
                self._strike_process(blow)

    def _strike_process(self, blow: Blow) -> None:
        candidates = self._victims(blow.victim)
        if not candidates:
            # It has not started yet, or is just being replaced; or no rows have moved yet.
            self._later(_LOOK_AGAIN_S, partial(self._strike_process, blow))
            return
        process = candidates[blow.pick % len(candidates)]
        if blow.signal in ("CUT", "ONE WAY"):
            self._cut_off(blow, process)
            return
        if not (give_no_more_memory(process) if blow.signal == "MEMORY" else send(process, blow.signal)):
            return
        self._outcome.blows.append(f"{blow.signal} {blow.victim}")
        # A client cannot go on without its scheduler.
        self._may_fail |= blow.victim == "client" or (blow.victim == "scheduler" and blow.stopped_s is None)
        if blow.signal == "STOP":
            self._stop(blow, process)
        elif blow.victim == "scheduler":
            self._ending.append(process)

    def _trouble_store(self, blow: Blow) -> None:
        if not self._place.strike(blow.signal):
            self._outcome.blows.append(f"{blow.signal} store passed over: no file system can be mounted here")
        else:
            self._may_fail = True
            self._outcome.blows.append(f"{blow.signal} store")
            if blow.signal == "TIDE":
                self._ebb(time.monotonic() + (blow.stopped_s or 0.0))
            elif blow.stopped_s is not None:
                self._later(blow.stopped_s, self._place.relieve)

    def _ebb(self, until_s: float) -> None:
        """Empty a disk that is full, or fill it again, and so on."""
        self._later(_TIDE_S, self._place.relieve)
        if time.monotonic() + 2 * _TIDE_S < until_s:
            self._later(2 * _TIDE_S, partial(self._flood, until_s))

    def _flood(self, until_s: float) -> None:
        self._may_fail |= self._place.strike("FULL")
        self._ebb(until_s)

    def _change_file(self, kind: FileKind, blow: Blow) -> None:
        """Give a file other contents, or delete it, once the job has named what it has."""
        if kind in self._changed or not self._place.store.contents().has_job:
            self._later(_POLL_S, partial(self._strike, blow))
            return
        num_ends = 2 if kind != "base" and blow.stopped_s is None and blow.pick >= 4 else 1
        file = ChangedFile(self._folder / self._material.file(kind), self._folder / f"own.{kind}", num_ends)
        others, in_place = self._material.other_contents(kind, self._scenario.engine), blow.pick % 2 == 1
        file.change(blow.signal, others, in_place=in_place)
        self._changed[kind] = file
        self._may_fail = True
        self._needs_another_run |= kind == "adapter"
        how = ", in place" if in_place and blow.signal == "REPLACED" else ""
        self._outcome.blows.append(f"{blow.signal} {kind}{how}")
        if blow.stopped_s is not None:
            self._later(blow.stopped_s, partial(self._put_back, kind))

    def _put_back(self, kind: FileKind) -> None:
        if kind in self._changed:
            self._changed.pop(kind).put_back()

    def _change_part(self, blow: Blow) -> None:
        """Change a part, while others are to come: the job compares its parts before it is done. After that it falls
        when the client has ended.
        """
        store = self._place.store
        if len(store.committed_parts()) >= self._material.num_parts(self._scenario):
            self._waiting.append(replace(blow, share=AFTER_END))
        elif strike_part(store, blow.signal, blow.pick):
            self._outcome.blows.append(f"{blow.signal} part")
        else:
            self._later(_LOOK_AGAIN_S, partial(self._strike, blow))

    def _end_workers(self, blow: Blow) -> None:
        """End all workers of an existing cluster. Others come after a while."""
        processes = marked(self._mark)
        nannies = of_kind(processes, "nanny")
        for process in (*nannies, *of_kind(processes, "worker")):
            send(process, blow.signal)
        self._outcome.blows.append(f"{blow.signal} all {len(nannies)} workers, others come after {blow.stopped_s} s")
        self._no_workers_until_s = time.monotonic() + (blow.stopped_s or 0.0)

    def _have_other_user(self, blow: Blow) -> None:
        if self._cluster is None:
            self._later(_LOOK_AGAIN_S, partial(self._strike, blow))
            return
        does = "take" if blow.signal == "TAKEN" else "refuse"
        self._cluster.have_other_user(does, blow.pick, blow.stopped_s or 0.0)
        self._outcome.blows.append(f"{blow.signal} thread of a worker for {blow.stopped_s} s")

    def _cut_off(self, blow: Blow, process: psutil.Process) -> None:
        """Let nothing pass between a process's host and its opposite: of owner and helper the other one, of a worker
        whose `pick` is odd the store, and else the scheduler. One way: from the host, or to it.
        """
        try:
            host = process.environ()[HOST]
        except (psutil.Error, KeyError):
            # It has just ended; or this machine has no hosts.
            if self._net is None:
                self._outcome.blows.append(f"{blow.signal} {blow.victim} passed over: {why_no_hosts()}")
            return
        assert self._net is not None
        opposite = "scheduler"
        if blow.victim in ("owner", "helper"):
            opposite = self._host_named_in_journal("helper" if blow.victim == "owner" else "owner")
        elif blow.victim == "worker" and blow.pick % 2 and self._scenario.store == "s3":
            opposite = "store"
        ways = [(host, opposite), (opposite, host)]
        if blow.signal == "ONE WAY":
            ways = [ways[blow.pick // 2 % 2]]
        self._outcome.blows.append(f"{blow.signal} {blow.victim} from {opposite}")
        self._may_fail = True
        self._cuts += ways
        self._net.set_weather(one_way=self._cuts)
        if blow.stopped_s is not None:
            self._later(blow.stopped_s, partial(self._mend, *ways))

    def _mend(self, *pairs: tuple[str, str]) -> None:
        self._cuts = [pair for pair in self._cuts if pair not in pairs]
        if self._net is not None:
            self._net.set_weather(one_way=self._cuts)

    def _victims(self, kind: Victim) -> list[psutil.Process]:
        processes = marked(self._mark)
        if kind not in _NAMED_IN_JOURNAL:
            return of_kind(processes, kind)
        address = self._named_in_journal(kind)
        if address is None:
            return []
        host = None if self._net is None else self._net.host_of(address)
        return listening_at(of_kind(processes, "worker"), address, host)

    def _named_in_journal(self, kind: Victim) -> str | None:
        event_kind, name = _NAMED_IN_JOURNAL[kind]
        events = [event for event in self._place.store.read_events() if event["kind"] == event_kind]
        return str(events[-1][name]) if events else None

    def _host_named_in_journal(self, kind: Victim) -> str:
        address = self._named_in_journal(kind)
        assert self._net is not None
        assert address is not None
        return self._net.host_of(address)

    def _stop(self, blow: Blow, process: psutil.Process) -> None:
        if blow.stopped_s is not None:
            self._paused.append(process)
            self._later(blow.stopped_s, partial(send, process, "CONT"))
            return
        self._stopped.append(process)
        if blow.victim in ("client", "scheduler"):
            # Only its user can help here, by ending it and starting over.
            self._later(_PATIENCE_S, partial(end_all, [process]))

    def _hold_up(self) -> None:
        """Stop the oldest engine for a while, once two workers have rows; and then again."""
        self._later(_HELD_UP_S + _RUNS_S, self._hold_up)
        state = self._place.store.read_state()
        if state is None or sum(worker.running_rows > 0 for worker in state.workers) < 2:
            return
        struck = self._stopped + self._paused
        engines = [engine for engine in of_kind(marked(self._mark), "engine") if engine not in struck]
        if len(engines) > 1 and send(engines[0], "STOP"):
            self._held_up = engines[0]
            self._later(_HELD_UP_S, self._let_go)

    def _let_go(self) -> None:
        # One that was dealt a blow meanwhile goes on when its blow says so.
        if self._held_up is not None and self._held_up not in self._stopped + self._paused:
            send(self._held_up, "CONT")
        self._held_up = None

    def _judge_exit(self, client: subprocess.Popen[bytes]) -> None:
        if client.returncode != 0 and not self._may_fail:
            last = (self._folder / "client.log").read_text(errors="replace").strip().splitlines()[-1:]
            self._outcome.faults.append(f"the client gave up with exit code {client.returncode}: {' '.join(last)}")

    def _check_leftovers(self, kind: Any, when: str) -> None:
        give_up_s = time.monotonic() + _GONE_AFTER_S
        while kind is not None and of_kind(marked(self._mark), kind) and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
        left = of_kind(marked(self._mark), kind) if kind else wait_until_gone(self._mark, _GONE_AFTER_S)
        if left:
            names = [" ".join(process.cmdline())[:120] for process in left]
            self._outcome.faults.append(f"{len(left)} processes left after {when}: {names}")


class TrialError(Exception):
    """The trial cannot go on; the message is the fault."""
