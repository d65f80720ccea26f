"""Copies a file of each type that Spark writes as a job does, and compares what Spark and DuckDB read before and after.

The argument is the Python of an environment of its own with `pyspark` 4 from the package index, which needs a Java
runtime (`JAVA_HOME`):

    python3 -m venv spark && spark/bin/pip install pyspark
    .venv/bin/python tests/suites/spark.py spark/bin/python

Spark writes one folder for each case of `CASES`, in a session whose time zone is not UTC. The product copies it, by the
steps of a job without an engine (`parquet.py`). Spark and DuckDB read both. The exit code is 1 where a type or a value
differs, but for INT96 timestamps, whose type in the output is documented: there the instants are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ZONE = "America/New_York"
_KIND = "spark.sql.parquet.outputTimestampType"
_DATES, _INT96 = "spark.sql.parquet.datetimeRebaseModeInWrite", "spark.sql.parquet.int96RebaseModeInWrite"
_LEGACY = {_DATES: "LEGACY", _INT96: "LEGACY"}
_CORRECTED = {_DATES: "CORRECTED", _INT96: "CORRECTED"}
#: Read with this, Spark takes INT64 timestamps without time zone for instants.
_AS_INSTANTS = ("spark.sql.parquet.inferTimestampNTZ.enabled", "false")


@dataclass(frozen=True)
class Case:
    """One column `c`: SQL of its values in two rows, a third is null. `conf`: settings of the session that writes."""

    first: str
    second: str = "NULL"
    conf: dict[str, str] = field(default_factory=dict)
    is_int96: bool = False


def _cases() -> dict[str, Case]:
    found = {
        "boolean": Case("true", "false"),
        "tinyint": Case("CAST(-128 AS TINYINT)", "CAST(127 AS TINYINT)"),
        "smallint": Case("CAST(-32768 AS SMALLINT)", "CAST(32767 AS SMALLINT)"),
        "int": Case("-2147483648", "2147483647"),
        "bigint": Case("-9223372036854775808", "9223372036854775807"),
        "float": Case("CAST('NaN' AS FLOAT)", "CAST('-0.0' AS FLOAT)"),
        "double": Case("CAST('Infinity' AS DOUBLE)", "1e-300"),
        "decimal of 32 bits": Case("CAST('-999.99' AS DECIMAL(5, 2))", "CAST('0.01' AS DECIMAL(5, 2))"),
        "decimal of 64 bits": Case("CAST('-99999999999999.9999' AS DECIMAL(18, 4))"),
        "decimal of 128 bits": Case("CAST('-9999999999999999999999999999.1234567891' AS DECIMAL(38, 10))"),
        "string": Case("'é 中文 🦙'", "''"),
        "binary": Case("X'00FF80'", "X''"),
        "date": Case("DATE '2026-02-28'", "DATE '1970-01-01'"),
        "interval day to second": Case("INTERVAL '1 02:03:04.5' DAY TO SECOND", "INTERVAL '-1' DAY"),
        "interval year to month": Case("INTERVAL '1-2' YEAR TO MONTH"),
        "calendar interval": Case("make_interval(1, 2, 3, 4)"),
        "timestamp without zone": Case("TIMESTAMP_NTZ '2026-01-02 03:04:05.678901'", "TIMESTAMP_NTZ '0001-01-01'"),
        "array": Case("array(1, NULL, 3)", "array()"),
        "array of arrays": Case("array(array('a'), NULL, array())"),
        "map": Case("map('a', 1, 'b', NULL)", "map()"),
        "map of maps": Case("map(1, map('a', DATE '2026-01-01'))"),
        "struct": Case("named_struct('x', 1, 'y', named_struct('z', 'a'))", "named_struct('x', NULL, 'y', NULL)"),
        "array of structs": Case("array(named_struct('k', X'00', 'v', CAST('1.50' AS DECIMAL(9, 2))))"),
        "variant": Case("parse_json('{\"a\": [1, \"x\", null]}')", "parse_json('3')"),
        "variant in a struct": Case("named_struct('v', parse_json('1'))"),
        "array of variants": Case("array(parse_json('1'))"),
        "interval in an array": Case("array(INTERVAL '1' DAY)"),
        "interval in a map": Case("map('a', INTERVAL '1' MONTH)"),
        "string with a collation": Case("'a' COLLATE UTF8_LCASE"),
        "time": Case("TIME '12:13:14.123456'"),
        "null": Case("NULL"),
        "vector": Case("VECTOR"),
    }  # fmt: skip
    old = {"spark.sql.parquet.writeLegacyFormat": "true"}
    for name in ("decimal of 32 bits", "decimal of 128 bits", "array", "array of structs", "map", "array of arrays"):
        found[f"{name}, legacy format"] = Case(found[name].first, found[name].second, old)
    for codec in ("none", "gzip", "lz4", "zstd", "lz4_raw"):
        found[f"string, {codec}"] = Case("'a'", "'b'", {"spark.sql.parquet.compression.codec": codec})
    times = {
        "today": ("TIMESTAMP '2026-01-02 03:04:05.678901'", "TIMESTAMP '1969-12-31 23:59:59.999'"),
        "far": ("TIMESTAMP '9999-12-31 20:00:00'", "TIMESTAMP '1901-01-01 00:00:00'"),
        "old": ("TIMESTAMP '0001-01-03 00:00:00'", "TIMESTAMP '1582-10-04 12:00:00'"),
        "before zones": ("TIMESTAMP '1600-01-01 00:00:00'", "TIMESTAMP '1880-01-01 00:00:00'"),
    }
    for kind in ("INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"):
        for calendar, modes in (("corrected", _CORRECTED), ("legacy", _LEGACY)):
            for when, values in times.items():
                conf = {_KIND: kind, **modes}
                found[f"timestamp {when}, {kind}, {calendar}"] = Case(*values, conf, kind == "INT96")
        first = times["today"][0]
        nested = {
            "array": f"array({first})",
            "map": f"map({first}, {first})",
            "struct": f"named_struct('t', {first}, 'n', 1)",
        }
        for shape, value in nested.items():
            found[f"timestamp in {shape}, {kind}"] = Case(value, conf={_KIND: kind}, is_int96=kind == "INT96")
    for calendar, modes in (("corrected", _CORRECTED), ("legacy", _LEGACY)):
        found[f"date old, {calendar}"] = Case("DATE '0001-01-01'", "DATE '1582-10-04'", modes)
        found[f"date today, {calendar}"] = Case("DATE '2026-01-01'", "DATE '1582-10-15'", modes)
        found[f"old date in an array, {calendar}"] = Case("array(DATE '1500-01-01', NULL)", conf=modes)
        found[f"old date in a map, {calendar}"] = Case("map(DATE '1500-01-01', 1)", conf=modes)
        found[f"old timestamp in a struct, {calendar}"] = Case(
            "named_struct('t', TIMESTAMP '1500-01-01 00:00:00')", conf={_KIND: "TIMESTAMP_MICROS", **modes}
        )
    return found


CASES = _cases()


def _session() -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.session.timeZone", ZONE).config("spark.driver.memory", "1g").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def write(folder: Path) -> None:
    """Spark's part: a folder for each case that this Spark can write. Prints those that it cannot, as JSON."""
    session = _session()
    not_written = {}
    for number, (name, case) in enumerate(CASES.items()):
        for key, value in case.conf.items():
            session.conf.set(key, value)
        try:
            if case.first == "VECTOR":
                from pyspark.ml.linalg import Vectors

                rows = [("a", "hi", Vectors.dense([1.0, 2.0])), ("b", "hi", Vectors.sparse(3, {1: 1.0}))]
                table = session.createDataFrame(rows, ["id", "prompt", "c"])
            else:
                values = f"CASE id WHEN 'a' THEN {case.first} WHEN 'b' THEN {case.second} END"
                table = session.sql(f"SELECT id, 'hi' AS prompt, {values} AS c FROM VALUES ('a'), ('b'), ('c') t(id)")
            table.coalesce(1).write.parquet(str(folder / str(number)))
        except Exception as error:
            not_written[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        for key in case.conf:
            session.conf.unset(key)
    print(json.dumps({"version": session.version, "not_written": not_written}))


def read(paths: dict[str, str]) -> None:
    """Spark's other part: the type and the values of `c` in each folder, as JSON; also with `_AS_INSTANTS`."""
    session = _session()
    found: dict[str, list[Any]] = {}
    for name, path in paths.items():
        for key in (name, f"{name} as instants"):
            session.conf.set(_AS_INSTANTS[0], "true" if key == name else _AS_INSTANTS[1])
            try:
                column = session.read.parquet(path).select("id", "c").orderBy("id")
                kind = column.schema["c"].dataType
                try:
                    shown = "hex(c)" if kind.simpleString() == "binary" else "CAST(c AS STRING)"
                    rows = column.selectExpr(shown).collect()
                except Exception:
                    rows = column.select("c").collect()
                found[key] = [kind.simpleString(), [str(row[0]) for row in rows]]
            except Exception as error:
                found[key] = ["not read", [f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"]]
    print(json.dumps(found))


def _by_spark(python: str, *arguments: str) -> Any:
    ended = subprocess.run([python, __file__, *arguments], capture_output=True, text=True, timeout=1200)
    if ended.returncode:
        raise SystemExit(ended.stderr[-2000:])
    return json.loads(ended.stdout.splitlines()[-1])


def main(python: str) -> int:
    """Write, copy and read all cases, and print what became of each."""
    from parquet import copy_as_a_job, differences, write_model

    from lorabatch.jobs.errors import JobError

    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        written = _by_spark(python, "--write", f"{folder}/given")
        print(f"Spark {written['version']}")
        model = write_model(folder / "model")
        refusals, parts, paths = {}, {}, {}
        for number, name in enumerate(CASES):
            if name in written["not_written"]:
                continue
            given, output = folder / "given" / str(number), folder / f"out-{number}"
            try:
                parts[name] = copy_as_a_job(given, model, output)
            except JobError as error:
                refusals[name] = str(error).splitlines()[-1]
                continue
            paths |= {f"given {name}": str(given), f"ours {name}": str(output)}
        (folder / "paths.json").write_text(json.dumps(paths))
        by_spark = _by_spark(python, "--read", f"{folder}/paths.json")
        for number, (name, case) in enumerate(CASES.items()):
            if name in written["not_written"]:
                verdict, said = "not written by Spark", written["not_written"][name]
            elif name in refusals:
                verdict, said = "refused", refusals[name]
            else:
                (given,) = (folder / "given" / str(number)).glob("*.parquet")
                found = differences(given, parts[name])
                before, after = by_spark[f"given {name}"], by_spark[f"ours {name}"]
                verdict = "same"
                if case.is_int96 and before != after:
                    after, verdict = by_spark[f"ours {name} as instants"], "same instants (INT96)"
                if before != after:
                    found.append(f"Spark: {before} became {after}")
                verdict, said = ("silently wrong", "; ".join(found)) if found else (verdict, "")
            counts[verdict] += 1
            print(f"{verdict:22} {name:44} {said[:400]}", flush=True)
    print("\noutcome, cases")
    for verdict, count in counts.most_common():
        print(f"{verdict:24} {count:4}")
    return int(counts["silently wrong"] > 0)


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(Path(sys.argv[2]))
    elif sys.argv[1] == "--read":
        read(json.loads(Path(sys.argv[2]).read_text()))
    else:
        raise SystemExit(main(sys.argv[1]))
