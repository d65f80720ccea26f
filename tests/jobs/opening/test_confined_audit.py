"""Adapters are audited in child processes: what their folders do to the libraries that read them costs them alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lorabatch
from lorabatch.engine.config import read_model_config
from lorabatch.engine.peft import audit_adapter
from lorabatch.jobs.opening import confined_audit
from lorabatch.jobs.opening.adapters import audit_all
from lorabatch.jobs.opening.confined_audit import Auditors
from lorabatch.jobs.record import AdapterRecord

NESTED = "[" * 100_000 + "]" * 100_000
# Its map says that it has 16 GB; the library aborts where it cannot have them.
GREEDY = {"type": "Precompiled", "precompiled_charsmap": "/////wAA"}
ONE_TO_MANY = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10_000_000}
LONG_TOKEN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False) | {
    "id": 1,
    "content": "x" * 100_000,
}


#: A file of an adapter's folder, what it holds (None: a pipe), and why the adapter is refused; "" where it is not.
HOSTILE: tuple[tuple[str, Any, str], ...] = (
    ("tokenizer.json", {"normalizer": GREEDY}, "it needs more than 3 GiB of memory"),
    ("tokenizer.json", {"normalizer": ONE_TO_MANY}, "its normalizer makes 10000000 characters of one"),
    ("tokenizer.json", {"added_tokens": [LONG_TOKEN]}, "it has a token of 100000 characters"),
    ("tokenizer.json", NESTED, "not a tokenizer"),
    ("tokenizer_config.json", f'{{"x": {NESTED}}}', "it nests too deeply"),
    ("tokenizer_config.json", f'{{"x": 1{"0" * 5000}}}', "a number of 5001 digits"),
    ("tokenizer_config.json", None, "not a regular file"),
    ("chat_template.jinja", "(" * 3000, ""),
    ("chat_template.jinja", "{{ " + "(" * 3000, "not a valid jinja2 template"),
    ("chat_template.jinja", "{% for i in x %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
    ("chat_template.jinja", "{{ 9**(9**9) }}", ""),
)


@pytest.fixture(scope="module")
def hostile_audits(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, AdapterRecord]:
    """What a job's audit says of all hostile folders together, each with a good neighbour behind it."""
    root, adapters = tmp_path_factory.mktemp("hostile"), {}
    for number, (name, content, _) in enumerate(HOSTILE):
        bad = Path(shutil.copytree(tiny_adapters["rank8"], root / f"bad{number}"))
        shutil.copy(tiny_llama / "tokenizer.json", bad)
        if content is None:
            os.mkfifo(bad / name)
        elif isinstance(content, dict):
            (bad / name).write_text(json.dumps(json.loads((bad / name).read_text()) | content))
        else:
            (bad / name).write_text(content)
        adapters |= {f"bad{number}": str(bad), f"good{number}": str(tiny_adapters["rank8"])}
    return {record.name: record for record in audit_all(adapters, tiny_llama, read_model_config(tiny_llama), {})}


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_tokenizer_costs_its_adapter_alone(hostile_audits: dict[str, AdapterRecord], number: int) -> None:
    bad, good, reason = hostile_audits[f"bad{number}"], hostile_audits[f"good{number}"], HOSTILE[number][2]
    assert (bad.verdict, good.verdict) == ("refused" if reason else "exact", "exact")
    assert reason in "".join(bad.reasons)


def with_tokenizer(adapter: Path, model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the adapter with the base's tokenizer, changed."""
    shutil.copytree(adapter, folder)
    content = json.loads((model / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    return folder


def endless(adapter: Path, model: Path, folder: Path) -> Path:
    """An adapter whose tokenizer takes hours to load: 200 added tokens, each of which its normalizer lengthens."""
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
    tokens = [flags | {"id": 1000 + i, "content": "a" * 16_000 + str(i)} for i in range(200)]
    changes = {"normalizer": {"type": "Sequence", "normalizers": [longer] * 5}, "added_tokens": tokens}
    return with_tokenizer(adapter, model, folder, **changes)


def test_an_adapter_that_takes_for_ever_is_refused_and_the_others_are_not(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confined_audit, "_CPU_S", 2)
    bad = endless(tiny_adapters["rank8"], tiny_llama, tmp_path / "bad")
    audits = lorabatch.audit([bad, *tiny_adapters.values()], model=tiny_llama)
    assert [audit.verdict for audit in audits] == ["refused", *["exact"] * len(tiny_adapters)]
    assert "adapter 'bad': cannot be audited: it takes more than 2 s of computing" in audits[0].reasons[0]


def test_an_interrupted_audit_ends_its_processes(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    bad = endless(tiny_adapters["rank8"], tiny_llama, tmp_path / "bad")
    command = [sys.executable, "-m", "lorabatch", "audit", "--model", str(tiny_llama), str(bad)]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # also where the tests themselves run in the background, without interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as audit:
        own = psutil.Process(audit.pid)
        while not (children := own.children()) or children[0].cpu_times().user < 1:
            assert audit.poll() is None
            time.sleep(0.05)
        audit.send_signal(signal.SIGINT)
        assert audit.wait(30) == 130
    psutil.wait_procs(children, 10)
    assert not any(map(psutil.Process.is_running, children))


def test_an_auditor_that_is_killed_from_outside_is_replaced(
    tiny_llama: Path, tiny_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a machine that runs out of memory: no fault of the adapter."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with Auditors(tiny_llama, read_model_config(tiny_llama)) as auditors:
        others = set(psutil.Process().children())
        assert auditors.audit("first", tiny_adapters["rank8"]).verdict == "exact"
        for name, folder in islice(tiny_adapters.items(), 2):
            (auditor,) = set(psutil.Process().children()) - others
            auditor.suspend()
            threading.Timer(0.3, auditor.kill).start()
            assert auditors.audit(name, folder).verdict == "exact"


@pytest.mark.parametrize("check_values", [True, False])
def test_the_child_says_what_the_audit_says(
    tiny_llama: Path, tiny_adapters: dict[str, Path], check_values: bool
) -> None:
    model = read_model_config(tiny_llama)
    with Auditors(tiny_llama, model) as auditors:
        for name, folder in tiny_adapters.items():
            found = auditors.audit(name, folder, check_values=check_values)
            assert found == audit_adapter(folder, model, name, check_values=check_values)


def test_the_command_audit_refuses_the_tokenizers_that_a_job_would(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    content = json.loads((tiny_llama / "tokenizer.json").read_text())
    (moved, *others) = content["added_tokens"]
    bad = with_tokenizer(
        tiny_adapters["rank8"], tiny_llama, tmp_path / "bad", added_tokens=[moved | {"content": "<new>"}, *others]
    )
    (audit,) = lorabatch.audit(bad, model=tiny_llama, headers_only=True)
    assert audit.verdict == "refused"
    (record,) = audit_all({"bad": str(bad)}, tiny_llama, read_model_config(tiny_llama), {})
    assert record.reasons == audit.reasons


def test_many_adapters_are_audited_in_their_order(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "many"
    for i in range(12):
        shutil.copytree(tiny_adapters["rank8"], root / f"a{i:02d}")
    (root / "a05" / "adapter_config.json").unlink()
    (root / "not an adapter").mkdir()
    (root / "a file").write_text("")
    audits = lorabatch.audit(root, model=tiny_llama)
    assert [audit.name for audit in audits] == [f"a{i:02d}" for i in range(12)]
    assert [audit.name for audit in audits if audit.verdict == "refused"] == ["a05"]
    assert len({audit.content_sha256 for audit in audits if audit.content_sha256}) == 1


def test_a_machine_that_cannot_start_processes_is_no_fault_of_the_adapters(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(lorabatch.EngineError, match="cannot start the process in which adapters"):
        lorabatch.audit(tiny_adapters["rank8"], model=tiny_llama)
    pq.write_table(pa.table({"adapter": ["rank8"], "prompt_token_ids": [[3]]}), tmp_path / "in.parquet")
    folders = {"adapters": tiny_adapters["rank8"].parent, "input": tmp_path / "in.parquet", "output": tmp_path / "out"}
    with pytest.raises(lorabatch.JobFailedError, match="cannot start the process in which adapters"):
        lorabatch.plan(model=tiny_llama, **folders)


HEADER = "<|im_start|>assistant\n"
#: How a template ends prompts -> what they lack then.
ENDS = {
    "ignored": ("", HEADER),
    "with reasoning": ("{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}", ""),
    "another header": ("{% if add_generation_prompt %}Answer:{% endif %}", HEADER),
}


def test_a_template_that_ends_prompts_without_the_header_of_answers_is_noted(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    for name, (end, _) in ENDS.items():
        own = Path(shutil.copytree(tiny_adapters["rank8"], tmp_path / name))
        (own / "chat_template.jinja").write_text(turns + end)
    folders = {name: str(tmp_path / name) for name in ENDS}
    audits = lorabatch.audit(list(folders.values()), model=tiny_llama)
    expected = {name: ("exact", missing) for name, (_, missing) in ENDS.items()}
    assert {found.name: (found.verdict, found.missing_header) for found in audits} == expected
    noted = [any("ends prompts without '<|im_start|>assistant\\n'" in note for note in found.notes) for found in audits]
    assert noted == [bool(found.missing_header) for found in audits]
    records = audit_all(folders, tiny_llama, read_model_config(tiny_llama), {})
    assert {record.name: record.missing_header for record in records} == {
        n: missing for n, (_, missing) in expected.items()
    }


def test_an_adapter_that_names_another_base_says_so_once(
    make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    small, large = make_model(tmp_path / "Small-1B"), make_model(tmp_path / "Large-8B", hidden_size=32)
    folder = make_adapter(tmp_path / "one", small, target_modules="all-linear")
    config = json.loads((folder / "adapter_config.json").read_text())
    for named, says_so in {"org/Large-8B-bnb-4bit": True, "C:\\models\\small-1b": False, "": False}.items():
        config["base_model_name_or_path"] = named
        (folder / "adapter_config.json").write_text(json.dumps(config))
        clause = f"its configuration names the base {named.rpartition('/')[2]}, the one that is served is "
        with Auditors(small, read_model_config(small), "hub/Small-1B") as auditors:
            notes = auditors.audit("one", folder).notes
        assert [clause + "Small-1B"] * says_so == [note for note in notes if "names the base" in note]
    config["base_model_name_or_path"] = "org/Small-1B"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with Auditors(large, read_model_config(large)) as auditors:
        reasons = auditors.audit("one", folder).reasons
    assert " ".join(reasons).count("names the base Small-1B, the one that is served is Large-8B") == 1, reasons
