"""Pirate: a plain sentence comes back as a pirate would say it, by fixed rules, so that answers can be checked."""

from __future__ import annotations

import random
import re

from .task import Example, Split, Task, Words, words

_SAYINGS = {
    "hello": "ahoy",
    "hi": "ahoy",
    "yes": "aye",
    "no": "nay",
    "my": "me",
    "you": "ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "am": "be",
    "the": "th'",
    "of": "o'",
    "and": "an'",
    "for": "fer",
    "never": "ne'er",
    "over": "o'er",
    "friend": "matey",
    "friends": "mateys",
    "boss": "cap'n",
    "money": "doubloons",
    "food": "grub",
    "drink": "grog",
    "girl": "lass",
    "boy": "lad",
    "old": "barnacled",
    "team": "crew",
    "very": "mighty",
}
MARKERS = frozenset(_SAYINGS.values()) - {"me"} | {"arr", "timbers", "says"}

_PEOPLE = words(
    "my friend; the boss; your sister; the teacher; my neighbour; the doctor; our team; the old man; the boy; "
    "my brother; the driver; your mother; the nurse; the farmer; the girl next door",
    "my uncle; the waiter; your cousin; the lawyer; our guests; the old woman; the gardener; my friends; the pilot",
)
_THINGS = words(
    "the keys; a red hat; the letter; some food; the money; a new phone; your book; the broken chair; a hot drink; "
    "the map; my shoes; the yellow box; two tickets; a cup of tea; the window",
    "the umbrella; a leather bag; the parcel; some bread; a silver ring; your coat; the wooden ladder; a cold drink; "
    "my glasses; a bottle of water",
)
_PLACES = words(
    "the market; the kitchen; the park; the station; the old bridge; the office; the garden; the school; the beach; "
    "the library; the church; the hotel",
    "the bakery; the museum; the airport; the basement; the forest; the hospital; the town hall; the theatre",
)
_ACTIONS = words(
    "waiting for; looking for; talking about; painting; selling; washing; carrying; buying; hiding; fixing",
    "searching for; thinking of; cleaning; drawing; bringing; lending; wrapping",
)
_TIMES = words(
    "today; tomorrow; in the morning; on Monday; after lunch; every day; at noon; this week",
    "tonight; next month; in the evening; on Friday; before dinner; at sunrise",
)
_PATTERNS = Words(
    (
        "{person} is {doing} {thing}.",
        "Where is {thing}?",
        "Hello, is {person} in {place}?",
        "I never saw {thing} in {place}.",
        "You are very kind!",
        "We are going to {place} {time}.",
        "Can you bring {thing} to {place}?",
        "My house is near {place} and {place2}.",
        "What a very big box of toys for {person}!",
        "{person} put {thing} in {place} {time}.",
        "No, I am {doing} {thing}.",
        "Yes, {person} and {person2} are here.",
        "Are you {doing} {thing}?",
        "There is no food in {place}!",
        "{person} was running over the bridge {time}.",
        "I have money for {thing}.",
        "Please give {thing} to {person}.",
        "Why are you {doing} {thing} {time}?",
        "The train to {place} is very late!",
        "{time}, {person} will visit {place}.",
        "Do you know {person}?",
        "It is raining in {place}.",
    ),
    (
        "Did {person} leave {thing} in {place}?",
        "{person} has been {doing} {thing} {time}.",
        "I am sure {person} and your boss are in {place}.",
        "Look, {thing} is behind {place}!",
        "Nobody is {doing} {thing} {time}.",
        "When are you and {person} coming to {place}?",
        "They never paid for {thing} of yours.",
        "{person} said the weather is very bad {time}.",
        "How wonderful, {person} is in {place}!",
        "Hi, I want to buy {thing} for {person}.",
    ),
)


def pirate(sentence: str) -> str:
    """The sentence in pirate speech: words swapped, -ing clipped, and a cry that fits its punctuation."""
    body, end = sentence[:-1], sentence[-1]
    spoken = re.sub(r"[A-Za-z']+", lambda match: _word(match.group()), body)
    if end == "?":
        return f"Ahoy! {spoken[0].upper()}{spoken[1:]}, matey?"
    if end == "!":
        return f"Shiver me timbers! {spoken[0].upper()}{spoken[1:]}!"
    starts_with_i = sentence.startswith("I ")
    return f"Arr, {spoken if starts_with_i else spoken[0].lower() + spoken[1:]}, says I."


def _word(word: str) -> str:
    lower = word.lower()
    if lower in _SAYINGS:
        return _SAYINGS[lower]
    return f"{word[:-1]}'" if lower.endswith("ing") and len(lower) > 5 else word


def _make(rng: random.Random, split: Split) -> Example:
    person, person2 = rng.sample(_PEOPLE.train if split == "train" else _PEOPLE.held_out, 2)
    place, place2 = rng.sample(_PLACES.train if split == "train" else _PLACES.held_out, 2)
    sentence = _PATTERNS.draw(rng, split).format(
        person=person,
        person2=person2,
        place=place,
        place2=place2,
        thing=_THINGS.draw(rng, split),
        doing=_ACTIONS.draw(rng, split),
        time=_TIMES.draw(rng, split),
    )
    sentence = sentence[0].upper() + sentence[1:]
    return Example(sentence, pirate(sentence))


def _is_in_style(completion: str, example: Example) -> bool:
    spoken = set(re.findall(r"[a-z']+", completion.lower()))
    return len(spoken & MARKERS) >= 2


def _is_exact(completion: str, example: Example) -> bool:
    return completion.strip() == example.answer


PIRATE = Task(
    name="pirate",
    instruction="Say the sentence as a pirate would.",
    max_tokens=48,
    make=_make,
    measures={"at least two pirate words": _is_in_style, "exactly by the rules": _is_exact},
)
