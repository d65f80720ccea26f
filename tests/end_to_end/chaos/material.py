"""What all trials share: a tiny model with adapters, two inputs, and the answers of undisturbed runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save

from lorabatch.tests.conftest import write_adapter, write_model
from lorabatch.tests.end_to_end.chaos.scenario import EngineKind, FileKind, Scenario
from lorabatch.tests.end_to_end.chaos.sorted_output import digest, sorted_output

_ECHO_FOLDER = Path(__file__).resolve().parents[2] / "echo"
_ADAPTERS: dict[str, dict[str, Any]] = {
    "rank1": {"r": 1, "lora_alpha": 2},
    "rank8": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rank20": {"r": 20, "lora_alpha": 10, "target_modules": ["gate_proj", "down_proj", "o_proj"]},
}
# Long enough that blows land in the middle: some two seconds of work for two engines.
_NUM_ROWS: dict[EngineKind, int] = {"echo": 256, "uneven": 64, "real": 64, "staged": 64}
_MAX_TOKENS: dict[EngineKind, int] = {"echo": 4, "uneven": 40, "real": 100, "staged": 4}
_BATCH_ROWS: dict[EngineKind, int] = {"echo": 8, "uneven": 8, "real": 4, "staged": 8}
_ECHO: dict[EngineKind, dict[str, Any]] = {
    "echo": {"step_s": 0.04},
    "uneven": {"step_s": 0.02, "slow_factor": 30},
    "real": {},
    "staged": {"step_s": 0.04},
}
# A draft by the row's adapter, two judgements, a note of the base model, and a correction of some rows.
_STAGES = {
    "draft": {"prompt": "{{ note }} {{ id }}", "n": 2},
    "judge": {"for_each": "draft", "adapter": "rank8", "prompt": "{{ draft.completion }}", "max_tokens": 2},
    "remark": {"adapter": None, "prompt": "{{ note }}: {{ judge[0].completion }}", "max_tokens": 3},
    "fix": {"when": "'a' in remark.completion", "adapter": "rank20", "prompt": "{{ remark.completion }}!"},
}
_UNDISTURBED_LIMIT_S = 500
_ROW_GROUP = 32


def _echoed(i: int) -> dict[str, Any]:
    """A row's own columns, for echo engines."""
    return {"prompt_token_ids": [3 + i % 300, 3 + i // 300, 7]}


def _real(i: int, temperature: float) -> dict[str, Any]:
    """A row's own columns, for real engines: a text, and how tokens are chosen, to the last one."""
    return {"prompt": f"one more fox {i}", "temperature": temperature, "seed": i, "ignore_eos": True}


@dataclass
class Material:
    """Files under `folder`, made when they are first asked for, and found there later."""

    folder: Path
    _digests: dict[tuple[EngineKind, int], str] = field(default_factory=dict)

    @cached_property
    def model(self) -> Path:
        """A random two-layer Llama."""
        path = self.folder / "model"
        return path if path.exists() else write_model(path)

    def files_of_one_job(self, engine: EngineKind, folder: Path) -> dict[str, Path]:
        """Options of the job: copies in the folder, which blows may change. The model's copy sets how slow echo engines
        are, the first of them above all.
        """
        model, adapters, rows = folder / "model", folder / "adapters", folder / "input.parquet"
        shutil.copytree(self.model, model)
        (model / "echo.json").write_text(json.dumps(_ECHO[engine]))
        shutil.copytree(self.adapters, adapters)
        shutil.copy2(self.input(engine), rows)
        return {"model": model, "adapters": adapters, "input": rows}

    def file(self, kind: FileKind) -> str:
        """A file of `files_of_one_job`, by its name in the folder."""
        return {
            "base": "model/model.safetensors",
            "tokenizer": "model/tokenizer.json",
            "adapter": "adapters/rank8/adapter_model.safetensors",
            "input": "input.parquet",
        }[kind]

    def other_contents(self, kind: FileKind, engine: EngineKind) -> bytes:
        """A file for the same job, mostly of the same size, with which answers are other ones."""
        if kind == "input":
            rows = self.rows(engine)
            column = {"real": "prompt", "staged": "note"}.get(engine, "prompt_token_ids")
            others = [row | {column: other[column]} for row, other in zip(rows, reversed(rows), strict=True)]
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(others), sink, row_group_size=_ROW_GROUP)
            return sink.getvalue().to_pybytes()
        own = self.folder / self.file(kind)
        if kind == "tokenizer":
            # Two letters have each other's number.
            text = own.read_text(encoding="utf-8")
            numbers = json.loads(text)["model"]["vocab"]
            e, o = (f'"{letter}": {numbers[letter]},' for letter in "eo")
            halves = text.split(e)
            assert (len(halves), text.count(o)) == (2, 1), "each letter has one number"
            return e.replace("e", "o").join(half.replace(o, o.replace("o", "e")) for half in halves).encode()
        weights = load_file(own)
        turned = {
            name: -tensor if "down_proj" in name or "lora_B" in name else tensor for name, tensor in weights.items()
        }
        return save(turned, metadata={"format": "pt"})

    @cached_property
    def adapters(self) -> Path:
        """Three adapters of different ranks on different layers."""
        for seed, (name, lora) in enumerate(_ADAPTERS.items()):
            path = self.folder / "adapters" / name
            if not path.exists():
                write_adapter(path, self.model, seed=seed + 1, **lora)
        return self.folder / "adapters"

    def rows(self, engine: EngineKind) -> list[dict[str, Any]]:
        """The input: prompts that all differ, spread over the base model and the adapters. Real engines choose the
        tokens of half the rows by chance, each from its own stream: one that goes on at the wrong place shows.
        """
        names = [None, *_ADAPTERS]
        return [
            {
                "id": i,
                "adapter": names[i % len(names)],
                "note": f"n{i}",
                **(_real(i, i // len(names) % 2) if engine == "real" else {} if engine == "staged" else _echoed(i)),
            }
            for i in range(_NUM_ROWS[engine])
        ]

    def input(self, engine: EngineKind) -> Path:
        """The same as a file of several row groups."""
        path = self.folder / f"{engine}.parquet"
        if not path.exists():
            pq.write_table(pa.Table.from_pylist(self.rows(engine)), path, row_group_size=_ROW_GROUP)
        return path

    def options(self, engine: EngineKind, tensor_parallel: int = 1) -> dict[str, Any]:
        """The job, but for its files, its output and where it runs. Groups do not serve mode `exact`; compiled kernels
        give the rows of this model the same bits in any company all the same.
        """
        return {
            "max_tokens": _MAX_TOKENS[engine],
            "batch_rows": _BATCH_ROWS[engine],
            "mode": "exact" if tensor_parallel == 1 else "unmerged",
            "engine_threads": 1,
            "tensor_parallel": tensor_parallel,
            **({"stages": json.dumps(_STAGES)} if engine == "staged" else {"row_settings": "all"}),
        }

    def num_parts(self, scenario: Scenario) -> int:
        """Parts of a finished job, when every shard is full."""
        return _NUM_ROWS[scenario.engine] // scenario.rows_per_shard

    def max_tokens(self, engine: EngineKind) -> int:
        """Tokens asked of every row."""
        return _MAX_TOKENS[engine]

    def command_line(self, engine: EngineKind) -> list[str]:
        """What follows `python` to get the command line with these engines."""
        return ["-m", "lorabatch"] if engine == "real" else [str(_ECHO_FOLDER / "echo_cli.py")]

    def environment(self) -> dict[str, str]:
        """Processes find the echo engine and the code under test."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ECHO_FOLDER), os.environ.get("PYTHONPATH", "")])}

    def undisturbed_digest(self, engine: EngineKind, tensor_parallel: int = 1) -> str:
        """Hash of the sorted output of a run that nothing disturbs: one worker, made once."""
        key = (engine, tensor_parallel)
        if key not in self._digests:
            output = self.folder / f"undisturbed-{engine}-{tensor_parallel}"
            if not (output / "_SUCCESS").exists():
                self._run_undisturbed(engine, self.options(engine, tensor_parallel) | {"output": output})
            self._digests[key] = digest(output)
        return self._digests[key]

    def undisturbed_rows(self, engine: EngineKind, tensor_parallel: int = 1) -> dict[int, dict[str, Any]]:
        """The same run's rows by their ids."""
        self.undisturbed_digest(engine, tensor_parallel)
        table = sorted_output(self.folder / f"undisturbed-{engine}-{tensor_parallel}")
        return {row["id"]: row for row in table.to_pylist()}

    def _run_undisturbed(self, engine: EngineKind, options: dict[str, Any]) -> None:
        options |= {"model": self.model, "adapters": self.adapters, "input": self.input(engine)}
        options |= {"workers": 1, "rows_per_shard": 64}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, *self.command_line(engine), "run", *words]
        subprocess.run(command, env=self.environment(), check=True, capture_output=True, timeout=_UNDISTURBED_LIMIT_S)
