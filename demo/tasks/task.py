"""`Task`: a task of the demo, which is a seeded source of prompts with known answers, and measures of completions."""

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
    """A skill that one adapter learns."""

    #: Name of the task, and of its adapter.
    name: str
    #: System message.
    instruction: str
    #: Most tokens of an answer.
    max_tokens: int
    #: Function that draws one example; words, names and sentence patterns of the two splits are disjoint.
    make: Callable[[random.Random, Split], Example]
    #: Name -> yes/no question about a completion and its example; the first is the headline figure.
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
    """The vocabulary of one slot: items for training, and items for held-out prompts only."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def draw(self, rng: random.Random, split: Split) -> str:
        return rng.choice(self.train if split == "train" else self.held_out)


def words(train: str, held_out: str) -> Words:
    """`Words` from two lines of items separated by `;`."""
    split = [tuple(item.strip() for item in line.split(";")) for line in (train, held_out)]
    return Words(*split)
