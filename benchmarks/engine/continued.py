"""`python -m lorabatch.benchmarks.engine.continued [FILE]`: conversations of three turns, with pages of
finished rows kept and without.

Prompts have 1,000 tokens and are rendered anew for each turn: by the model's own chat template, whose rendering extends
the one before, and by one that drops the reasoning of earlier answers. Both ways take turns on the same rows. What
counts are the seconds of the second and third turn, decoding included.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lorabatch.benchmarks.provenance import provenance
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.peft import audit_adapter
from lorabatch.engine.peft.random import write_random_adapter
from lorabatch.engine.request import Request, Result, SamplingParams
from lorabatch.engine.text.chat.chat_template import ChatTemplate
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer

PROMPT_TOKENS, RANK = 1000, 16
TURNS = ("Summarise the text.", "Shorter, please.", "And now in one sentence.")
#: Rows at once, and tokens of each answer.
SHAPES = ((1, 32), (1, 128), (4, 32))
# Tokens of the first prompt around its text.
_AROUND_TOKENS = 40
_END_OF_REASONING = "</think>"
_DROPS_REASONING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_WORDS = (  # noqa: SIM905
    "river mountain letter engine window garden summer number market winter village teacher station picture bridge "
    "island doctor forest evening harbour kitchen silver morning question paper travel captain"
).split()


@dataclass(frozen=True, slots=True)
class Run:
    """All turns of some rows."""

    #: Seconds of the second and the third turn together.
    seconds: float
    #: Processor time in these, which other work on the machine hardly changes.
    processor_s: float
    #: Share of the prompt tokens of these turns that were reused.
    reused: float
    #: Results of these turns, in order.
    results: list[Result]


class Conversations:
    """Rows over one base model and one adapter. `template`: renders their prompts."""

    def __init__(self, model: Path, adapter: Path, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._model = model
        self._adapter = adapter
        self._tokenizer = tokenizer
        self._template = template

    def run(self, num_rows: int, answer_tokens: int, *, keeps: bool) -> Run:
        """Serve all rows turn by turn. `keeps`: whether requests say that they will be continued."""
        engine = Engine(self._model, EngineConfig(mode="unmerged"))
        adapter_id = audit_adapter(self._adapter, engine.model, "adapter").identity_sha256
        assert adapter_id is not None
        engine.register_adapter(adapter_id, self._adapter)
        sampling = SamplingParams(max_tokens=answer_tokens, min_tokens=answer_tokens, logprobs=True)
        messages = [[{"role": "user", "content": self._document(row)}] for row in range(num_rows)]
        results: list[Result] = []
        seconds = processor_s = 0.0
        for turn, question in enumerate(TURNS):
            requests = []
            for row, said in enumerate(messages):
                said[-1:] = [{"role": "user", "content": f"{said[-1]['content']}\n\n{question}".strip()}]
                will_continue = keeps and turn + 1 < len(TURNS)
                requests.append(
                    Request(
                        f"{row}.{turn}",
                        self._tokens(said),
                        adapter_id,
                        sampling,
                        will_continue=will_continue,
                        is_continuation=keeps and turn > 0,
                    )
                )
            began_s, began_processor_s = time.perf_counter(), time.process_time()
            found = {result.request_id: result for result in engine.run(requests)}
            if turn:
                seconds += time.perf_counter() - began_s
                processor_s += time.process_time() - began_processor_s
            answers = [found[request.request_id] for request in requests]
            results += answers if turn else []
            for said, answer in zip(messages, answers, strict=True):
                middle = len(answer.text) // 2
                text = f"{answer.text[:middle]}{_END_OF_REASONING}{answer.text[middle:]}"
                said += [{"role": "assistant", "content": text}, {"role": "user", "content": ""}]
        reused = sum(result.reused_prompt_tokens or 0 for result in results)
        return Run(seconds, processor_s, reused / sum(result.prompt_tokens for result in results), results)

    def _document(self, row: int) -> str:
        """A text with which the first prompt has some `PROMPT_TOKENS`."""
        text = " ".join(random.Random(row).choices(_WORDS, k=PROMPT_TOKENS))
        (token_ids,) = self._tokenizer.encode_batch([text], is_rendered=True)
        return self._tokenizer.decode(token_ids[: PROMPT_TOKENS - _AROUND_TOKENS])

    def _tokens(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        if self._template.given[0] != _DROPS_REASONING:
            messages = [said | {"content": said["content"].replace(_END_OF_REASONING, "")} for said in messages]
        (token_ids,) = self._tokenizer.encode_batch([self._template.render(messages)], is_rendered=True)
        return tuple(token_ids)


def main(repeats: int = 3, result_path: Path | None = None) -> dict[str, Any]:
    """Run the benchmark, print its result, and save it if asked."""
    from lorabatch.demo.base_model import base_model_folder

    model = base_model_folder()
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer.chat_template is not None, f"{model} has no chat template"
    templates = {
        "extends": tokenizer.chat_template,
        "drops reasoning": ChatTemplate(_DROPS_REASONING, tokenizer.special_tokens),
    }
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lorabatch-bench-") as scratch:
        config = Engine(model, EngineConfig(load_format="dummy", pool_bytes=1 << 20)).model
        adapter = write_random_adapter(Path(scratch) / "adapter", config, RANK, seed=0)
        for name, template in templates.items():
            conversations = Conversations(model, adapter, tokenizer, template)
            for shape in SHAPES:
                runs: dict[bool, list[Run]] = {True: [], False: []}
                for _ in range(repeats):
                    for keeps, of_kind in runs.items():
                        of_kind.append(conversations.run(*shape, keeps=keeps))
                found.append({"template": name, "rows": shape[0], "answer_tokens": shape[1]} | _compared(runs))
                print(json.dumps(found[-1]), flush=True)
    result = {
        "benchmark": "continued rows",
        **provenance(["torch"]),
        "threads": torch.get_num_threads(),
        "model": model.name,
        "prompt_tokens": PROMPT_TOKENS,
        "conversations": found,
    }
    if result_path is not None:
        result_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _compared(runs: dict[bool, list[Run]]) -> dict[str, Any]:
    kept, computed = runs[True], runs[False]
    seconds = {kind: statistics.median(run.seconds for run in of_kind) for kind, of_kind in runs.items()}
    processor = {kind: statistics.median(run.processor_s for run in of_kind) for kind, of_kind in runs.items()}
    pairs = list(zip(kept[-1].results, computed[-1].results, strict=True))
    differences = [
        abs(one - other)
        for a, b in pairs
        if a.token_ids == b.token_ids
        for one, other in zip(a.token_logprobs or (), b.token_logprobs or (), strict=True)
    ]
    return {
        "seconds_kept": [round(run.seconds, 2) for run in kept],
        "seconds_computed": [round(run.seconds, 2) for run in computed],
        "times_faster": round(seconds[False] / seconds[True], 2),
        "processor_s_kept": [round(run.processor_s, 2) for run in kept],
        "processor_s_computed": [round(run.processor_s, 2) for run in computed],
        "times_less_processor_time": round(processor[False] / processor[True], 2),
        "reused": round(kept[-1].reused, 3),
        "answers_equal": f"{sum(a.token_ids == b.token_ids for a, b in pairs)} of {len(pairs)}",
        "largest_logprob_difference": max(differences, default=None),
    }


if __name__ == "__main__":
    main(result_path=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
