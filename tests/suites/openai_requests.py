"""Imports OpenAI's example requests as lines of a batch file: each key becomes a column, asks nothing, or is named.

The folder has `openapi.json` of the public repository openai/openai-openapi. Requests are its examples of
/chat/completions, /completions and /responses (bodies of `curl`), each of them whole and with one parameter of the
endpoint more, which the description gives a value for; and the calls of these endpoints in a checkout of
openai/openai-python (its README, examples and tests), whole and parameter by parameter.

    python tests/suites/openai_requests.py FOLDER [CHECKOUT]

Exits with 1 if a key of a request is in no list and does not refuse its line, or if a line crashes the import.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lorabatch.jobs.openai_batch.importing import import_batch
from lorabatch.jobs.openai_batch.parameters import COMPLETIONS, ENDPOINTS, IGNORED, PLAIN, RENAMED

_PATHS = {"/chat/completions": "CreateChatCompletionRequest", "/completions": "CreateCompletionRequest"}
_BODY = re.compile(r"-d '(\{.*\})'", re.DOTALL)


def examples(description: Mapping[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Title and body of each example of a path."""
    given = description["paths"][path]["post"]["x-oaiMeta"]["examples"]
    for example in given if isinstance(given, list) else [given]:
        found = _BODY.search(example["request"].get("curl", ""))
        if found is not None:
            yield f"{path}: {example.get('title', '')}", json.loads(found[1].replace("'\"'\"'", "'"))


def parameters(description: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parameters of a request by their names, with those of the schemas that it is made of."""
    schema = description["components"]["schemas"][name]
    found = dict(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        found |= parameters(description, part["$ref"].rpartition("/")[2]) if "$ref" in part else part["properties"]
    return found


def value_of(description: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    """A value that a schema allows: its example, the last of an enumeration, or one of its type."""
    while "$ref" in schema:
        schema = description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for word in ("example", "default"):
        if schema.get(word) is not None:
            return schema[word]
    if "enum" in schema:
        return schema["enum"][-1]
    for word in ("anyOf", "oneOf", "allOf"):
        parts = [part for part in schema.get(word, []) if part.get("type") != "null"]
        if parts:
            return value_of(description, parts[0])
    if schema.get("type") == "object":
        named = schema.get("properties", {})
        return {key: value_of(description, named.get(key, {})) for key in schema.get("required", [])}
    if schema.get("type") == "array":
        return [value_of(description, schema.get("items", {}))]
    return {"string": "text", "integer": 3, "number": 0.5, "boolean": True}.get(str(schema.get("type")), "text")


def requests(description: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Title, address and body of every request."""
    for path in ("/chat/completions", "/completions", "/responses"):
        bodies = list(examples(description, path))
        yield from ((title, f"/v1{path}", body) for title, body in bodies)
        for name, schema in parameters(description, _PATHS[path]).items() if path in _PATHS else ():
            if name not in bodies[0][1]:
                body = bodies[0][1] | {name: value_of(description, schema)}
                yield f"{path} with {name}={json.dumps(body[name])[:60]}", f"/v1{path}", body


_ADDRESSES = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}


def calls(checkout: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, address and body of each call of an endpoint in a checkout, whole and parameter by parameter."""
    texts = [(path, path.read_text("utf-8")) for path in sorted(checkout.rglob("*.py"))]
    for path in sorted(checkout.rglob("*.md")):
        texts += [(path, found) for found in re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)]
    for path, text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "create":
                name = ast.unparse(node.func.value).replace(".with_raw_response", "")
                name = name.replace(".with_streaming_response", "").partition("client.")[2]
                if name in _ADDRESSES:
                    body = {word.arg: _literal(word.value) for word in node.keywords if word.arg}
                    extra = {word: body.pop(word) for word in ("extra_body",) if isinstance(body.get(word), dict)}
                    body = {**body, **extra.get("extra_body", {})}
                    place, url = f"{path.relative_to(checkout)}:{node.lineno}", _ADDRESSES[name]
                    yield place, url, body
                    asked = {key: body[key] for key in ("model", "messages", "prompt", "input") if key in body}
                    yield from ((f"{place}, {key}", url, asked | {key: body[key]}) for key in body.keys() - asked)


def _literal(node: ast.expr) -> Any:
    """The value of an expression; a text where it is no literal."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return [{"role": "user", "content": "text"}] if "message" in ast.unparse(node) else "text"


def fate(url: str, body: Mapping[str, Any], key: str, row: Mapping[str, Any]) -> str:
    """What became of a key in the row of a line that was accepted; "" for nothing."""
    endpoint, value = ENDPOINTS[url], body[key]
    column = RENAMED.get(key, key)
    if key in ("model", endpoint.prompt):
        return "prompt and model"
    if endpoint is COMPLETIONS and key == "logprobs" and value:
        column = "top_logprobs"
    if column in row and row[column] is not None:
        return "a column"
    if key in IGNORED:
        return "known not to matter"
    if value is None or value in PLAIN.get(key, ()) or (key, value) == ("logprobs", False):
        return "asks for what every answer has"
    return ""


def imported(title: str, url: str, body: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row of one request, beside one that is plain."""
    plain = {"custom_id": "plain", "method": "POST", "url": "/v1/chat/completions"}
    plain["body"] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}  # type: ignore[assignment]
    if url == "/v1/completions":
        plain |= {"url": url, "body": {"model": "m", "prompt": "a"}}  # type: ignore[dict-item]
    lines = [{"custom_id": title, "method": "POST", "url": url, "body": body}, plain]
    (folder / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    import_batch([f"{folder}/batch.jsonl"], f"{folder}/out.parquet", [body.get("model", "")], {})
    row, _ = pq.read_table(folder / "out.parquet").to_pylist()
    return row


def main(folder: Path, checkout: Path | None = None) -> int:
    """Import every request and print counts."""
    description = json.loads((folder / "openapi.json").read_text("utf-8"))
    counts, keys, refused = Counter[str](), Counter[str](), Counter[str]()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for title, url, body in [*requests(description), *(calls(checkout) if checkout else ())]:
            counts[f"requests of {url}"] += 1
            try:
                row = imported(title, url, body, Path(scratch))
            except Exception as error:
                wrong.append(f"{title}: {type(error).__name__}: {error}")
                continue
            if problem := row.get("openai_error"):
                counts["refused"] += 1
                refused[re.sub(r"^batch\.jsonl:1: ", "", problem)[:110]] += 1
                continue
            counts["accepted"] += 1
            for key in body:
                found = fate(url, body, key, row)
                keys[found] += 1
                if not found:
                    wrong.append(f"{title}: {key}={json.dumps(body[key])[:80]} is dropped")
    for name, found in (("", counts), ("keys of accepted requests", keys), ("refused, and why", refused)):
        print(f"\n{name}", *(f"{number:6,}  {what}" for what, number in found.most_common()), sep="\n")
    print(f"\nwrong: {len(wrong)}", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
