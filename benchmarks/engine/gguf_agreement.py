"""Compares greedy tokens of GGUF files with transformers and llama.cpp:
`python -m lorabatch.benchmarks.engine.gguf_agreement FILE.gguf … [--rows 32] [--save FILE]`.

The engine answers 32 prompts with 48 tokens each, in its default configuration. transformers reads the same file,
dequantised to fp32, and gives its logits for the engine's own tokens: how far each is below its likeliest token.
llama.cpp (package xllamacpp) answers as it does for its users, and once more from a file with the same values in fp32,
with a cache in fp32: then it computes what the file stands for. Where its tokens begin to differ from the engine's,
transformers' logits say how far the two tokens are apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from lorabatch.benchmarks.provenance import provenance
from lorabatch.engine.config import EngineConfig
from lorabatch.engine.engine import Engine
from lorabatch.engine.models.gguf.convert import convert_gguf
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.text.tokenizers.tokenizer import Tokenizer

NUM_TOKENS = 48
_SLOTS, _CONTEXT, _LIMIT_S = 8, 256, 1200.0
_TOPICS = ("rivers", "the moon", "bread", "a lost key", "prime numbers", "old maps", "Zürich", "glass")
_FORMS = (
    "Here are three facts about {}:\n1.",
    "Question: What should a child know about {}?\nAnswer:",
    "# Python 3\ndef about(topic):\n    '''Return a sentence about {}.'''\n",
    "The story of {} began in 1987, when",
)
PROMPTS = tuple(form.format(topic) for form in _FORMS for topic in _TOPICS)
Rows = list[list[int]]


def ours(folder: Path, texts: Sequence[str]) -> tuple[Rows, Rows, float]:
    """Token ids of the prompts, the engine's tokens, and its seconds."""
    engine = Engine(folder, EngineConfig(max_batch_rows=len(texts)))
    prompts = [list(ids) for ids in Tokenizer.from_folder(folder).encode_batch(texts, is_rendered=False)]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    results = engine.run([Request(str(row), tuple(ids), None, sampling) for row, ids in enumerate(prompts)])
    answers = {int(result.request_id): list(result.token_ids) for result in results}
    return prompts, [answers[row] for row in range(len(prompts))], time.perf_counter() - began


class _LlamaCpp:
    """llama.cpp's server over a file. `is_exact`: cache and attention in fp32."""

    def __init__(self, path: Path, *, is_exact: bool) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_parallel, parameters.n_ctx = _SLOTS, _SLOTS * _CONTEXT
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = torch.get_num_threads()
        parameters.port, parameters.verbosity = 0, -1
        if is_exact:
            parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(parameters)

    def ids(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        found: list[int] = self._ask("tokenize", {"content": text, "add_special": True, "parse_special": True})[
            "tokens"
        ]
        return found

    def answers(self, prompts: Rows) -> Rows:
        """Greedy tokens of all prompts, several at a time."""
        asked = {"n_predict": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}

        def complete(ids: list[int]) -> list[int]:
            found: list[int] = self._ask("completion", {**asked, "prompt": ids, "cache_prompt": False})["tokens"]
            return found

        with ThreadPoolExecutor(_SLOTS) as pool:
            return list(pool.map(complete, prompts))

    def _ask(self, what: str, values: dict[str, Any]) -> Any:
        request = HttpRequest(f"{self._server.listening_address}/{what}", json.dumps(values).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        with urlopen(request, timeout=_LIMIT_S) as reply:
            return json.load(reply)


def write_dequantised(path: Path, copy: Path) -> None:
    """Write the file once more with all tensors in fp32."""
    reader = GGUFReader(path)
    field = reader.get_field("general.architecture")
    assert field is not None
    writer = GGUFWriter(str(copy), str(field.contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def first_differences(rows: Rows, others: Rows) -> dict[int, int]:
    """Row -> first place at which two systems' tokens differ."""
    found = {}
    for row, (one, other) in enumerate(zip(rows, others, strict=True)):
        places = (place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        if (place := next(places, None)) is not None:
            found[row] = place
    return found


@torch.inference_mode()
def judged(path: Path, texts: Sequence[str], prompts: Rows, answers: Rows, others: dict[str, Rows]) -> dict[str, Any]:
    """transformers' view of the engine's tokens, and of each other system's first other token.

    Margins are differences of logits in fp32. `below`: likeliest token above the engine's where they are not the same.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    same_ids = sum(tokenizer(text)["input_ids"] == ids for text, ids in zip(texts, prompts, strict=True))
    below: list[float] = []
    differing = {name: first_differences(answers, rows) for name, rows in others.items()}
    apart: dict[str, list[dict[str, Any]]] = {name: [] for name in others}
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([prompt + answer[:-1]])
        logits = model(ids, logits_to_keep=len(answer)).logits[0]  # [NUM_TOKENS, vocab_size]
        margins = logits.amax(1) - logits[torch.arange(len(answer)), torch.tensor(answer)]
        below += [float(margin) for margin in margins if margin > 0]
        for name, places in differing.items():
            if row in places:
                place = places[row]
                gap = logits[place, answer[place]] - logits[place, others[name][row][place]]
                apart[name].append({"row": row, "place": place, "ours_above_theirs": round(float(gap), 4)})
    return {
        "prompts_with_the_same_ids": same_ids,
        "places": sum(map(len, answers)),
        "places_with_another_likeliest_token": len(below),
        "margins_there": sorted(round(margin, 5) for margin in below),
        "first_differences": apart,
    }


def compared(path: Path, texts: Sequence[str]) -> dict[str, Any]:
    """The figures of one file."""
    with tempfile.TemporaryDirectory(prefix="lorabatch-gguf-", dir=path.parent) as scratch:
        convert_gguf(path, Path(scratch, "model"))
        prompts, answers, seconds = ours(Path(scratch, "model"), texts)
        gc.collect()
        _say(f"{path.name}: answered by lorabatch in {seconds:.0f} s")
        llama_cpp = _LlamaCpp(path, is_exact=False)
        same_ids = sum(llama_cpp.ids(text) == ids for text, ids in zip(texts, prompts, strict=True))
        others = {"llama.cpp": llama_cpp.answers(prompts)}
        del llama_cpp
        _say(f"{path.name}: answered by llama.cpp")
        write_dequantised(path, Path(scratch, "fp32.gguf"))
        exact = _LlamaCpp(Path(scratch, "fp32.gguf"), is_exact=True)
        others["llama.cpp, fp32"] = exact.answers(prompts)
        del exact
        _say(f"{path.name}: answered by llama.cpp from fp32")
    found = judged(path, texts, prompts, answers, others)
    equal = {name: sum(a == b for a, b in zip(answers, rows, strict=True)) for name, rows in others.items()}
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "rows": len(prompts),
        "seconds_of_lorabatch": round(seconds, 1),
        "llama_cpp_prompts_with_the_same_ids": same_ids,
        "rows_with_equal_tokens": equal,
        "transformers": found,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare each file, print what was found, and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--rows", type=int, default=len(PROMPTS), help="prompts, taken from all forms")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(arguments)
    found = []
    for path in options.files:
        found.append(compared(path.resolve(), PROMPTS[:: len(PROMPTS) // options.rows]))
        print(json.dumps(found[-1], indent=1))
        result = {
            "benchmark": "gguf_agreement",
            **provenance(("torch", "transformers", "gguf", "xllamacpp")),
            "new_tokens": NUM_TOKENS,
            "found": found,
        }
        if options.save:
            options.save.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
