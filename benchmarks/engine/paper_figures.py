"""Figures of the papers that an engine on CPUs can answer, on the demo's base model of 135 million parameters.

python -m lorabatch.benchmarks.engine.paper_figures [--only NAME …] [--threads 1] [--processor-seconds]
    [--save RESULT.json]

Names are those of `EXPERIMENTS`; `docs/internals/papers.md` says what each paper shows. Adapters are random. Seconds of
a step are medians over steps; those of the things that are compared alternate.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lorabatch.benchmarks.engine.systems import run_peft_merged, run_peft_mixed
from lorabatch.benchmarks.engine.workload import BenchRow, EngineWorkload
from lorabatch.benchmarks.provenance import provenance
from lorabatch.demo.base_model import base_model_folder
from lorabatch.engine.config import EngineConfig, Mode, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.engine.request import Request, SamplingParams

RANKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the experiments are."""

    #: Folder of the base model.
    model: Path
    #: CPU threads of an engine; members of a group have one each.
    threads: int = 1
    #: Rows of a batch.
    batch_rows: int = 64
    #: Rows of the experiments that count throughput.
    rows: int = 1000
    #: Tokens of an answer where throughput is counted.
    output_tokens: int = 8
    #: Numbers of adapters in S-LoRA's table of throughput.
    adapters: tuple[int, ...] = (1, 10, 100, 1000)
    #: Most adapters that PEFT is measured with, on a fifth of the rows.
    peft_adapters: int = 10
    #: Prompt lengths of LoRAServe's figure 3.
    prompts: tuple[int, ...] = (250, 500, 1000, 2000)
    #: Passes of each thing that is compared, of which medians are taken.
    turns: int = 3
    #: Clock of all seconds but those of switches and of PEFT.
    clock: Callable[[], float] = time.perf_counter


class Rig:
    """One engine, which serves lists of rows. Its weights and its adapters' are random, if not `load_format`."""

    def __init__(self, scale: Scale, *, batcher: str | None = None, batch_rows: int | None = None, **more: Any) -> None:
        options: dict[str, Any] = {"load_format": "dummy", "num_threads": scale.threads, "uses_prefix_cache": False}
        mode: Mode = "unmerged" if batcher in (None, "s-lora") else "auto"
        rows = batch_rows or scale.batch_rows
        config = EngineConfig(mode=mode, batcher=batcher, max_batch_rows=rows, **(options | more))
        self.engine, self._clock = Engine(scale.model, config, clock=scale.clock), scale.clock
        self._turns = scale.turns
        self._count = 0

    def adapter(self, rank: int, number: int = 0) -> str:
        """Id of a made-up adapter."""
        return self.engine.register_dummy_adapter(f"{rank}-{number}", rank)

    def requests(self, adapters: Sequence[str | None], prompt_tokens: int, output_tokens: int) -> list[Request]:
        """One row for each entry of `adapters` (None: the base model), with prompts of their own."""
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        vocabulary, made = self.engine.model.vocab_size - 100, []
        for adapter in adapters:
            self._count += 1
            prompt = tuple((self._count * 7919 + place * 104_729) % vocabulary + 100 for place in range(prompt_tokens))
            made.append(Request(str(self._count), prompt, adapter, sampling))
        return made

    def serve(self, requests: Sequence[Request]) -> tuple[float, dict[str, float], list[float]]:
        """Seconds for all rows, seconds until each is done by id, and those of steps in which all of them decode."""
        done, decoding, start_s = {}, [], self._clock()
        self.engine.add(requests)
        while self.engine.num_unfinished:
            before = self.engine.telemetry()
            began_s = self._clock()
            results = self.engine.step()
            now_s = self._clock()
            if before.num_running == len(requests) and not before.num_prefilling:
                decoding.append(now_s - began_s)
            for result in results:
                assert result.error is None, result.error
                done[result.request_id] = now_s - start_s
        return self._clock() - start_s, done, decoding

    def seconds_of(
        self, kinds: Mapping[str, Sequence[str | None]], prompt_tokens: int, output_tokens: int
    ) -> dict[str, float]:
        """Median seconds of batches, which take turns after a first one: of a step in which all rows decode, or of the
        whole batch where rows have one token.
        """
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(1 + self._turns):
            for kind, adapters in kinds.items():
                whole_s, _, decoding = self.serve(self.requests(adapters, prompt_tokens, output_tokens))
                if turn:
                    seconds[kind].append(whole_s if output_tokens == 1 else median(decoding))
        return {kind: median(each) for kind, each in seconds.items()}

    def close(self) -> None:
        """End the engine's processes, if it has any."""
        self.engine.close()


def dlora_2a(scale: Scale) -> list[dict[str, Any]]:
    """dLoRA, figure 2a: one row of adapter A and two of B, a batch of three. PEFT serves them one type at a time."""
    found = []
    for name, batcher in (("PEFT (one type at a time)", "merged-only"), ("unmerged", "s-lora")):
        with closing(Rig(scale, batcher=batcher, batch_rows=3)) as rig:
            a, b = rig.adapter(8, 0), rig.adapter(8, 1)
            rig.serve(rig.requests([a, b, b], 64, 4))
            b_s, used = [], 0.0
            for _ in range(scale.turns):
                asked = rig.requests([a, b, b], 64, 64)
                before = rig.engine.telemetry()
                _, done, _ = rig.serve(asked)
                after = rig.engine.telemetry()
                b_s.append(max(done[request.request_id] for request in asked[1:]))
                used = 3 * 64 / (3 * (after.num_steps - before.num_steps))
            found.append(
                {"system": name, "places used": round(used, 2), "seconds until B is done": round(median(b_s), 2)}
            )
    return found


def dlora_5(scale: Scale) -> list[dict[str, Any]]:
    """dLoRA, figure 5: the adapters' share of a step beside the base model's, rank 8."""
    found = []
    with closing(Rig(scale)) as rig:
        rows = scale.batch_rows
        many = [rig.adapter(8, number) for number in range(rows)]
        kinds: dict[str, list[str | None]] = {
            "base": [None] * rows,
            "one adapter": [many[0]] * rows,
            "an adapter a row": [*many],
        }
        for phase, prompt, output in (("decode", 16, 24), ("prefill", 128, 1)):
            seconds = rig.seconds_of(kinds, prompt, output)
            base_s = seconds["base"]
            found += [
                {"phase": phase, "rows": kind, "of the base": f"{seconds[kind] / base_s - 1:+.1%}"}
                for kind in ("one adapter", "an adapter a row")
            ]
    return found


def dlora_15(scale: Scale) -> list[dict[str, Any]]:
    """dLoRA, figure 15: the share of serving that switching takes under dLoRA's batching, 8 adapters, skewed."""
    # Engines count switches by the clock on the wall.
    with closing(Rig(replace(scale, clock=time.perf_counter), batcher="dlora")) as rig:
        adapters = [rig.adapter(8, number) for number in range(8)]
        rows = max(8, 2 * scale.rows // 5)
        # Half of the rows are of the first two adapters, in an order that mixes them.
        order = [adapters[int(8 * (place * 0.618 % 1) ** 2)] for place in range(rows)]
        rig.serve(rig.requests(adapters, 16, 2))
        before_s, before = rig.engine.switching_s, rig.engine.num_switches
        seconds, _, _ = rig.serve(rig.requests(order, 16, 16))
        switching_s = rig.engine.switching_s - before_s
    return [
        {
            "switches": rig.engine.num_switches - before,
            "seconds": round(seconds, 1),
            "switching": f"{switching_s / seconds:.1%}",
        }
    ]


def slora_3(scale: Scale) -> list[dict[str, Any]]:
    """S-LoRA, figure 3: merging one adapter after the other beside computing all unmerged, rank 8."""
    found = []
    rows = max(64, scale.rows // 5)
    for num_adapters in (1, 2, 8, 32):
        line: dict[str, Any] = {"adapters": num_adapters}
        for name, batcher in (("merged", "merged-only"), ("unmerged", "s-lora")):
            with closing(Rig(scale, batcher=batcher)) as rig:
                adapters = [rig.adapter(8, number) for number in range(num_adapters)]
                rig.serve(rig.requests(adapters, 16, 2))
                order = [adapters[place % num_adapters] for place in range(rows)]
                line[f"{name}, tokens/s"] = round(rows * 16 / rig.serve(rig.requests(order, 16, 16))[0], 1)
        found.append(line)
    return found


def slora_throughput(scale: Scale, ranks: Sequence[int] = (8,)) -> list[dict[str, Any]]:
    """S-LoRA, table of throughput: the same rows of the base model and of 1 to 1,000 adapters, which are in files at
    first; PEFT, merged and by mixed batches, on a fifth of the rows.
    """
    found = []
    model = read_model_config(scale.model)
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        folders = [
            write_random_adapter(Path(scratch) / f"a{i}", model, ranks[i % len(ranks)], seed=i, dtype=torch.bfloat16)
            for i in range(max(scale.adapters))
        ]
        for number in (0, *scale.adapters):
            with closing(Rig(scale, batcher="s-lora", load_format="auto", pool_bytes=2 << 30)) as rig:
                ids: list[str | None] = [_register(rig.engine, folder) for folder in folders[:number]] or [None]
                rig.serve(rig.requests([None] * 4, 16, 2))
                order = [ids[place % len(ids)] for place in range(scale.rows)]
                seconds = rig.serve(rig.requests(order, 16, scale.output_tokens))[0]
                loads = rig.engine.telemetry().adapters.loads
            line: dict[str, Any] = {"adapters": number, "rows/s": round(scale.rows / seconds, 2), "loads": loads}
            if 0 < number <= scale.peft_adapters:
                line |= _peft(folders[:number], scale)
            found.append(line)
    for line in found:
        line["of the base"] = f"{line['rows/s'] / found[0]['rows/s']:.1%}"
    return found


def slora_7(scale: Scale) -> list[dict[str, Any]]:
    """S-LoRA, figure 7: what adapters of ranks 16 to 64 add to a decoding step, with this engine's ragged kernel and
    with torch's batched products of weights that are gathered and padded to the largest rank (S-LoRA-bmm).
    """
    found = []
    rows, ranks = scale.batch_rows, (64, 32, 16)
    shapes = [s for n, s in read_model_config(scale.model).linear_shapes().items() if n != "lm_head"]
    with closing(Rig(scale)) as rig:
        adapters = [rig.adapter(ranks[number % 3], number) for number in range(rows)]
        for number in (1, 8, rows):
            order = [adapters[place % number] for place in range(rows)]
            steps: dict[str, list[float]] = {"base": [], "adapters": []}
            for turn in range(1 + scale.turns):
                for kind, asked in (("base", [None] * rows), ("adapters", order)):
                    decoding = rig.serve(rig.requests(asked, 16, 16))[2]
                    steps[kind] += decoding if turn else []
            base_s, with_s = median(steps["base"]), median(steps["adapters"])
            bmm_s = _padded_bmm_s(shapes, number, max(ranks), scale)
            found.append(
                {
                    "adapters": number,
                    "base step, ms": round(1e3 * base_s, 1),
                    "adapters add, ms": round(1e3 * (with_s - base_s), 1),
                    "padded bmm would add, ms": round(1e3 * bmm_s, 1),
                }
            )
    return found


def loraserve_1(scale: Scale) -> list[dict[str, Any]]:
    """LoRAServe, figure 1: a batch of ranks 8 and 128, half each, beside batches of one rank. Excess over their mean: 0
    where each row costs its own rank; where kernels run at the largest rank, what the last line says.
    """
    rows, found = scale.batch_rows, []
    with closing(Rig(scale)) as rig:
        small, large = ([rig.adapter(rank, number) for number in range(8)] for rank in (8, 128))
        kinds: dict[str, list[str | None]] = {
            "rank 8": [small[place % 8] for place in range(rows)],
            "rank 128": [large[place % 8] for place in range(rows)],
            "half each": [(small, large)[place % 2][place // 2 % 4] for place in range(rows)],
        }
        for phase, prompt, output in (("decode", 16, 24), ("prefill", 128, 1)):
            seconds = rig.seconds_of(kinds, prompt, output)
            small_s, large_s, mixed_s = (seconds[kind] for kind in kinds)
            mean_s = (small_s + large_s) / 2
            found.append(
                {
                    "phase": phase,
                    "rank 128 over rank 8": round(large_s / small_s, 3),
                    "half each, excess": f"{mixed_s / mean_s - 1:+.1%}",
                    "excess at the largest rank": f"{large_s / mean_s - 1:+.1%}",
                }
            )
    return found


def loraserve_3(scale: Scale, members: int = 1) -> list[dict[str, Any]]:
    """LoRAServe, figure 3: one row alone, by rank and prompt: seconds to its first token, and between tokens."""
    more: dict[str, Any] = {"tensor_parallel": members} if members > 1 else {}
    found = []
    with closing(Rig(scale, batch_rows=1, **more)) as rig:
        adapters = {rank: rig.adapter(rank) for rank in RANKS}
        rig.serve(rig.requests([adapters[8]], 16, 4))
        for prompt in scale.prompts:
            first: dict[int, list[float]] = {rank: [] for rank in RANKS}
            between: dict[int, list[float]] = {rank: [] for rank in RANKS}
            for turn in range(1 + scale.turns):
                for rank, adapter in adapters.items():
                    whole_s, _, decoding = rig.serve(rig.requests([adapter], prompt, 9))
                    if turn:
                        first[rank].append(whole_s - sum(decoding))
                        between[rank].append(median(decoding))
            line: dict[str, Any] = {
                "members": members,
                "prompt": prompt,
                "rank 8, first token, s": round(median(first[8]), 3),
            }
            line |= {f"rank {rank}": round(median(first[rank]) / median(first[8]), 3) for rank in RANKS[1:]}
            line["rank 128, between tokens"] = round(median(between[128]) / median(between[8]), 3)
            found.append(line)
    return found


def loraserve_5(scale: Scale) -> list[dict[str, Any]]:
    """LoRAServe, figure 5: first tokens by rank relative to rank 8, by members of a tensor-parallel group."""
    longest = replace(scale, prompts=scale.prompts[-1:])
    return [line for members in (1, 2) for line in loraserve_3(longest, members)]


def _register(engine: Engine, folder: Path) -> str:
    identity = audit_adapter(folder, engine.model, folder.name).identity_sha256
    assert identity is not None, f"{folder.name} is refused"
    engine.register_adapter(identity, folder)
    return identity


def _peft(folders: Sequence[Path], scale: Scale) -> dict[str, float]:
    """PEFT's rows per second."""
    rows = [
        BenchRow(
            [(place * 7919 + i * 104_729) % 40_000 + 100 for i in range(16)],
            folders[place % len(folders)].name,
            scale.output_tokens,
        )
        for place in range(scale.rows // 5)
    ]
    workload = EngineWorkload(str(scale.model), {folder.name: str(folder) for folder in folders}, rows)
    torch.set_num_threads(scale.threads)
    return {
        name: round(len(rows) / run(workload)[0], 2)
        for name, run in (("PEFT merged, rows/s", run_peft_merged), ("PEFT mixed, rows/s", run_peft_mixed))
    }


def _padded_bmm_s(shapes: Sequence[tuple[int, ...]], num_adapters: int, rank: int, scale: Scale) -> float:
    """Seconds in which torch gathers the padded weights of each row's adapter and multiplies, for one step."""
    torch.set_num_threads(scale.threads)
    rows = scale.batch_rows
    weights = {
        (n_out, n_in): (
            torch.randn(num_adapters, n_in, rank),
            torch.randn(num_adapters, rank, n_out),
            torch.randn(rows, 1, n_in),
        )
        for n_out, n_in in set(shapes)
    }
    of_row, taken = torch.arange(rows) % num_adapters, []
    for _ in range(1 + scale.turns):
        began_s = scale.clock()
        for shape in shapes:
            a, b, x = weights[shape[0], shape[1]]
            torch.bmm(torch.bmm(x, a[of_row]), b[of_row])
        taken.append(scale.clock() - began_s)
    return median(taken[1:])


EXPERIMENTS: Mapping[str, Callable[[Scale], list[dict[str, Any]]]] = {
    "dlora-2a": dlora_2a,
    "dlora-5": dlora_5,
    "dlora-15": dlora_15,
    "slora-3": slora_3,
    "slora-throughput": slora_throughput,
    "slora-7": slora_7,
    "loraserve-1": loraserve_1,
    "loraserve-3": loraserve_3,
    "loraserve-5": loraserve_5,
}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown table with a column for each key of any line."""
    keys = list(dict.fromkeys(key for line in lines for key in line))
    head = [f"| {' | '.join(keys)} |", f"|{'---:|' * len(keys)}"]
    return "\n".join([*head, *(f"| {' | '.join(str(line.get(key, '-')) for key in keys)} |" for line in lines)])


def main() -> None:
    """Parse, measure, print as it goes, save."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.engine.paper_figures", description=__doc__)
    usual = Scale(base_model_folder())
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--threads", type=int, default=usual.threads)
    parser.add_argument("--rows", type=int, default=usual.rows, help="rows where throughput is counted")
    parser.add_argument("--batch-rows", type=int, default=usual.batch_rows)
    parser.add_argument("--adapters", type=int, nargs="+", default=list(usual.adapters))
    parser.add_argument("--peft-adapters", type=int, default=usual.peft_adapters)
    parser.add_argument("--prompts", type=int, nargs="+", default=list(usual.prompts))
    parser.add_argument("--processor-seconds", action="store_true", help="for machines that others use; not PEFT's")
    parser.add_argument("--save", type=Path, help="JSON file")
    chosen = parser.parse_args()
    scale = replace(
        usual,
        threads=chosen.threads,
        batch_rows=chosen.batch_rows,
        rows=chosen.rows,
        adapters=tuple(chosen.adapters),
        peft_adapters=chosen.peft_adapters,
        prompts=tuple(chosen.prompts),
        clock=time.process_time if chosen.processor_seconds else time.perf_counter,
    )
    found: dict[str, Any] = {}
    for name in chosen.only:
        began_s = time.perf_counter()
        found[name] = EXPERIMENTS[name](scale)
        print(f"{name}, {time.perf_counter() - began_s:.0f} s\n{table(found[name])}\n", flush=True)
        if chosen.save:
            facts: dict[str, Any] = provenance(["torch", "transformers", "peft"])
            chosen.save.write_text(json.dumps(facts | {"found": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
