"""The long form of the fuzzer: `python tests/fuzz/fuzz.py --minutes 60`, one process at a time.

Each target has its share of the time, in a process of its own, which a case may kill. Findings are kept in `--save`,
one folder each, with the files of the case and the traceback. Prints the cases, the findings, the slowest case and the
peak memory of each target, and exits with 1 for any finding.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz_case import Case, Cost, TooLongError, run_case
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from lorabatch.engine.peft import patterns
from lorabatch.engine.text.chat import sandbox

HERE = Path(__file__).resolve()
_STATUS, _CURRENT = "status.json", "current"
_KEPT = 3
# A reader that waits or computes outside of Python's reach.
_STUCK_S = 300.0
_ADDRESS_BYTES = 8 << 30


def main() -> int:
    """Run the targets one after the other, or one of them for some time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--target", action="append", help="name of a target; repeatable; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        _fuzz(asked.child, asked.minutes * 60, asked.seed, asked.save)
        return 0
    names = asked.target or list(TARGETS)
    results = [_supervised(name, asked.minutes * 60 / len(names), asked.seed, asked.save) for name in names]
    print(json.dumps(results, indent=1))
    return int(any(result["findings"] for result in results))


def _supervised(name: str, seconds: float, seed: int, save: Path) -> dict[str, Any]:
    """Results of one target; a process that dies or is stuck is a finding, and the next one goes on."""
    save.mkdir(parents=True, exist_ok=True)
    total: dict[str, Any] = {"target": name, "cases": 0, "seconds": 0.0, "slowest_s": 0.0, "peak_mb": 0, "findings": {}}
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 1:
        status = save / _STATUS
        status.unlink(missing_ok=True)
        command = [sys.executable, str(HERE), "--child", name, "--minutes", str(left_s / 60), "--seed", str(seed)]
        process = subprocess.Popen([*command, "--save", str(save)])
        seed += 1_000_000
        seen, seen_s = b"", time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            latest = status.read_bytes() if status.exists() else b""
            if latest != seen:
                seen, seen_s = latest, time.monotonic()
            elif time.monotonic() - seen_s > _STUCK_S:
                process.send_signal(signal.SIGKILL)
                process.wait()
                total["findings"]["stuck"] = total["findings"].get("stuck", 0) + 1
                _keep_current(save, name, "stuck")
        found = json.loads(status.read_bytes() or b"{}") if status.exists() else {}
        if process.returncode not in (0, -signal.SIGKILL):
            key = f"process ended with {process.returncode}"
            total["findings"][key] = total["findings"].get(key, 0) + 1
            _keep_current(save, name, f"exit{process.returncode}")
        total["cases"] += found.get("cases", 0)
        total["seconds"] += found.get("seconds", 0.0)
        for key in ("slowest_s", "peak_mb"):
            total[key] = max(total[key], found.get(key, 0))
        for key, count in found.get("findings", {}).items():
            total["findings"][key] = total["findings"].get(key, 0) + count
    print(json.dumps(total), file=sys.stderr, flush=True)
    return total


def _keep_current(save: Path, name: str, why: str) -> None:
    current = save / _CURRENT
    if current.exists():
        current.rename(save / f"{name.replace(' ', '-')}-{why}-{time.time_ns()}")


@dataclass
class _Tally:
    """What a process has run so far, for its supervisor to read at any time."""

    save: Path
    name: str
    began_s: float
    cases: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    _written_s: float = 0.0

    def add(self, cost: Cost) -> None:
        """A case that went well."""
        self.slowest_s, self.peak_bytes = max(self.slowest_s, cost.cpu_s), max(self.peak_bytes, cost.peak_bytes)

    def add_finding(self, case: Case, error: BaseException) -> None:
        """A case that did not; the first ones of a kind are kept."""
        key = _key(error)
        self.findings[key] += 1
        if self.findings[key] <= _KEPT:
            _keep(self.save, self.name, key, case, error, self.findings[key])

    def write(self, every_s: float = 0.0) -> None:
        """Write it down, unless that was done less than `every_s` ago."""
        now_s = time.monotonic()
        if now_s - self._written_s < every_s:
            return
        self._written_s = now_s
        seen = {"cases": self.cases, "seconds": round(now_s - self.began_s, 1), "findings": self.findings}
        seen |= {"slowest_s": round(self.slowest_s, 2), "peak_mb": self.peak_bytes >> 20}
        temporary = self.save / "status.tmp"
        temporary.write_text(json.dumps(seen))
        temporary.replace(self.save / _STATUS)


def _fuzz(name: str, seconds: float, seed: int, save: Path) -> None:
    """Run cases of one target until the time is over."""
    patterns.CPU_S = sandbox.CPU_S = 1
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, most))
    target, tally = TARGETS[name], _Tally(save, name, time.monotonic())
    end_s = tally.began_s + seconds

    def one(case: Case) -> None:
        if time.monotonic() > end_s:
            return
        tally.cases += 1
        try:
            # Where a case that kills the process is found again.
            tally.add(run_case(target, case, save / _CURRENT))
        except BaseException as error:
            # Panics of extension modules are no `Exception`.
            if isinstance(error, KeyboardInterrupt | SystemExit) and not isinstance(error, TooLongError):
                raise
            tally.add_finding(case, error)
        tally.write(every_s=0.5)

    while time.monotonic() < end_s:
        seed += 1
        rules = settings(
            max_examples=100,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seeded(seed)(rules(given(target.cases())(one)))()
    tally.write()


def _key(error: BaseException) -> str:
    """What tells findings apart: the exception, and the last line of ours that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/lorabatch/" in f.filename and "/tests/" not in f.filename] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].name}"
    detail = str(error)[:24] if type(error).__name__ == "PropertyError" else ""
    return f"{type(error).__name__} in {place} {detail}".strip()


def _keep(save: Path, name: str, key: str, case: dict[str, bytes], error: BaseException, count: int) -> None:
    letters = "".join(sign if sign.isalnum() else "-" for sign in f"{name}-{key}")[:120]
    folder = save / f"{letters}-{count}"
    for file, data in case.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    text = "".join(traceback.format_exception(error))
    (folder / "TRACEBACK").write_text(text[-20_000:], "utf-8", "backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
