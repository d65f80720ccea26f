"""Formats of input files, by endings and first bytes; says of a file of another format what to do with it."""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from shlex import quote

from .conversion.source import Kind

#: Format that is no `Kind`.
PARQUET = "Parquet"
#: Endings of Parquet files.
SUFFIXES = (".parquet", ".pq", ".parq")
#: Bytes at the begin of a file that are enough to guess its format.
FIRST_BYTES = 2048
# A folder with one of these and files of `.json` has its rows in the former: `.json` files often describe others.
_FORMATS: Mapping[str, Kind] = {
    ".csv": "CSV", ".tsv": "TSV", ".jsonl": "JSON Lines", ".ndjson": "JSON Lines", ".arrow": "Arrow",
    ".feather": "Arrow", ".ipc": "Arrow", ".orc": "ORC", ".json": "JSON Lines",
}  # fmt: skip
# Formats that are not read, by their endings -> the packages and the code that write them as Parquet.
_PANDAS = "import pandas; pandas.{reader}({source}).to_parquet({target})"
_UNREAD: Mapping[str, tuple[str, str, str]] = {
    ".avro": ("Avro", "polars", "import polars; polars.read_avro({source}).write_parquet({target})"),
    ".xlsx": ("Excel", "pandas and openpyxl", _PANDAS.replace("{reader}", "read_excel")),
    ".xlsm": ("Excel", "pandas and openpyxl", _PANDAS.replace("{reader}", "read_excel")),
    ".xls": ("Excel", "pandas and xlrd", _PANDAS.replace("{reader}", "read_excel")),
    ".ods": ("OpenDocument", "pandas and odfpy", _PANDAS.replace("{reader}", "read_excel")),
    ".dta": ("Stata", "pandas", _PANDAS.replace("{reader}", "read_stata")),
    ".sas7bdat": ("SAS", "pandas", _PANDAS.replace("{reader}", "read_sas")),
}
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".snappy")
_COMPRESSIBLE = ("CSV", "TSV", "JSON Lines")
_MAGIC: Mapping[bytes, str] = {b"PAR1": PARQUET, b"PARE": PARQUET, b"ARROW1": "Arrow", b"ORC": "ORC"}
_STREAM_MAGIC = b"\xff\xff\xff\xff"
_COMPRESSED_MAGIC = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ\x00", b"\x04\x22\x4d\x18")
_ENDING_OF: Mapping[str, str] = {
    "CSV": ".csv", "TSV": ".tsv", "JSON Lines": ".jsonl", "Arrow": ".arrow", "ORC": ".orc",
}  # fmt: skip
# Other first bytes -> what they say, with the next step.
_OTHERS: Mapping[bytes, str] = {
    b"PK\x03\x04": "a ZIP archive, as files of Excel are, which is not read. Unpack it, or write its table as Parquet",
    b"\xd0\xcf\x11\xe0": "a file of an office program, which is not read. Write its table as Parquet",
    b"SQLite format 3": "a database of SQLite, which is not read. Write one of its tables as Parquet or CSV",
    b"Obj\x01": "Avro, which is not read. Write it as Parquet",
    **{
        bytes([0x80, protocol]): "Python's pickle, which is not read: it may run any code. Write the table as Parquet"
        for protocol in range(2, 6)
    },
}
_NO_TEXT = re.compile(r"[\x00-\x08\x0e-\x1f]")
_MARKUP = re.compile(r"\s*<(\?xml|!doctype|html)\b", re.IGNORECASE)
_JSON = re.compile(r'\s*(\{\s*["}]|\[\s*\{)')
_PROMPTS = 'import json, sys; [print(json.dumps({"prompt": line.rstrip()})) for line in sys.stdin if line.strip()]'


def kind_of_name(name: str) -> str | None:
    """The format that is read, by the ending of a file's name; None for others, and for Parquet."""
    kind, compression = _FORMATS.get(_ending(_stem(name))), _compression(name)
    return None if compression == ".snappy" or (compression and kind not in _COMPRESSIBLE) else kind


def kind_of_content(first: bytes) -> str | None:
    """The format that is read, by a file's first bytes; None where they do not say it."""
    return next((kind for magic, kind in _MAGIC.items() if first.startswith(magic)), None)


def may_be_stream(first: bytes) -> bool:
    """Whether a file begins like a stream of Arrow, with bytes that other files may have."""
    return first.startswith(_STREAM_MAGIC)


def is_plain_json(name: str) -> bool:
    """Whether a name ends with `.json`, with or without an ending of compression."""
    return _stem(name).endswith(".json")


def shown_ending(name: str) -> str:
    """The ending of a file's name with that of its compression, for messages; "" if it has none."""
    stem = name[: len(name) - len(_compression(name))]
    return (_ending(stem) if not stem.endswith(".") else "") + name[len(stem) :]


def refusal(name: str, address: str, first: bytes, reason: str) -> str:
    """Why a file that cannot be read as Parquet is no input, and what to do: a sentence.

    Args:
        name: Its name for the message.
        address: Its path or URL, without passwords.
        first: Its first `FIRST_BYTES` bytes.
        reason: What a reader of Parquet says of it.
    """
    is_begun = kind_of_content(first) == PARQUET
    advice = "" if is_begun else advice_for(address, first)
    damaged = f"not a readable Parquet file ({reason})" if is_begun or name.lower().endswith(SUFFIXES) else ""
    if damaged:
        said = f"{damaged}; {advice}" if advice else f"{damaged}. Write it again or leave it out"
    else:
        said = advice or _unknown(name)
    return f"input file {name!r}: {said}."


def advice_for(address: str, first: bytes) -> str:
    """A clause on what a file that is not read seems to be, and on what to do; "" where neither its name nor its
    first bytes say it.
    """
    compression, ending = _compression(address), _ending(_stem(address))
    known = PARQUET if ending in SUFFIXES else _FORMATS.get(ending)
    if compression and known:
        hint = "Compress it with gzip instead, or decompress it" if known in _COMPRESSIBLE else "Decompress it"
        return f"{known} compressed as {compression}, which is not read. {hint}"
    if not compression and ending in _UNREAD:
        label, packages, code = _UNREAD[ending]
        code = code.format(source=json.dumps(_shown(address)), target=json.dumps(_renamed(address, ".parquet")))
        return f"{label}, which is not read. Write it as Parquet, with {packages}: {_python(code)} (or leave it out)"
    if compression or first.startswith(_COMPRESSED_MAGIC):
        return "a compressed file whose name does not say what it holds. Rename it, as in rows.jsonl.gz"
    if other := next((said for magic, said in _OTHERS.items() if first.startswith(magic)), ""):
        return other
    return _advice_for_content(address, kind_of_content(first) or _guess(first))


def _advice_for_content(address: str, kind: str | None) -> str:
    match kind:
        case None | "Parquet":
            return ""
        case "markup":
            return "a web page or XML, which is not read. Give the address of the table itself, or write it as Parquet"
        case "text":
            source, target = quote(_shown(address)), quote(_renamed(address, ".jsonl"))
            return (
                "text without columns, which is not read. If each of its lines is a prompt, make JSON Lines of it: "
                f"{_python(_PROMPTS)} < {source} > {target} (or leave it out)"
            )
    new = _renamed(address, _ENDING_OF[kind])
    return f"it begins like {kind}, which is read by its ending. Rename it to {new}, or leave it out"


def _guess(first: bytes) -> str | None:
    """The format that text seems to have: a `Kind`, "markup" or "text"; None for other bytes."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(first)
    except UnicodeDecodeError:
        return None
    if not text.strip() or _NO_TEXT.search(text):
        return None
    if _MARKUP.match(text):
        return "markup"
    if _JSON.match(text):
        return "JSON Lines"
    lines = text.splitlines()[:2]
    separator = next((sign for sign in "\t,;|" if _num_columns(lines, sign) > 1), None)
    return "text" if separator is None else "TSV" if separator == "\t" else "CSV"


def _num_columns(lines: Sequence[str], separator: str) -> int:
    """Fields of each of two lines; 0 if they have different numbers of fields, or if there is one line only."""
    first, *others = (len(fields) for fields in csv.reader(lines, delimiter=separator))
    return first if others == [first] else 0


def _unknown(name: str) -> str:
    read: dict[str, list[str]] = {}
    for ending, kind in _FORMATS.items():
        read.setdefault(kind, []).append(ending)
    expected = ", ".join([PARQUET, *(f"{kind} ({', '.join(endings)})" for kind, endings in read.items())])
    ending = shown_ending(name)
    named = f"its ending {ending} nor its" if ending else "its name, which has no ending, nor its"
    return (
        f"neither {named} first bytes are those of a format that is read. Expected {expected}. Write it as one of them "
        "or leave it out"
    )


def _shown(address: str) -> str:
    """A path or URL for a command, from the current folder if it is there; `FILE` for one that cannot be typed."""
    here = f"{os.getcwd()}/"
    return address.removeprefix(here) if address.isprintable() else "FILE"


def _renamed(address: str, ending: str) -> str:
    """The name of a file with another ending, which is not added where the rest has one of the same format."""
    name = _shown(address).rpartition("/")[2]
    stem = name.rpartition(".")[0] or name
    return stem if _FORMATS.get(_ending(stem.lower()), "") == _FORMATS.get(ending) else stem + ending


def _python(code: str) -> str:
    return f"python -c {quote(code)}"


def _compression(name: str) -> str:
    return next((end for end in _COMPRESSIONS if name.lower().endswith(end)), "")


def _stem(name: str) -> str:
    """A name in small letters, without the ending of its compression."""
    return name.lower().removesuffix(_compression(name))


def _ending(name: str) -> str:
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return dot + ending if dot else ""
