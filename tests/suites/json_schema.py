"""Runs JSON-Schema-Test-Suite, drafts 2020-12 and 7: what a schema allows may be said, what it forbids may not.

The folder is a checkout of the public repository json-schema-org/JSON-Schema-Test-Suite. Each schema is compiled as a
row's setting is (`grammar_problem`: the confined process); each instance goes through the masks of a real tokenizer, in
several orders of keys, with and without escapes. Formats are assertions for lorabatch; where the suite has them as
annotations, what is none cannot be said.

    python tests/suites/json_schema.py FOLDER [MODEL]

MODEL is a model folder; without it, the demo's. Exits with 1 if an invalid instance may be said.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from masked_rows import MaskedRows, writings

from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.request import SamplingParams
from lorabatch.engine.text.answers.grammar import grammar_problem
from lorabatch.engine.text.answers.json_schema import KEYWORDS

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def groups(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draft and file of each group, and the group."""
    for draft in ("draft2020-12", "draft7"):
        for path in sorted((folder / "tests" / draft).rglob("*.json")):
            for group in json.loads(path.read_text("utf-8")):
                yield f"{draft}/{path.relative_to(folder / 'tests' / draft).with_suffix('')}", group


def as_setting(place: str, schema: Any) -> str:
    """A schema as a row has it. One of draft 7 says so."""
    if place.startswith("draft7") and isinstance(schema, dict) and "$schema" not in schema:
        schema = {"$schema": DRAFT_7, **schema}
    return json.dumps(schema)


def kind_of(problem: str) -> str:
    """A refusal without places and values."""
    if "not JSON of an object" in problem:
        return "true or false, which is no object"
    place = re.split(r"(?:=|: )", problem.removeprefix("json_schema"), maxsplit=1)[0]
    word = place.rpartition(".")[2]
    if word in KEYWORDS or word.lower() in {name.lower() for name in KEYWORDS}:
        return word
    return re.sub(r"'[^']*'|\"[^\"]*\"|/.*/|\{.*|[a-z]+://\S*", "…", problem)[:90]


def why_unsayable(place: str, instance: Any) -> str:
    """Why a valid instance cannot be said, by the documented rules; "" for none."""
    text = json.dumps(instance, ensure_ascii=False)
    if place.split("/")[-1] in ("format", "format-assertion") or place.endswith("content"):
        return "a format, which is an annotation in this part of the suite"
    if re.search(r"\\u00[01]|\x7f", text):
        return "a control character, which is never written"
    if re.search(r"\d:60\b|:60[.Zz+-]", text):
        return "a leap second, which is never written"
    for suite, sign, reason in (
        ("hostname", "xn--", "an encoded label of a host name"),
        ("ipv6", ".", "an IPv6 address that ends as one of IPv4"),
        ("email", '"', "a quoted name of an e-mail address"),
        ("email", "[", "an IP address as the host of an e-mail address"),
    ):
        if place.endswith(suite) and sign in str(instance):
            return f"{reason}, which is never written"
    return ""


def print_counts(title: str, counts: Counter[str]) -> None:
    """A table of counts, the largest first."""
    print(f"\n{title}", *(f"{number:6,}  {name}" for name, number in counts.most_common()), sep="\n")


def main(folder: Path, model: Path) -> int:
    """Run the suite and print counts."""
    rows = MaskedRows(model)
    counts, refused, unsayable = Counter[str](), Counter[str](), Counter[str]()
    wrong: list[str] = []
    left: list[str] = []
    for place, group in groups(folder):
        schema = as_setting(place, group["schema"])
        counts["schemas"] += 1
        problem = grammar_problem(SamplingParams(json_schema=schema).constraint)
        if problem is not None:
            counts["schemas refused"] += 1
            refused[kind_of(problem)] += 1
            if "cannot be compiled" in problem:
                wrong.append(f"{place}: {group['description']}: {problem}")
            continue
        for test in group["tests"]:
            counts["instances"] += 1
            may = any(rows.may_say(schema, text) for text in writings(test["data"]))
            what = f"{place}: {group['description']}: {test['description']}: {json.dumps(test['data'])[:80]}"
            if may and not test["valid"]:
                wrong.append(f"wrongly allowed: {what}")
            elif may == test["valid"]:
                counts["valid and said" if may else "invalid and not said"] += 1
            else:
                counts["valid and cannot be said"] += 1
                reason = why_unsayable(place, test["data"])
                unsayable[reason or f"other: {place}"] += 1
                left += [] if reason else [what]
    print_counts("", counts)
    print_counts("refused schemas", refused)
    print_counts("valid, cannot be said", unsayable)
    print("\nwithout a documented reason" if left else "", *left, sep="\n")
    print(f"\nwrong: {len(wrong)}", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else base_model_folder()))
