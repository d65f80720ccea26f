"""Contacts: free text about a person becomes one line of JSON with name, company, email and phone."""

from __future__ import annotations

import json
import random

from .task import Example, Split, Task, Words, words

KEYS = ("name", "company", "email", "phone")

_FIRST = words(
    "Anna; Bruno; Clara; David; Elena; Felix; Greta; Hugo; Ines; Jonas; Karin; Leo; Maria; Nils; Olga; Paul; Rosa; "
    "Simon; Tina; Victor; Wendy; Yara; Zoe; Adam; Bella; Carlos; Diana; Emil; Fatima; George; Hana; Ivan; Julia; "
    "Kevin; Laura; Martin; Nora; Oscar; Petra; Ravi; Sofia; Thomas; Ursula; Wei; Aisha; Ben; Chen; Dora",
    "Magnus; Priya; Lucas; Ingrid; Mateo; Yuki; Amelia; Tariq; Beatrice; Dmitri; Saskia; Kofi; Linnea; Rafael",
)
_LAST = words(
    "Keller; Novak; Silva; Brown; Rossi; Meyer; Larsen; Dubois; Kim; Garcia; Weber; Olsen; Costa; Hall; Popov; "
    "Schmid; Lindt; Moreau; Khan; Young; Fischer; Berg; Santos; Reed; Ferrari; Vogel; Ortiz; Stone; Yilmaz; Horn",
    "Andersson; Banerjee; Whitfield; Okafor; Lemaire; Takeda; Castellano; Brandt; Petrov; Hawkins; Van Dijk; Sorensen",
)
_SYLLABLES = ("ba", "ren", "ko", "mi", "sal", "tor", "ve", "lan", "du", "fi", "gar", "hol", "ni", "pe", "ros", "wick")
_COMPANY = words(
    "Bluewater; Northgate; Sunrise; Ironwood; Redleaf; Harbor; Greenfield; Starling; Oakridge; Silverline; Copper; "
    "Riverside; Summit; Lakeside; Falcon; Pinewood; Meadow; Granite; Seaview; Willow",
    "Thornbury; Goldcrest; Maplehurst; Windmill; Foxglove; Evergreen; Blackstone; Whitecap; Juniper; Amberfield",
)
_COMPANY_KIND = words(
    "Labs; Media; Foods; Logistics; Systems; Bank; Design; Motors; Travel; Energy; GmbH; & Sons",
    "Studio; Consulting; Textiles; Robotics; Insurance; Group",
)
_DOMAIN_END = words("com; org; net; de; ch; fr", "io; eu; co; it")
_PHONE_SHAPES = Words(
    ("###-####", "+## ## ### ####", "### ### ###", "(###) ###-####", "0## ### ## ##"),
    ("##-###-###", "+# ### ### ####", "### ## ##"),
)

# Patterns of texts (training, held out). Keys without a slot in the pattern are null in the answer.
_PATTERNS = Words(
    (
        "{name} works at {company}. Write to {email} or call {phone}.",
        "Please call {name} ({company}) on {phone}, mail {email}.",
        "Contact: {name}, {company}, {email}, {phone}",
        "Our new client is {name} from {company}; the address is {email}.",
        "You can reach {name} at {phone}.",
        "Met {name} of {company} today. Phone {phone}.",
        "Email {email} and ask for {name}.",
        "{company} sent {name}. Mobile: {phone}. Mail: {email}.",
        "Hi, this is {name}. My number is {phone} and my mail is {email}.",
        "For invoices write to {email}, attention {name}, {company}.",
        "{name}\n{company}\n{phone}\n{email}",
        "Speaker: {name} ({email})",
        "I spoke with {name} from {company} yesterday.",
        "Tel. {phone}, {name}",
        "The order from {company} was signed by {name}, phone {phone}, email {email}.",
        "Ask {name} at {email}; if it is urgent, dial {phone}.",
    ),
    (
        "Lunch with {name} on Friday, who joined {company} last year. Number: {phone}, {email}.",
        "Forward the report to {name} <{email}> please.",
        "Reminder: ring {name} back at {phone} about the {company} contract.",
        "Signed, {name}, {company} | {email} | {phone}",
        "Is {email} still right for {name}? The office line was {phone}.",
        "Thanks! Best, {name} ({company}), {phone}",
        "Badge 12: {name}, {company}.",
        "Anyone needing a lift should text {name}: {phone}.",
        "The {company} desk is run by {name}, whose mail is {email}.",
        "New supplier! {company}, represented by {name}. {email} / {phone}",
    ),
)


def _make(rng: random.Random, split: Split) -> Example:
    first, last = _FIRST.draw(rng, split), _surname(rng, split)
    company = _COMPANY.draw(rng, split)
    values = {
        "name": f"{first} {last}",
        "company": f"{company} {_COMPANY_KIND.draw(rng, split)}",
        "email": _email(rng, split, first, last, company),
        "phone": "".join(rng.choice("0123456789") if c == "#" else c for c in _PHONE_SHAPES.draw(rng, split)),
    }
    pattern = _PATTERNS.draw(rng, split)
    answer = {key: values[key] if f"{{{key}}}" in pattern else None for key in KEYS}
    return Example(pattern.format(**values), json.dumps(answer))


def _surname(rng: random.Random, split: Split) -> str:
    """A listed surname, or in training often an invented one: copying must not depend on known names."""
    if split == "train" and rng.random() < 0.5:
        return "".join(rng.sample(_SYLLABLES, rng.choice((2, 3)))).capitalize()
    return _LAST.draw(rng, split)


def _email(rng: random.Random, split: Split, first: str, last: str, company: str) -> str:
    family = last.lower().replace(" ", "")
    user = rng.choice((first.lower(), f"{first.lower()}.{family}", f"{first[0].lower()}.{family}", family))
    return f"{user}@{company.lower()}.{_DOMAIN_END.draw(rng, split)}"


def _parsed(completion: str) -> dict[str, object] | None:
    try:
        value = json.loads(completion)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_json_with_keys(completion: str, example: Example) -> bool:
    value = _parsed(completion)
    return value is not None and tuple(sorted(value)) == tuple(sorted(KEYS))


def _is_right(completion: str, example: Example) -> bool:
    return bool(_parsed(completion) == json.loads(example.answer))


CONTACTS = Task(
    name="contacts",
    instruction="Extract the contact as JSON with the keys name, company, email, phone. Use null for what is missing.",
    max_tokens=96,
    make=_make,
    measures={"valid JSON, right keys": _is_json_with_keys, "every field right": _is_right},
)
