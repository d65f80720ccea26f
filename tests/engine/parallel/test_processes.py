"""Members as processes: what is left of a group when one of them is lost, and how much memory each takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from echo_job import wait_until
from peft_oracle import make_engine, prompts, serve
from safetensors.torch import load_file, save_file

from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.parallel.backend import GroupBackend
from lorabatch.engine.parallel.members import GroupMembers, start_process
from lorabatch.engine.request import Request, SamplingParams


def rows_of(engine: Engine) -> list[Request]:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    return [Request(str(i), p, None, sampling) for i, p in enumerate(prompts(4, engine.model.vocab_size))]


@pytest.mark.long
@pytest.mark.parametrize("num_members", [2, 3])
def test_a_lost_member_is_named_and_the_others_end(tiny_llama: Path, num_members: int) -> None:
    """The last one is stopped first, which is seen; then it is killed while the leader waits for it."""
    engine = make_engine(tiny_llama, tensor_parallel=num_members, num_threads=num_members)
    backend = engine.backend
    assert isinstance(backend, GroupBackend)
    pids = backend.members.pids
    expected = serve(make_engine(tiny_llama), rows_of(engine))
    found = serve(engine, rows_of(engine))
    assert {key: result.token_ids for key, result in found.items()} == {
        key: result.token_ids for key, result in expected.items()
    }
    assert engine.hung_process is None
    name = f"member {num_members - 1} of {num_members} of the tensor-parallel group"
    os.kill(pids[-1], signal.SIGSTOP)
    wait_until(lambda: engine.hung_process is not None)
    assert engine.hung_process == name
    os.kill(pids[-1], signal.SIGKILL)
    engine.add(rows_of(engine))
    with pytest.raises(RuntimeError, match=f"{name} ended: it was killed by signal 9"):
        engine.step()
    engine.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_member_that_is_stopped_before_it_has_loaded_is_given_up(tiny_llama: Path) -> None:
    """The leader waits for it without heartbeats of its own to hold back."""

    def start_stopped(config: EngineConfig, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
        process = start_process(config, inherited)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    members = GroupMembers(tiny_llama, [EngineConfig(tensor_parallel=2, num_threads=1)] * 2, start_stopped)
    with pytest.raises(RuntimeError, match=r"member 1 of 2 .* gave no sign of life for 1 s"):
        members.wait_until_ready(silence_s=1.0)
    members.close()
    assert not any(psutil.pid_exists(pid) for pid in members.pids)


LEADER = """
import sys, time
from pathlib import Path
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
engine = Engine(Path(sys.argv[1]), EngineConfig(tensor_parallel=2, num_threads=2, pool_bytes=1 << 20))
print(*engine.backend.members.pids, flush=True)
time.sleep(3600)
"""


@pytest.mark.long
def test_members_end_with_their_leader_even_when_they_are_stopped(tiny_llama: Path) -> None:
    leader = subprocess.Popen([sys.executable, "-c", LEADER, str(tiny_llama)], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    (pid,) = map(int, leader.stdout.readline().split())
    member = psutil.Process(pid)
    member.suspend()
    leader.kill()
    leader.wait()
    leader.stdout.close()
    psutil.wait_procs([member], timeout=60)
    assert not member.is_running() or member.status() == psutil.STATUS_ZOMBIE


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.request import Request, SamplingParams

def data_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024

folder, processes, more = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.zeros(8, 8) @ torch.zeros(8, 8)
limit = data_bytes() + more
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
config = EngineConfig(
    tensor_parallel=processes, num_threads=1, pool_bytes=4 << 20, max_step_tokens=64, host_tier_bytes=0
)
engine = Engine(folder, config)
result, = engine.run([Request("0", (5, 6, 7), None, SamplingParams(max_tokens=4, ignore_eos=True))])
print(json.dumps([result.error, len(result.token_ids), getattr(engine.backend, "weight_bytes_of", None)]))
engine.close()
"""


def split_by_layer(folder: Path) -> None:
    """Store a model in a file for each layer and one for the rest, as large ones are."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        files.setdefault(f"model-{parts[2] if parts[1] == 'layers' else 'rest'}.safetensors", {})[name] = tensor
    for file, held in files.items():
        save_file(held, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.long
def test_a_model_that_does_not_fit_into_one_process_runs_in_two(make_model: object, tmp_path: Path) -> None:
    """Weights of 370 MB in several files, and room for 400 MB in each process, 128 of which it wants
    to read a tokenizer."""
    assert callable(make_model)
    base = make_model(
        tmp_path / "base", hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8
    )
    weights = (base / "model.safetensors").stat().st_size
    assert weights > 350e6
    split_by_layer(base)
    answers = {}
    for processes in (1, 2):
        command = [sys.executable, "-c", LIMITED, str(base), str(processes), str(400 << 20)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        answers[processes] = done
    assert answers[1].returncode != 0
    assert "memory" in answers[1].stderr.lower()
    assert answers[2].returncode == 0, answers[2].stderr
    error, num_tokens, shares = json.loads(answers[2].stdout)
    assert (error, num_tokens) == (None, 4)
    assert all(share < 0.55 * weights for share in shares)
