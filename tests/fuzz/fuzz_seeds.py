"""Small valid files of every kind that lorabatch reads, as values and as bytes: what the fuzzer changes."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from lorabatch.engine.config import read_model_config
from lorabatch.engine.model_config.families import FAMILIES
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.model_config.wrappers import WRAPPERS
from lorabatch.jobs.record import (
    AdapterRecord,
    InputFile,
    InputRecord,
    JobRecord,
    JobState,
    ModelRecord,
    WorkerState,
)
from lorabatch.jobs.spec import JobSpec
from lorabatch.scheduler.costs.machines import CPU_SMOLLM2_135M
from lorabatch.scheduler.messages import (
    FoundReplica,
    MigrateRows,
    ReplicaFailed,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaReported,
    ReplicasFound,
    RunShard,
    ShardCommitted,
    ShardFailed,
    Tick,
    UnfinishedRows,
    WorkersSeen,
)
from lorabatch.scheduler.planning.waves import Shard
from lorabatch.scheduler.policies import make_scheduler
from lorabatch.scheduler.settings import SchedulerSettings

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
    "vocab_size": 270,
    "bos_token_id": 256,
    "eos_token_id": [257, 258],
}


def configs() -> list[dict[str, Any]]:
    """A configuration of each family, with the keys that it alone reads, and of each model with images."""
    plain = {key: value for key, value in CONFIG.items() if key not in ("architectures", "rope_scaling")}
    dense = {"num_local_experts": 0, "num_experts": 1, "layer_types": None}
    attention = {"layer_types": ["full_attention"] * 2}
    found = [CONFIG]
    for family in FAMILIES.values():
        own = {key: None for key in family.own_keys if "." not in key}
        named = {family.aliases.get(key, key): value for key, value in plain.items()}
        more = dense | (attention if family.lists_attention else {})
        found.append(own | dict(family.defaults) | named | more | {"model_type": family.name})
    for name, wrapper in WRAPPERS.items():
        axes = {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}} if "qwen" in name else {}
        text = plain | {"model_type": next(iter(wrapper.families)), "head_dim": 8, "hidden_size": 32} | axes
        found.append({"model_type": name, "text_config": text, "vision_config": {"depth": 1}, "image_token_id": 3})
    return found


TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "<|im_end|>", "special": True},
    "pad_token": None,
    "chat_template": [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tools", "template": "-"}],
    "model_max_length": 128,
}
ADAPTER_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj"],
    "exclude_modules": None,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 8},
    "layers_to_transform": [0, 1],
    "layers_pattern": ["layers"],
    "modules_to_save": None,
    "trainable_token_indices": None,
    "lora_dropout": 0.1,
    "inference_mode": True,
    "base_model_name_or_path": None,
}


@cache
def tokenizer_json() -> Any:
    """A byte-level BPE tokenizer as its file has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = ("<s>", "<|im_end|>", "<|im_start|>")
    vocabulary = letters | {text: 256 + i for i, text in enumerate((*special, "he", "ll", "hell", "hello"))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\t", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "$B"], special_tokens=[("<s>", 256)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return json.loads(tokenizer.to_str())


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@cache
def model_files() -> dict[str, bytes]:
    """A model folder without weights."""
    return {
        "config.json": as_json(CONFIG),
        "generation_config.json": as_json({"eos_token_id": [257], "temperature": 0.7}),
        "tokenizer.json": as_json(tokenizer_json()),
        "tokenizer_config.json": as_json(TOKENIZER_CONFIG),
        "special_tokens_map.json": as_json({"unk_token": "<unk>"}),
    }


@cache
def model_folder() -> Path:
    """The same, on disk for as long as this process runs."""
    folder = tempfile.TemporaryDirectory(prefix="lorabatch-fuzz-")
    _KEPT.append(folder)
    for name, data in model_files().items():
        (Path(folder.name) / name).write_bytes(data)
    return Path(folder.name)


_KEPT: list[Any] = []


def model_config() -> ModelConfig:
    return read_model_config(model_folder())


@cache
def adapter_header() -> tuple[Any, bytes]:
    """Header and data of the weights that fit `ADAPTER_CONFIG`."""
    shapes = model_config().linear_shapes()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for module, (out_features, in_features) in shapes.items():
        if module.endswith(("q_proj", "v_proj")):
            for half, shape in (("A", [2, in_features]), ("B", [out_features, 2])):
                values = np.linspace(-1, 1, shape[0] * shape[1], dtype=np.float32).tobytes()
                place = [len(data), len(data) + len(values)]
                name = f"base_model.model.{module}.lora_{half}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": place}
                data += values
    return header, data


def safetensors_file(header: str, data: bytes) -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


@cache
def adapter_files() -> dict[str, bytes]:
    header, data = adapter_header()
    return {
        "adapter_config.json": as_json(ADAPTER_CONFIG),
        "adapter_model.safetensors": safetensors_file(json.dumps(header), data),
    }


MLX_CONFIG: dict[str, Any] = {
    "fine_tune_type": "lora",
    "num_layers": 2,
    "lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "model.embed_tokens"]},
    "model": "mlx-community/x-4bit",
    "use_dora": False,
    "lora_layers": 2,
}


@cache
def mlx_header() -> tuple[Any, bytes]:
    """Header and data of the weights that fit `MLX_CONFIG`."""
    model = model_config()
    shapes: dict[str, list[int]] = {}
    for module, (outputs, inputs) in model.linear_shapes().items():
        if module.endswith("q_proj"):
            shapes |= {f"{module}.lora_a": [inputs, 2], f"{module}.lora_b": [2, outputs]}
    embedding = model.names.embedding
    shapes |= {f"{embedding}.lora_a": [model.vocab_size, 2], f"{embedding}.lora_b": [2, model.hidden_size]}
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        values = np.linspace(-1, 1, size, dtype=np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    return header, data


@cache
def mlx_files() -> dict[str, bytes]:
    header, data = mlx_header()
    weights = safetensors_file(json.dumps(header), data)
    return {"adapter_config.json": as_json(MLX_CONFIG), "adapters.safetensors": weights}


@cache
def gguf_adapter() -> bytes:
    """An adapter in GGUF on queries and values of the first layer."""
    from gguf import GGUFWriter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 4.0)
        for name, outputs in {"attn_q": 16, "attn_v": 8}.items():
            for half, shape in {"a": (2, 16), "b": (outputs, 2)}.items():
                values = np.linspace(-1, 1, shape[0] * shape[1], dtype=np.float32).reshape(shape)
                writer.add_tensor(f"blk.0.{name}.weight.lora_{half}", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


@cache
def pickled_weights() -> bytes:
    """The weights that fit `ADAPTER_CONFIG` as torch pickles them."""
    import torch
    from safetensors.torch import load

    sink = io.BytesIO()
    torch.save(load(adapter_files()["adapter_model.safetensors"]), sink)
    return sink.getvalue()


@cache
def gguf_file() -> bytes:
    """A one-layer Llama as llama.cpp writes it."""
    from gguf import GGUFWriter

    tokens = [token for token, _ in sorted(tokenizer_json()["model"]["vocab"].items(), key=lambda item: item[1])]
    hidden, inner, head = 8, 12, 4
    shapes = {
        "token_embd.weight": (len(tokens), hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (len(tokens), hidden),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (2 * head, hidden),
        "blk.0.attn_k.weight": (head, hidden),
        "blk.0.attn_v.weight": (head, hidden),
        "blk.0.attn_output.weight": (hidden, 2 * head),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(128)
        writer.add_embedding_length(hidden)
        writer.add_feed_forward_length(inner)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_string("tokenizer.ggml.pre", "smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
        writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        writer.add_chat_template(CHAT_TEMPLATE)
        for name, shape in shapes.items():
            writer.add_tensor(name, np.full(shape, 0.5, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


INPUT_TABLE = pa.table(
    {
        "id": ["a", "b", "c", "d"],
        "adapter": ["one", None, "two", "one"],
        "prompt": ["hello", "hello there", "", "é"],
        "temperature": pa.array([0.0, None, 0.5, -1.0], pa.float32()),
        "max_tokens": pa.array([1, 2, None, 2**40]),
        "stop": pa.array([["a"], None, [""], []], pa.list_(pa.string())),
        "extra": pa.array([{"x": 1}, None, {"x": 2}, {"x": 3}]),
    }
)
MESSAGES_TABLE = pa.table(
    {
        "id": pa.array([1, 2, 3]),
        "messages": [
            '[{"role": "user", "content": "hello"}]',
            '[{"role": "user", "content": [{"type": "text", "text": "x"}]}]',
            "[",
        ],
    }
)


def other_formats() -> dict[str, bytes]:
    """Name -> content of an input file of each format that is converted."""
    table = pa.table({"id": ["007", "x"], "prompt": ['a "b"\nc', "é"], "n": [1, 2], "o": [{"a": [1.5]}, None]})
    flat = table.drop_columns("o")
    stream, file, orc_file = pa.BufferOutputStream(), pa.BufferOutputStream(), pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    orc.write_table(table, orc_file)
    text = b'id,prompt,n\n007,"a ""b""\nc",1\nx,\xc3\xa9,2\n'
    return {
        "in.csv": text,
        "in.csv.gz": gzip.compress(text, mtime=0),
        "in.tsv": text.replace(b",", b"\t"),
        "in.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist()),
        "flat.jsonl": b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in flat.to_pylist()),
        "in.arrow": bytes(stream.getvalue()),
        "in.feather": bytes(file.getvalue()),
        "in.orc": bytes(orc_file.getvalue()),
    }


def parquet_file(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=2, write_page_checksum=True, **options)
    return sink.getvalue()


JOB_FILE = """\
model: {folder}
adapters:
  one: {folder}/one
  two: s3://bucket/two
input: [{folder}/in.parquet, {folder}/more]
output: {folder}/out
columns: {{prompt: text}}
workers: 2
max_tokens: 16
temperature: 0.7
stop: ["\\n", "END"]
max_errors: 10%
mode: auto
batch_rows: 8
system_prompt: "Be brief."
storage_options: {{key: value, client_kwargs: {{endpoint_url: "http://127.0.0.1:1"}}}}
"""


def _shard(shard_id: int) -> Shard:
    return Shard(shard_id, 0, "unmerged", ("alpha",), 4, 40, 40, 8)


@cache
def records() -> dict[str, Any]:
    """What stands in `_lorabatch` after a run, by name; of `events.jsonl` a list of lines."""
    spec = JobSpec(model="/model", input="/in.parquet", output="/out", adapters="/adapters")
    record = JobRecord(
        job_id="job-1",
        created_at="2025-01-01T00:00:00+00:00",
        versions={"python": "3.11"},
        spec=spec.without_secrets(),
        model=ModelRecord(url="/model", sha256="m" * 64, vocab_size=100, max_context_tokens=64),
        adapters=(AdapterRecord(name="alpha", url="/a", verdict="exact", sha256="a" * 64, rank=8),),
        input=InputRecord(
            files=(InputFile(url="/in", name="in", size_bytes=1, footer_sha256="f" * 64, row_group_rows=(3, 5)),),
            roles={"prompt": "prompt"},
            schema_ipc="",
        ),
        with_logprobs=False,
    )
    worker = "tcp://10.0.0.1:4000"
    state = JobState(
        "failed", 1_700_000_000.0, rows=8, rows_done=5, rows_error=1, shards=2, shards_done=1, eta_s=3.0,
        eta_range_s=(1.0, 5.0), batch_fill=0.5, workers=(WorkerState("w0", resident_adapters=("alpha",)),),
        message="why", error="JobFailedError", notes=("a note",), run_id="job-1-abc", worker_addresses=(worker,),
    )  # fmt: skip
    shards = (_shard(0), _shard(1))
    started = make_scheduler(shards, committed=(), settings=SchedulerSettings(cost=CPU_SMOLLM2_135M)).beginning()
    started |= {
        "run_id": "job-1-abc", "at_s": 1_700_000_000.0, "coordinator": worker, "workers": [worker],
        "phases": [["starting", 1_699_999_990.0], ["indexing", 1_699_999_995.0], ["loading engines", 1_699_999_999.0]],
    }  # fmt: skip
    events = [
        WorkersSeen(0.0, (worker, "tcp://10.0.0.2:4000")),
        ReplicasFound(0.5, (FoundReplica("tcp://10.0.0.2:4000", 8, (UnfinishedRows(1, 4),), 1.0),)),
        ReplicaJoined(1.0, worker, 8),
        RunShard(0, worker, 0),
        ReplicaReported(2.0, worker, 4, 3, 25.0, ("alpha",), (UnfinishedRows(0, 4),), mode="unmerged"),
        MigrateRows(0, worker, "tcp://10.0.0.2:4000", 2, is_selective=True, adapter_id="alpha"),
        ShardFailed(3.0, 0, worker, "a reason"),
        RunShard(0, worker, 1),
        ShardCommitted(4.0, 0, worker),
        ReplicaFailed(5.0, worker, "out of memory"),
        ReplicaLeft(6.0, "tcp://10.0.0.2:4000"),
        Tick(7.0),
    ]
    summary = {
        "num_rows": 8, "num_errors": 1, "num_parts": 2, "prompt_tokens": 50, "completion_tokens": 40, "seconds": 4.0,
        "adapters": [{"adapter": "alpha", "num_rows": 8, "num_errors": 1, "completion_tokens": 40}],
        "errors": [{"kind": "prompt", "num_rows": 1, "example": "bad"}],
    }  # fmt: skip
    plan = {
        "shards": [shard.to_json() for shard in shards], "num_rows": 8, "errors": [],
        "adapter_names": [["alpha"], ["alpha"]], "predicted_s": 4.0,
    }  # fmt: skip
    return {
        "job.json": json.loads(record.to_json()),
        "state.json": json.loads(state.to_json()),
        "summary.json": summary,
        "plan.json": plan,
        "events.jsonl": [started, *(json.loads(json.dumps(event.to_json())) for event in events)],
    }
