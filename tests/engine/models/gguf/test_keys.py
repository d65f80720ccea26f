"""Every metadata key and kind of quantisation of GGUF is accounted for, and what a file asks for is done or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf.constants
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from lorabatch.engine.config import unknown_config_keys
from lorabatch.engine.errors import EngineError
from lorabatch.engine.models.gguf.checks import check_convertible
from lorabatch.engine.models.gguf.config import model_config
from lorabatch.engine.models.gguf.file import GgufFile, open_gguf
from lorabatch.engine.models.gguf.keys import KEYS, key_of
from lorabatch.system.gguf import KINDS_NOT_READ, KINDS_READ
from lorabatch.system.long_work import LongWork, listening

ROOT = Path(__file__).parents[4]
HIDDEN, HEADS, VOCABULARY = 64, 4, 258
_HEAD_NORMS = {f"attn_{site}_norm.weight": HIDDEN // HEADS for site in "qk"}
_SANDWICH_NORMS = dict.fromkeys(("post_attention_norm.weight", "post_ffw_norm.weight"), HIDDEN)
# Tensors of a block that Llama's lack, and their sizes.
OTHERS: dict[str, dict[str, int]] = {
    "qwen2": {f"attn_{site}.bias": HIDDEN for site in "qkv"},
    "qwen3": _HEAD_NORMS,
    "gemma2": _SANDWICH_NORMS,
    "gemma3": _SANDWICH_NORMS | _HEAD_NORMS,
}


def keys_of_gguf() -> set[str]:
    """Every key in gguf-py's constants."""
    groups = [group for group in vars(gguf.constants.Keys).values() if isinstance(group, type)]
    return {
        value
        for group in groups
        for name, value in vars(group).items()
        if isinstance(value, str) and not name.startswith("_")
    }


@pytest.mark.reference("gguf")
def test_every_key_of_gguf_is_classified(unclassified: Callable[[Iterable[str]], None]) -> None:
    found = keys_of_gguf()
    assert len(found) > 200
    # clip: another architecture's, which is refused by its name
    found = {key for key in found if not key.startswith("clip.")}
    unclassified(found - KEYS.keys() - {"general.base_model.{id}.name"})


def key_table() -> str:
    """The table of docs/reference/gguf.md."""
    saying = {"read": "read", "ignored": "does not matter: ", "refused": "refused: "}
    groups: dict[tuple[str, str, tuple[Any, ...]], list[str]] = {}
    for name, key in KEYS.items():
        groups.setdefault((key.fate, key.why, key.neutral), []).append(name.replace("{arch}.", "*."))
    lines = ["| keys | |", "|---|---|"]
    for (fate, why, neutral), names in groups.items():
        unless = f"; not with the value {' or '.join(map(str, neutral))}" if neutral else ""
        lines.append(f"| {' '.join(f'`{name}`' for name in names)} | {saying[fate]}{why}{unless} |")
    return "\n".join(lines)


def test_the_documented_table_of_keys_is_the_one_that_is_used() -> None:
    assert key_table() in (ROOT / "docs" / "reference" / "gguf.md").read_text("utf-8"), key_table()


@pytest.mark.reference("gguf")
def test_every_kind_of_gguf_is_read_or_known_not_to_be(unclassified: Callable[[Iterable[str]], None]) -> None:
    found = {kind.value: kind.name for kind in GGMLQuantizationType}
    names = {number: name for number, (name, _, _) in KINDS_READ.items()} | dict(KINDS_NOT_READ)
    unclassified(f"{name} ({number})" for number, name in found.items() if names.get(number) != name)
    assert KINDS_READ.keys().isdisjoint(KINDS_NOT_READ)
    for number, (_, block, block_bytes) in KINDS_READ.items():
        assert gguf.constants.GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (block, block_bytes)


def write(
    path: Path,
    architecture: str = "llama",
    kind: GGMLQuantizationType | None = None,
    num_tokens: int = VOCABULARY,
    **keys: Any,
) -> Path:
    """A GGUF file of one layer; `keys`: with `__` for dots, `model__` for the architecture."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(keys.pop("tokenizer__ggml__pre", "gpt-2"))
    writer.add_token_list([f"t{i}" for i in range(num_tokens)])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(VOCABULARY - 1)
    for name, value in keys.items():
        key = name.replace("__", ".").replace("model.", f"{architecture}.", 1)
        add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(key, value)
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    of_block = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_down": (HIDDEN, 128)}
    of_block |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN))
    of_block |= dict.fromkeys(("ffn_gate", "ffn_up"), (128, HIDDEN))
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in of_block.items()}).items():
        numbers = np.ones(shape, np.float32)
        if kind is not None and name == "blk.0.ffn_up":
            writer.add_tensor(f"{name}.weight", numbers.view(np.uint8)[:, :36], raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", numbers)
    for name, size in OTHERS.get(architecture, {}).items():
        writer.add_tensor(f"blk.0.{name}", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path, *more: Any, **keys: Any) -> GgufFile:
    file = open_gguf(write(path, *more, **keys))
    check_convertible(file)
    return file


@pytest.mark.parametrize("architecture", ["llama", *OTHERS, "gemma"])
@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, None),
        ({"model__rope__scaling__factor": 4.0}, 4.0),
        ({"model__rope__scale_linear": 2.5}, 2.5),
        ({"model__rope__scaling__type": "linear", "model__rope__scaling__factor": 8.0}, 8.0),
        ({"model__rope__scaling__type": "linear", "model__rope__scale_linear": 8.0}, 8.0),
        ({"model__rope__scaling__factor": 4.0, "model__rope__scale_linear": 2.0}, 4.0),
        ({"model__rope__scaling__type": "none", "model__rope__scaling__factor": 4.0}, None),
        ({"model__rope__scaling__type": "linear"}, None),
        ({"model__rope__scaling__factor": 0.0}, None),
        ({"model__rope__scaling__factor": 1.0}, None),
    ],
)
def test_positions_are_divided_as_by_llama_cpp(
    keys: dict[str, Any], factor: float | None, architecture: str, tmp_path: Path
) -> None:
    window = {"model__attention__sliding_window": 16} if architecture == "gemma3" else {}
    found = model_config(opened(tmp_path / "m.gguf", architecture, **keys, **window), "float32")["rope_parameters"]
    if architecture == "gemma3":
        assert found["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
        found = found["full_attention"]
    assert (found["rope_type"], found.get("factor")) == ("default" if factor is None else "linear", factor)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model__rope__scaling__type": "longrope"}, r"rope\.scaling\.type='longrope'"),
        (
            {"model__rope__scaling__type": "yarn", "model__rope__scaling__yarn_ext_factor": 0.5},
            r"yarn_ext_factor=0\.5: not supported",
        ),
        ({"model__rope__scaling__yarn_attn_factor": 1.5}, r"yarn_attn_factor=1\.5: not supported without yarn"),
        ({"model__rope__scaling__yarn_log_multiplier": 0.1}, r"yarn_log_multiplier=0\.1"),
        ({"model__attention__temperature_scale": 0.1}, r"temperature_scale=0\.1"),
        ({"model__rope__scaling__factor": -2.0}, r"rope\.scaling\.factor=-2"),
        ({"model__rope__scaling__attn_factor": 1.5}, r"rope\.scaling\.attn_factor=1\.5: not supported"),
        ({"model__rope__scaling__yarn_ext_factor": 1.0}, r"yarn_ext_factor=1\.0: not supported"),
        ({"model__attention__sliding_window": 4096}, r"sliding_window=4096: not supported"),
        ({"model__attention__value_length": 8}, r"value_length=8"),
        ({"model__attention__causal": False}, r"causal=False: not supported \(attention to later tokens\)"),
        ({"model__expert_count": 8}, r"expert_count=8: not supported \(a mixture of experts\)"),
        ({"model__attn_logit_softcapping": 50.0}, r"softcapping=50\.0"),
        ({"model__unheard__of": 1}, r"unheard\.of=1: not supported \(not known here\)"),
        ({"tokenizer__ggml__normalizer__lowercase": True}, "lowercase=True: not supported"),
        ({"tokenizer__ggml__add_eos_token": True}, "add_eos_token=True: not supported"),
        ({"model__attention__head_count_kv": [4, 2]}, "head_count_kv differs by layer"),
        ({"model__feed_forward_length": [128, 128]}, "feed_forward_length differs by layer"),
        ({"model__rope__freq_base": [1.0]}, "freq_base differs by layer"),
        ({"model__rope__dimension_sections": [1, 2]}, "dimension_sections: not supported"),
        ({"general__type": "adapter"}, r"general\.type='adapter'"),
        ({"split__count": 2}, r"split\.count=2: not supported \(one file of several"),
    ],
)
def test_what_a_key_asks_for_and_is_not_done_is_refused_by_name(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=said):
        opened(tmp_path / "m.gguf", **keys)


@pytest.mark.parametrize(
    ("architecture", "keys", "said"),
    [
        ("gemma", {"model__attention__sliding_window": 4096}, r"sliding_window=4096: not supported"),
        ("qwen3", {"model__final_logit_softcapping": 30.0}, r"final_logit_softcapping=30"),
        ("gemma2", {"model__rope__freq_base_swa": 10000.0}, r"freq_base_swa=10000\.0: not supported"),
        ("gemma3", {"model__attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0: not supported"),
        ("gemma2", {"model__attention__sliding_window_pattern": [True]}, "sliding_window_pattern: not supported"),
        (
            "gemma3",
            {"model__attention__sliding_window": 8, "model__attention__sliding_window_pattern": [True, False]},
            "sliding_window_pattern: expected 1 times true or false",
        ),
        ("llama", {"model__embedding_scale": 12.0}, r"embedding_scale=12\.0: not supported"),
        ("llama", {"model__ssm__conv_kernel": 4}, r"conv_kernel=4: not supported"),
        ("gemma3", {}, r"'gemma3\.attention\.sliding_window' is missing"),
    ],
)
def test_keys_of_one_architecture_are_refused_for_others(
    architecture: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=said):
        opened(tmp_path / "m.gguf", architecture, **keys)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "expected"),
    [("gemma2", 26, 32), ("gemma2", 46, 16), ("gemma3", 48, 32), ("gemma3", 62, 16)],
)
def test_the_scale_of_scores_is_known_by_the_number_of_layers(
    architecture: str, num_layers: int, expected: int, tmp_path: Path
) -> None:
    """That of the models of 27B is the width of a head, had all heads together the model's; else a head's own."""
    keys = {"model__attention__key_length": 32, "model__attention__sliding_window": 16}
    file = open_gguf(write(tmp_path / "m.gguf", architecture, **keys))
    file.metadata[f"{architecture}.block_count"] = num_layers
    assert model_config(file, "float32")["query_pre_attn_scalar"] == expected


def test_keys_that_ask_for_nothing_are_passed_over(tmp_path: Path) -> None:
    keys = {
        "model__expert_count": 0, "model__attention__causal": True, "model__logit_scale": 1.0, "general__type": "model",
        "model__vocab_size": 7, "tokenizer__ggml__add_eos_token": False, "general__tags": ["a"], "split__count": 1,
        "general__base_model__0__name": "x", "quantize__imatrix__file": "y", "mamba__ssm__state_size": 4,
        "tokenizer__chat_template__rag": "z", "general__sampling__temp": 0.5,
    }  # fmt: skip
    assert model_config(opened(tmp_path / "m.gguf", **keys), "float32")["vocab_size"] == VOCABULARY
    assert key_of("general.dataset.12.url", "llama").fate == "ignored"
    assert key_of("llama.dense_2_feat_in", "llama").fate == "refused"


def test_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    keys = {"general__motto": "x", "mine__sizes": [3], "quantize__imatrix__file": "y", "mamba__ssm__state_size": 4}
    config = model_config(opened(tmp_path / "m.gguf", **keys), "float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert unknown_config_keys(tmp_path) == ["general.motto", "mine.sizes", "mamba.ssm.state_size"]


def test_all_tokens_that_end_an_answer_end_it(tmp_path: Path) -> None:
    keys = {"tokenizer__ggml__eot_token_id": 5, "tokenizer__ggml__eom_token_id": 6}
    assert model_config(opened(tmp_path / "m.gguf", **keys), "float32")["eos_token_id"] == [VOCABULARY - 1, 5, 6]


@pytest.mark.parametrize(("kind", "number"), [("Q1_0", 41), ("Q8_K", 15), ("I8", 24), ("F64", 28)])
def test_a_kind_that_is_not_read_is_refused_by_its_name(kind: str, number: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", GGMLQuantizationType.Q4_0)
    content = path.read_bytes()
    # the number of the kind stands behind the name and the two sizes
    at = content.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    for written, name in ((number, kind), (4, "Q4_2"), (99, "number 99")):
        path.write_bytes(content[:at] + written.to_bytes(4, "little") + content[at + 4 :])
        with pytest.raises(EngineError, match=rf"blk\.0\.ffn_up\.weight is quantised as {name}"):
            open_gguf(path)


_REFUSED = """
import resource, sys
from pathlib import Path
from lorabatch.engine.errors import EngineError
from lorabatch.engine.models.gguf.converted import resolve_gguf
kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    try:
        resolve_gguf(Path(path), Path(sys.argv[1]))
    except EngineError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kib, "torch" in sys.modules)
"""


def test_refusals_read_no_vocabulary_and_load_no_torch(tmp_path: Path) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("gemma3n", {}, "'gemma3n' is not supported"),
        ("llama", {"model__rope__scaling__type": "longrope"}, "longrope"),
        ("llama", {"tokenizer__ggml__pre": "viking"}, "viking"),
    ]
    paths = [
        write(tmp_path / f"{number}.gguf", architecture, num_tokens=262_144, **keys)
        for number, (architecture, keys, _) in enumerate(refused)
    ]
    # one process for all: its start costs more than they do
    *problems, memory = subprocess.run(
        [sys.executable, "-c", _REFUSED, str(tmp_path / "cache"), *map(str, paths)],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for problem, (_, _, said) in zip(problems, refused, strict=True):
        assert said in problem
    kib, has_torch = memory.split()
    assert has_torch == "False"
    assert int(kib) < 100_000


def test_work_that_takes_long_says_its_size_and_how_far_it_is() -> None:
    lines: list[str] = []
    times = iter([0.0, 1.0, 6.0, 6.0, 7.0])
    with listening(lines.append):
        work = LongWork("copying x", 10_000_000, lambda: next(times))
        work.add(1_000_000)
        work.add(3_000_000)
        work.add(1)
    assert lines == ["copying x (10 MB), once for this machine", "copying x: 40% of 10 MB"]
