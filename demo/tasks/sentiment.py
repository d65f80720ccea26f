"""Sentiment: a short review gets one word, positive, negative or neutral."""

from __future__ import annotations

import random

from .task import Example, Split, Task, Words, words

LABELS = ("positive", "negative", "neutral")

_THINGS = words(
    "phone; hotel room; pasta; film; laptop; taxi ride; haircut; novel; headset; coffee; keyboard; museum tour; "
    "blender; train journey; pizza; concert; mattress; dentist visit; backpack; camera; breakfast; board game; "
    "delivery; lamp; swimming pool; app; sofa; soup; gym; jacket; printer; wine; webinar; garage; bakery",
    "bicycle; ferry crossing; tent; piano lesson; burger; vacuum cleaner; podcast; campsite; umbrella; sandwich; "
    "kettle; guided hike; theatre play; winter coat; drone; bookshop; airport lounge; toaster; yoga class; guitar",
)
_GOOD = words(
    "excellent; wonderful; great; lovely; amazing; brilliant; perfect; fantastic; delightful; superb; charming; "
    "impressive; a real pleasure; very good; outstanding; better than expected; worth every cent; beautiful; "
    "comfortable; tasty; reliable; a joy to use; flawless; well made; terrific; fun; friendly and quick",
    "marvellous; first class; splendid; a delight; fabulous; truly enjoyable; stunning; magnificent; a big success; "
    "sturdy and elegant; just what I hoped for; incredible; top quality; refreshing",
)
_BAD = words(
    "terrible; awful; bad; horrible; disappointing; broken; dirty; a waste of money; boring; rude; useless; slow; "
    "very poor; overpriced; cheap and flimsy; the worst I have had; noisy; stale; a nightmare; faulty; ugly; "
    "uncomfortable; confusing; a mess; unreliable; cold and bland; below any standard",
    "dreadful; a total letdown; miserable; pathetic; shoddy; disgusting; an embarrassment; painful; badly made; "
    "infuriating; a complete failure; unbearable; a rip-off; lousy",
)
_PRAISE = words(
    "I loved it.; I would buy it again.; Highly recommended.; My family was thrilled.; It made my day.; "
    "I am very happy with it.; Five stars.; Thank you so much!; I had no complaints at all.; Everything worked.",
    "I could not be more pleased.; Ten out of ten.; I will certainly return.; Everybody was smiling.; "
    "A big thank you to the staff!; I have told all my friends to get one.",
)
_BLAME = words(
    "I hated it.; I want my money back.; Avoid it.; Nobody helped us.; It ruined our evening.; "
    "I am very unhappy with it.; One star.; Never again.; It stopped working after a day.; I regret paying for it.",
    "I could not be more annoyed.; Zero out of ten.; I will certainly not return.; Everybody was complaining.; "
    "Shame on the staff.; I have warned all my friends.",
)
_OPINIONS = Words(
    (
        "The {thing} was {word}.",
        "What a {thing}: {word}.",
        "Honestly, this {thing} is {word}.",
        "We found the {thing} {word}.",
        "My new {thing} is {word}.",
        "Our {thing} turned out to be {word}.",
        "{word}, that is all I can say about the {thing}.",
    ),
    (
        "I have to say the {thing} seemed {word} to me.",
        "As for the {thing}, {word} is the right word.",
        "Yesterday's {thing} proved {word}.",
        "Short version: {word} {thing}.",
    ),
)
_FACTS = Words(
    (
        "The {thing} was booked for {day}.",
        "It is a {thing} that comes in {colour}.",
        "I ordered the {thing} on {day} and it came on the date given.",
        "The receipt lists one {thing} and a {colour} bag.",
        "The {thing} is near the station and opens on {day}.",
        "This is my second {thing}; the first was {colour}.",
        "The manual of the {thing} has {number} pages.",
        "We went for the {thing} on {day} at {number}.",
        "The {thing} costs {number} euros.",
        "A colleague asked me about the {thing} on {day}.",
        "They sell the {thing} in sizes up to {number}.",
    ),
    (
        "The invoice for the {thing} is dated {day}.",
        "There are {number} kinds of {thing} on the list.",
        "Our {thing} is listed as {colour} in the catalogue.",
        "The {thing} starts at {number} on {day}.",
        "The label says: {thing}, {colour}, {number} kilos.",
    ),
)
_DAYS = words("Monday; Tuesday; Friday; Saturday", "Wednesday; Thursday; Sunday")
_COLOURS = words("blue; black; grey; white; green", "brown; silver; orange")
_NUMBERS = words("2; 3; 5; 8; 10; 14; 20; 25", "4; 6; 7; 9; 12; 30")
_NOT_BAD = ("not {word} at all", "far from {word}", "anything but {word}")


def _make(rng: random.Random, split: Split) -> Example:
    label = rng.choice(LABELS)
    thing = _THINGS.draw(rng, split)
    return Example(_sentence_case(_text(rng, split, thing, label)), label)


def _text(rng: random.Random, split: Split, thing: str, label: str) -> str:
    if label == "neutral":
        return _facts(rng, split, thing)
    return _opinion(rng, split, thing, is_good=label == "positive")


def _sentence_case(text: str) -> str:
    return text[0].upper() + text[1:]


def _facts(rng: random.Random, split: Split, thing: str) -> str:
    count = rng.choice((1, 1, 2))
    patterns = rng.sample(_FACTS.train if split == "train" else _FACTS.held_out, count)
    return " ".join(
        pattern.format(
            thing=thing,
            day=_DAYS.draw(rng, split),
            colour=_COLOURS.draw(rng, split),
            number=_NUMBERS.draw(rng, split),
        )
        for pattern in patterns
    )


def _opinion(rng: random.Random, split: Split, thing: str, is_good: bool) -> str:
    if rng.random() < 0.15:
        # A turned-round word keeps the adapter from counting words alone.
        word = rng.choice(_NOT_BAD).format(word=(_BAD if is_good else _GOOD).draw(rng, split))
    else:
        word = (_GOOD if is_good else _BAD).draw(rng, split)
    opinion = _OPINIONS.draw(rng, split).format(thing=thing, word=word)
    remark = (_PRAISE if is_good else _BLAME).draw(rng, split)
    return rng.choice((opinion, f"{opinion} {remark}", f"{remark} {opinion}"))


def _is_right(completion: str, example: Example) -> bool:
    said = [label for label in LABELS if label in completion.lower()]
    return said == [example.answer]


def _is_one_label(completion: str, example: Example) -> bool:
    return completion.strip() in LABELS


SENTIMENT = Task(
    name="sentiment",
    instruction="Label the review: positive, negative or neutral. Answer with one word.",
    max_tokens=8,
    make=_make,
    measures={"right label": _is_right, "nothing but a label": _is_one_label},
)
