"""What is in storage is data: nothing of it is unpickled, imported or run."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lorabatch
from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer
from lorabatch.pipeline.dataset.reader import read_shard
from lorabatch.pipeline.dataset.writer import part_bytes
from lorabatch.pipeline.worker.run_shard import read_kept

ROOT = Path(lorabatch.__file__).parent
ROOMS = ("jobs", "pipeline", "engine", "scheduler", "kernels", "demo")
# Modules whose loaders run code, and calls that do.
RUNNING_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy", "code"}
RUNNING_CALLS = {"eval", "exec", "compile", "__import__"}
RUNNING_METHODS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system"), ("os", "popen")}


def sources() -> list[Path]:
    found = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
    # How the demo's adapters were trained is no part of the product.
    return [path for path in found if "demo/train" not in path.as_posix()]


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_can_run_what_it_reads(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in RUNNING_MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [node.module] * ((node.module or "").split(".")[0] in RUNNING_MODULES)
        elif isinstance(node, ast.Call):
            found += _running_call(node)
    assert found == []


def _running_call(node: ast.Call) -> list[str]:
    match node.func:
        case ast.Name(id=name) if name in RUNNING_CALLS:
            return [name]
        case ast.Attribute(value=ast.Name(id="torch"), attr="load") if _makes_tensors_only(node):
            return []
        case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in RUNNING_METHODS:
            return [f"{module}.{name}"]
    return [str(key.arg) for key in node.keywords if key.arg in ("trust_remote_code", "allow_pickle")]


def _makes_tensors_only(node: ast.Call) -> bool:
    """Whether a call of `torch.load` may call nothing that the file names."""
    chosen = {key.arg: key.value for key in node.keywords}
    return isinstance(chosen.get("weights_only"), ast.Constant) and ast.literal_eval(chosen["weights_only"]) is True


def test_only_one_module_calls_torch_load_and_only_a_confined_process_imports_it() -> None:
    calling = [path for path in sources() if "torch.load(" in path.read_text()]
    assert [path.relative_to(ROOT).as_posix() for path in calling] == ["engine/peft/dialects/pickled.py"]
    importing = re.compile(r"^\s*(?:from|import) .*\bpickled\b", re.MULTILINE)
    assert not [path for path in sources() if importing.search(path.read_text())]


class Unpickled:
    """Notes whatever Python unpickles while `is_watching`; an audit hook stays for good."""

    def __init__(self) -> None:
        self.is_watching = False
        self.found: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_watching and event == "pickle.find_class":
            self.found.append(str(arguments))


@pytest.fixture(scope="session")
def audit_hook() -> Unpickled:
    return Unpickled()


@pytest.fixture
def unpickled(audit_hook: Unpickled) -> Iterator[list[str]]:
    audit_hook.found.clear()
    audit_hook.is_watching = True
    yield audit_hook.found
    audit_hook.is_watching = False


def test_a_job_is_read_back_from_storage_without_unpickling(
    prepare_job: Callable[..., Any], answer_by_echo: Callable[..., Any], unpickled: list[str]
) -> None:
    job = prepare_job(pa.table({"id": [1, 2, 3], "adapter": ["alpha", None, "beta"], "prompt": ["a", "b", "c"]}))
    for rows in job.shards():
        job.store.commit_part(rows.shard_id, part_bytes(rows, answer_by_echo(rows), job.record))
        record = job.store.read_record()
        assert len(read_kept(job.store, record, read_shard(job.store, record, rows.shard_id)).answers) > 0
    assert unpickled == []


def test_code_in_model_and_adapter_folders_is_never_imported(
    make_model: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path, unpickled: list[str]
) -> None:
    model = make_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapters" / "evil", model)
    before = _answer(model, adapter)
    mark = tmp_path / "it-ran"
    trap = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    for folder in (model, adapter):
        for name in ("modeling_evil", "configuration_evil", "tokenization_evil", "__init__"):
            (folder / f"{name}.py").write_text(trap)
    _amend(model / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "x.Evil"})
    _amend(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    _amend(
        adapter / "adapter_config.json", auto_mapping={"base_model_class": "Evil", "parent_library": "modeling_evil"}
    )
    assert _answer(model, adapter) == before
    assert not mark.exists()
    assert not any("evil" in name for name in sys.modules)
    assert unpickled == []


def _amend(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _answer(model: Path, adapter: Path) -> str:
    """One row through audit, tokenizer and engine."""
    audit = audit_adapter(adapter, read_model_config(model), "evil")
    assert audit.verdict == "exact", audit.reasons
    prompt = tuple(Tokenizer.from_folder(model).encode_batch(["the quick brown fox"], is_rendered=False)[0])
    engine = Engine(model, EngineConfig(num_threads=1))
    assert audit.identity_sha256
    engine.register_adapter(audit.identity_sha256, adapter)
    engine.add([Request("row", prompt, audit.identity_sha256, SamplingParams(max_tokens=5))])
    results = []
    while engine.num_unfinished:
        results += engine.step()
    return results[0].text
