"""The long form of the fuzzer: `python tests/fuzz/fuzz.py --minutes 60`, one process at a time.

Each target has its share of the time, in a process of its own, which a case may kill. Findings are kept in `--save`,
one folder each, with the files of the case and the traceback. Prints the cases, the findings, the slowest case and the
peak memory of each target, and exits with 1 for any finding.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
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
    given = parser.parse_args()
    if given.child:
        _fuzz(given.child, given.minutes * 60, given.seed, given.save)
        return 0
    from fuzz_targets import TARGETS

    names = given.target or list(TARGETS)
    results = [_supervised(name, given.minutes * 60 / len(names), given.seed, given.save) for name in names]
    print(json.dumps(results, indent=1))
    return int(any(result["findings"] for result in results))


def _supervised(name: str, seconds: float, seed: int, save: Path) -> dict[str, Any]:
    """Results of one target; a process that dies or is stuck is a finding, and the next one goes on."""
    save.mkdir(parents=True, exist_ok=True)
    total: dict[str, Any] = {"target": name, "cases": 0, "seconds": 0.0, "slowest_s": 0.0, "peak_mb": 0, "findings": {}}
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 1:
        status = save / "status.json"
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
    current = save / "current"
    if current.exists():
        current.rename(save / f"{name.replace(' ', '-')}-{why}-{time.time_ns()}")


def _fuzz(name: str, seconds: float, seed: int, save: Path) -> None:
    """Run cases of one target until the time is over."""
    from fuzz_case import Case, Cost, TooLongError, run_case
    from fuzz_targets import TARGETS
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from lorabatch.engine.peft import patterns
    from lorabatch.engine.text import chat_template

    patterns.CPU_S = chat_template.CPU_S = 1
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, most))
    target, began_s = TARGETS[name], time.monotonic()
    findings: Counter[str] = Counter()
    slowest, peak, num_cases, written_s = 0.0, 0, 0, 0.0

    with tempfile.TemporaryDirectory(prefix="lorabatch-fuzz-") as scratch:
        # Where a case that kills the process is found again.
        folder = save / "current"

        def report() -> None:
            seconds = round(time.monotonic() - began_s, 1)
            text = json.dumps(
                {"cases": num_cases, "seconds": seconds, "slowest_s": round(slowest, 2), "peak_mb": peak >> 20,
                 "findings": findings}
            )  # fmt: skip
            temporary = Path(scratch) / "status"
            temporary.write_text(text)
            os.replace(temporary, save / "status.json") if temporary.stat().st_dev == save.stat().st_dev else (
                save / "status.json"
            ).write_text(text)

        def one(case: Case) -> None:
            nonlocal slowest, peak, num_cases, written_s
            if time.monotonic() - began_s > seconds:
                return
            num_cases += 1
            try:
                cost = run_case(target, case, folder)
            except (Exception, TooLongError) as error:
                key = _key(error)
                findings[key] += 1
                if findings[key] <= 3:
                    _keep(save, name, key, case, error, findings[key])
                cost = Cost(0.0, 0)
            except BaseException as error:
                # Panics of extension modules are no `Exception`.
                if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                    raise
                key = _key(error)
                findings[key] += 1
                _keep(save, name, key, case, error, findings[key])
                cost = Cost(0.0, 0)
            slowest, peak = max(slowest, cost.cpu_s), max(peak, cost.peak_bytes)
            if time.monotonic() - written_s > 0.5:
                written_s = time.monotonic()
                report()

        while time.monotonic() - began_s < seconds:
            seed += 1
            rules = settings(
                max_examples=100, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            seeded(seed)(rules(given(target.cases())(one)))()
        report()


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
