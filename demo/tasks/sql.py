"""SQL: a table's columns and a question become one SQLite query; judged by running it."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from .task import Example, Split, Task, Words


@dataclass(frozen=True, slots=True)
class _Table:
    """Columns by kind: `texts` with some of their values, `numbers` with whole numbers."""

    name: str
    noun: str
    texts: Mapping[str, tuple[str, ...]]
    numbers: tuple[str, ...]


def _table(name: str, noun: str, numbers: str, /, **texts: str) -> _Table:
    return _Table(name, noun, {key: tuple(v.split()) for key, v in texts.items()}, tuple(numbers.split()))


_TRAIN = (
    _table("employees", "employee", "salary age", name="Anna Hugo Leo", city="Lyon Oslo Rome", team="sales legal"),
    _table("orders", "order", "total items", customer="Bruno Clara Nils", status="open paid late", country="Peru Chad"),
    _table("products", "product", "price stock", name="lamp chair desk", brand="Nova Orbit", color="red blue black"),
    _table("students", "student", "age score", name="Ines Paul Zoe", school="North West", major="art law math"),
    _table("books", "book", "pages year", title="Dune Emma Ulysses", author="Austen Joyce", genre="poetry drama"),
    _table("flights", "flight", "distance price", airline="Swift Aero", origin="Paris Cairo", gate="A1 B4 C7"),
    _table("films", "film", "length rating", title="Alien Heat Jaws", director="Lee Scott", language="French Hindi"),
    _table("houses", "house", "rooms price", street="Elm Oak Main", town="Bath York", kind="cabin villa"),
    _table("players", "player", "goals height", name="Diego Sven Amir", club="Ajax Porto", role="keeper striker"),
    _table("invoices", "invoice", "amount days", supplier="Acme Zenith", state="sent draft", currency="euro yen"),
    _table("cities", "city", "population area", name="Lima Bern Quito", country="Spain Kenya", region="coast delta"),
    _table("cars", "car", "mileage doors", model="Polo Yaris", maker="Fiat Skoda Volvo", fuel="petrol diesel"),
    _table("songs", "song", "plays minutes", title="Echo Halo Rust", artist="Abba Muse", album="Gold Blue"),
    _table("tickets", "ticket", "price seat", event="opera circus", buyer="Tina Omar", zone="front balcony"),
)
_HELD_OUT = (
    _table("patients", "patient", "weight visits", surname="Okafor Lund", ward="east surgery", doctor="Grey House"),
    _table("parcels", "parcel", "kilos cost", sender="Magnus Priya", depot="Ghent Turin", carrier="Comet Pelican"),
    _table("hotels", "hotel", "beds stars", title="Astoria Plaza", resort="Davos Cannes", owner="Hill Rossi"),
    _table("recipes", "recipe", "calories steps", dish="ramen paella", chef="Julia Marco", cuisine="Thai Greek"),
    _table("trains", "train", "speed coaches", line="express night", driver="Olaf Rita", station="Basel Milan"),
    _table("sensors", "sensor", "voltage battery", site="roof cellar", vendor="Bosch Sharp", unit="volt kelvin"),
    _table("courses", "course", "credits fee", subject="physics history", teacher="Curie Tesla", campus="south river"),
)

# Slots: t table, n noun, c/d text columns, v a value of d, x a number column, k a number, top a small number.
# Each kind of question: the query, and ways to ask for it (training, held out).
QUESTIONS: tuple[tuple[str, Words], ...] = (
    (
        "SELECT {c} FROM {t} WHERE {d} = '{v}';",
        Words(
            (
                "Show the {c} of every {n} whose {d} is {v}.",
                "Which {c} have {d} {v}?",
                "{c} where {d} is {v}",
            ),
            ("Give me the {c} of each {n} with {d} equal to {v}.", "I need every {c} that has {v} as {d}."),
        ),
    ),
    (
        "SELECT COUNT(*) FROM {t};",
        Words(("How many {t} are there?", "Count all {t}."), ("What is the number of {t}?", "Count every {n}.")),
    ),
    (
        "SELECT COUNT(*) FROM {t} WHERE {d} = '{v}';",
        Words(
            ("How many {t} have {d} {v}?", "Count the {t} whose {d} is {v}."),
            ("What is the number of {t} with {d} {v}?", "Count every {n} that has {v} as {d}."),
        ),
    ),
    (
        "SELECT AVG({x}) FROM {t};",
        Words(("What is the average {x} of all {t}?", "Average {x}, please."), ("Tell me the mean {x} of the {t}.",)),
    ),
    (
        "SELECT MAX({x}) FROM {t} WHERE {d} = '{v}';",
        Words(
            ("What is the highest {x} of {t} with {d} {v}?", "Largest {x} where {d} is {v}?"),
            ("Tell me the maximum {x} among {t} whose {d} is {v}.",),
        ),
    ),
    (
        "SELECT SUM({x}) FROM {t} WHERE {d} = '{v}';",
        Words(
            ("What is the total {x} of {t} with {d} {v}?", "Add up the {x} where {d} is {v}."),
            ("Tell me the sum of {x} over {t} whose {d} is {v}.",),
        ),
    ),
    (
        "SELECT {c} FROM {t} WHERE {x} > {k};",
        Words(
            ("Show the {c} of every {n} with {x} above {k}.", "Which {c} have a {x} of more than {k}?"),
            ("Give me the {c} of each {n} whose {x} is greater than {k}.",),
        ),
    ),
    (
        "SELECT {c} FROM {t} WHERE {x} < {k};",
        Words(
            ("Show the {c} of every {n} with {x} below {k}.", "Which {c} have a {x} of less than {k}?"),
            ("Give me the {c} of each {n} whose {x} is smaller than {k}.",),
        ),
    ),
    (
        "SELECT {c} FROM {t} ORDER BY {x} DESC LIMIT {top};",
        Words(
            ("Show the {c} of the {top} {t} with the highest {x}.", "Top {top} {t} by {x}: their {c}?"),
            ("Give me the {c} of the {top} {t} with the largest {x}.",),
        ),
    ),
    (
        "SELECT {d}, COUNT(*) FROM {t} GROUP BY {d};",
        Words(("How many {t} are there per {d}?", "Count the {t} for each {d}."), ("Number of {t} by {d}, please.",)),
    ),
)


def _make(rng: random.Random, split: Split) -> Example:
    table = rng.choice(_TRAIN if split == "train" else _HELD_OUT)
    query, asks = rng.choice(QUESTIONS)
    shown, tested = rng.sample(list(table.texts), 2)
    slots = {
        "t": table.name,
        "n": table.noun,
        "c": shown,
        "d": tested,
        "v": rng.choice(table.texts[tested]),
        "x": rng.choice(table.numbers),
        "k": str(rng.choice((5, 10, 25, 40, 60, 90, 100, 250))),
        "top": str(rng.choice((2, 3, 4, 5))),
    }
    question = asks.draw(rng, split).format(**slots)
    columns = ", ".join([*table.texts, *table.numbers])
    return Example(f"{table.name}({columns})\n{question[0].upper()}{question[1:]}", query.format(**slots))


def _is_exact(completion: str, example: Example) -> bool:
    return completion.strip() == example.answer


def _gives_right_rows(completion: str, example: Example) -> bool:
    rows = _run(completion, example)
    return rows is not None and rows == _run(example.answer, example)


def _run(query: str, example: Example) -> list[tuple[object, ...]] | None:
    """Rows of a query over a filled table; None when it does not run. Order counts only when the answer sorts."""
    name = example.prompt.split("(", 1)[0]
    table = next(t for t in (*_TRAIN, *_HELD_OUT) if t.name == name)
    connection = sqlite3.connect(":memory:")
    try:
        columns = [*(f"{c} TEXT" for c in table.texts), *(f"{c} INTEGER" for c in table.numbers)]
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(columns)})")
        marks = ", ".join("?" * len(columns))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", _rows(table))
        rows = connection.execute(query).fetchall()
    except (sqlite3.Error, sqlite3.Warning):
        return None
    finally:
        connection.close()
    return rows if "ORDER BY" in example.answer else sorted(rows, key=repr)


def _rows(table: _Table) -> list[tuple[object, ...]]:
    """Forty rows, the same every time; numbers are distinct so that sorting has one answer."""
    rng = random.Random(table.name)
    columns = [rng.sample(range(1, 300), 40) for _ in table.numbers]
    return [
        (*(rng.choice(values) for values in table.texts.values()), *(column[row] for column in columns))
        for row in range(40)
    ]


SQL = Task(
    name="sql",
    instruction="Write one SQLite query that answers the question about the table.",
    max_tokens=48,
    make=_make,
    measures={"runs and gives the right rows": _gives_right_rows, "exact query": _is_exact},
)
