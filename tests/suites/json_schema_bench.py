"""Compiles 300 real schemas, answers them with random logits, and validates what is answered.

The folder is the `data` folder of the public repository guidance-ai/jsonschemabench. The sample is fixed by a seed, in
equal parts over its data sets. Each schema is compiled as a row's setting is; where it is accepted, a model of random
logits answers it under its masks, `jsonschema` validates the answers (formats too), and the type of the column `answer`
must hold each of them with all keys that the schema names.

    python tests/suites/json_schema_bench.py FOLDER [NUMBER] [MODEL]

Exits with 1 if an answer is no instance, a column loses a key, or a schema crashes, hangs or grows without bounds.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
from json_schema import kind_of, print_counts
from masked_rows import MaskedRows

from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.request import SamplingParams
from lorabatch.engine.text.answers.grammar import grammar_problem
from lorabatch.jobs.input.answer_type import answer_type
from lorabatch.system.confinement import confined

_ANSWERS, _MOST_TOKENS = 4, 600
# Of CPU, for the client and a worker; the confined process has limits of its own.
_MOST_S, _MOST_MIB = 10.0, 512


def sample(folder: Path, number: int) -> list[Path]:
    """The same schemas each time, in equal parts over the data sets."""
    sets = [sorted(part.glob("*.json")) for part in sorted(folder.iterdir()) if part.is_dir()]
    random = Random(2026)
    for part in sets:
        random.shuffle(part)
    share = -(-number // len(sets))
    chosen = [path for part in sets for path in part[:share]]
    rest = [path for part in sets for path in part[share:]]
    random.shuffle(rest)
    return (chosen + rest)[:number]


def named_keys(schema: Any) -> Iterator[str]:
    """Keys that a schema names, anywhere in it."""
    if isinstance(schema, dict):
        for word in ("properties", "required"):
            found = schema.get(word)
            yield from found if isinstance(found, dict | list) else ()
        for part in schema.values():
            yield from named_keys(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from named_keys(part)


def lost(given: Any, kept: Any, place: str = "answer") -> Iterator[tuple[str, str | None]]:
    """Places of an instance with a key that a typed value does not have; without one, where it has another value."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key not in kept:
                yield place, key
            else:
                yield from lost(value, kept[key], f"{place}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{place}[{number}]")
    elif isinstance(kept, str) and not isinstance(given, str):
        if json.loads(kept) != given:
            yield place, None
    elif given != kept and not (isinstance(given, str) and isinstance(kept, str) and json.loads(kept) == given):
        yield place, None


def is_beyond_64_bits(value: Any) -> bool:
    """Whether an instance has a number that Arrow's integers and floats of 64 bits do not hold."""
    if isinstance(value, dict | list):
        return any(map(is_beyond_64_bits, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float) and abs(value) >= 2**63


def validator_of(schema: Any) -> Any:
    """jsonschema's validator of the schema's draft, with formats."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


class Trial:
    """Counts and faults of one run."""

    def __init__(self, model: Path) -> None:
        self.rows = MaskedRows(model)
        self.counts, self.refused = Counter[str](), Counter[str]()
        self.wrong: list[str] = []
        self.slowest = 0.0, ""

    def run(self, path: Path, random: Random) -> None:
        """Try one schema."""
        text, name = path.read_text("utf-8"), f"{path.parent.name}/{path.name}"
        self._try(name, text, random, "as they are")
        # The benchmark has taken these keywords out by an underscore in front.
        written = text.replace('"_format"', '"format"').replace('"_uniqueItems"', '"uniqueItems"')
        if written != text:
            self._try(f"{name}, as its author wrote it", written, random, "as their authors wrote them")

    def _try(self, name: str, text: str, random: Random, kind_of_text: str) -> None:
        self.counts["schemas"] += 1
        self.counts[f"schemas {kind_of_text}"] += 1
        began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        clock = time.monotonic()
        problem = grammar_problem(SamplingParams(json_schema=text).constraint)
        self.slowest = max(self.slowest, (time.monotonic() - clock, name))
        kind = answer_type(text)
        self._check_bounds(name, began, memory)
        if problem is not None:
            self.counts["refused"] += 1
            self.refused[kind_of(problem)] += 1
            self.counts[f"refused {kind_of_text}"] += 1
            if "cannot be compiled" in problem:
                what = "crash" if "exit code" in problem else "beyond a limit of the confined process"
                self.counts[f"refused: {what}"] += 1
                print(f"{name}: {problem}")
            return
        self.counts["accepted"] += 1
        schema = json.loads(text)
        validator, named = validator_of(schema), set(named_keys(schema))
        self.counts["accepted: answer is text" if str(kind.arrow) == "string" else "accepted: answer is typed"] += 1
        for _ in range(_ANSWERS):
            answer = self.rows.walk(text, random, _MOST_TOKENS)
            if not answer:
                self.counts["answers without an end" if answer is None else "answers that nothing could follow"] += 1
                continue
            self.counts["answers"] += 1
            self._check(name, answer, validator, kind, named)
        self._check_bounds(name, began, memory)

    def _check(self, name: str, answer: str, validator: Any, kind: Any, named: set[str]) -> None:
        instance = json.loads(answer)
        problem = next(iter(validator.iter_errors(instance)), None)
        if problem is not None:
            self.wrong.append(f"{name}: no instance: {problem.message[:200]}: {answer[:200]}")
        [kept] = kind.column([answer]).to_pylist()
        if kept is None and instance is not None:
            if is_beyond_64_bits(instance):
                self.counts["answers with numbers beyond 64 bits, null as documented"] += 1
            else:
                self.wrong.append(f"{name}: the column {kind.arrow} has null for {answer[:200]}")
            return
        for place, key in lost(instance, kept):
            if key is not None and key not in named:
                self.counts["keys that the schema does not name, left out as documented"] += 1
            else:
                self.wrong.append(f"{name}: the column loses {place} {key!r}: {answer[:200]}")

    def _check_bounds(self, name: str, began: float, memory: int) -> None:
        took, grown = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        if took > _MOST_S or grown > _MOST_MIB << 10:
            self.wrong.append(f"{name}: {took:.1f} s and {grown >> 10} MiB outside of the confined process")


def main(folder: Path, number: int, model: Path) -> int:
    """Run the sample and print counts."""
    trial, random = Trial(model), Random(0)
    for path in sample(folder, number):
        trial.run(path, random)
    confined().close()
    print_counts("", trial.counts)
    print_counts("refused schemas", trial.refused)
    print(f"\nslowest compilation: {trial.slowest[0]:.1f} s on the clock, {trial.slowest[1]}")
    print(f"\nwrong: {len(trial.wrong)}", *trial.wrong, sep="\n")
    return 1 if trial.wrong else 0


if __name__ == "__main__":
    sys.exit(
        main(
            Path(sys.argv[1]),
            int(sys.argv[2]) if len(sys.argv) > 2 else 300,
            Path(sys.argv[3]) if len(sys.argv) > 3 else base_model_folder(),
        )
    )
