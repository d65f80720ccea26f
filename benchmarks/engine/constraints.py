"""Random constraints of completions: JSON Schemas and regular expressions that end soon, and what obeys them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import jsonschema

NUM_SCHEMAS, NUM_EXPRESSIONS = 200, 300
# So that a few rows are of all kinds.
_STRIDE = 37


@dataclass(frozen=True, slots=True)
class Constraints:
    """`options`: one sampling option and its value each, of which row `i` has number `number(i)`."""

    options: tuple[dict[str, str], ...]

    @classmethod
    def random(cls, seed: int = 7) -> Constraints:
        """Schemas and expressions of one seed."""
        rng = random.Random(seed)
        schemas = [{"json_schema": json.dumps(random_schema(rng))} for _ in range(NUM_SCHEMAS)]
        return cls((*schemas, *({"regex": random_regex(rng)} for _ in range(NUM_EXPRESSIONS))))

    def of_row(self, row: int) -> dict[str, str]:
        """The option and value of a row."""
        return self.options[row * _STRIDE % len(self.options)]


def problem_with(text: str, option: dict[str, str]) -> str | None:
    """Why a text is not what an option says, by `jsonschema` or `re`; None for one that is."""
    [(kind, value)] = option.items()
    if kind == "regex":
        return None if re.fullmatch(value, text) else f"{text!r} does not match {value}"
    try:
        # as decimals: 3.999999999999999975 is below 4, and 4.0 as a float
        jsonschema.validate(json.loads(text, parse_float=Decimal), json.loads(value))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r} is no instance of {value}: {error}"
    return None


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema of the keywords that are enforced, small enough for a model that chooses by chance to end."""
    kinds = ["integer", "string", "enum", "boolean", "number"] + ["object", "array", "anyOf"] * (depth < 2)
    match rng.choice(kinds if depth else ["object", "array"]):
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randint(1, 9)}
        case "string" if rng.random() < 0.5:
            return {"type": "string", "pattern": random_regex(rng)}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 9)}
        case "enum":
            return {"enum": rng.sample(["red", "green", 'a "quoted" one', 7, None, True, "é"], rng.randint(1, 4))}
        case "boolean":
            return {"type": ["boolean", "null"]}
        case "array":
            most = rng.randint(1, 3)
            items = random_schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": rng.randint(0, most), "maxItems": most}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case _:
            names = rng.sample(["a", "b_c", "label", "Ünï", "x y"], rng.randint(1, 4))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = rng.sample(names, rng.randint(0, len(names)))
            return {
                "type": "object", "properties": properties, "required": required, "additionalProperties": False,
            }  # fmt: skip


def random_regex(rng: random.Random, depth: int = 0) -> str:
    """A bounded regular expression, of classes that mean the same in every version of Unicode."""
    pieces = []
    for _ in range(rng.randint(1, 3)):
        piece = rng.choice(["[a-f]", "[0-9]", "[A-Za-z_]", "x", "(foo|bar|q)", "[^a-z\\n]", "é", "[A-Z ]"])
        if depth < 2 and rng.random() < 0.2:
            piece = f"({random_regex(rng, depth + 1)}|{random_regex(rng, depth + 1)})"
        pieces.append(piece + rng.choice(["", "", "?", "{1,3}", "{2}", "{0,4}"]))
    return "".join(pieces)
