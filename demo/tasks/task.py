"""What a demo task is: a seeded source of prompts with known answers, and how to tell a good completion."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt (the user's message) and the answer the adapter is taught to give."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """A skill one adapter learns.

    `instruction` is the system message. `make(rng, split)` draws one example; words, names and sentence patterns of
    the two splits are disjoint. `measures` names yes/no questions about (completion, example); the first is the
    headline figure.
    """

    name: str
    instruction: str
    max_tokens: int
    make: Callable[[random.Random, Split], Example]
    measures: Mapping[str, Callable[[str, Example], bool]]

    def examples(self, split: Split, count: int, seed: int) -> list[Example]:
        """`count` examples with distinct prompts, the same for the same arguments."""
        rng = random.Random(f"{self.name}/{split}/{seed}")
        found: dict[str, Example] = {}
        while len(found) < count:
            example = self.make(rng, split)
            found.setdefault(example.prompt, example)
        return list(found.values())

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """The chat that asks for this prompt's answer."""
        return [{"role": "system", "content": self.instruction}, {"role": "user", "content": prompt}]


@dataclass(frozen=True, slots=True)
class Words:
    """The vocabulary of one slot: what training draws from, and what only held-out prompts use."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def draw(self, rng: random.Random, split: Split) -> str:
        return rng.choice(self.train if split == "train" else self.held_out)


def words(train: str, held_out: str) -> Words:
    """`Words` from two lines of items separated by `;`."""
    split = [tuple(item.strip() for item in line.split(";")) for line in (train, held_out)]
    return Words(*split)
