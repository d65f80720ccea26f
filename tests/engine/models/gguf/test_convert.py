"""GGUF files against the transformers models they were written from.

The files are written here as llama.cpp writes them: query and key rows of the Llama family reordered, axes by GGUF's
rules, special tokens typed. Logits decide whether the way back is right.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from peft_oracle import make_engine, prompts, register_all, serve, weights_sha256
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.errors import EngineError, ModelFilesError
from lorabatch.engine.models.decoder import Decoder
from lorabatch.engine.models.gguf.blocks import METADATA_KEY
from lorabatch.engine.models.gguf.convert import convert_gguf
from lorabatch.engine.models.gguf.converted import resolve_gguf
from lorabatch.engine.models.load import load_weights
from lorabatch.engine.models.weight_cache import WeightCache
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.kernels.packed_weight import can_widen_blocks
from lorabatch.system.long_work import listening

NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 4, 2, 2
SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "max_position_embeddings": 512,
}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def llama_cpp_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order of q and k in a GGUF file: each head's two rotary halves interleaved."""
    head_size = weight.shape[0] // num_heads
    order = [
        head * head_size + half * (head_size // 2) + pair
        for head in range(num_heads)
        for pair in range(head_size // 2)
        for half in range(2)
    ]
    return weight[order]


def gguf_tensors(
    model: torch.nn.Module, is_llama: bool, names: Mapping[str, str] = BLOCK_NAMES
) -> dict[str, np.ndarray]:
    """The model's tensors by GGUF name, float32."""
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        array = tensor.numpy()
        if stem.startswith("model.layers."):
            layer, site = stem.removeprefix("model.layers.").split(".", 1)
            if is_llama and site.endswith(("q_proj", "k_proj")):
                array = llama_cpp_order(array, NUM_HEADS if site.endswith("q_proj") else NUM_KV_HEADS)
            tensors[f"blk.{layer}.{names[site]}.{kind}"] = array
        else:
            tensors[f"{TOP_NAMES[stem]}.{kind}"] = array
    if model.config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    return tensors


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, then a few tokens of our own up to the vocabulary size."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    return [*alphabet, "he", "ll", "hell", "hello", *(f"<extra_{i}>" for i in range(9)), "<s>", "<end>", "<turn>"]


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    quantise: GGMLQuantizationType | None = None,
) -> Path:
    """A GGUF file of the tiny sizes; `metadata` overrides or adds keys (values: str, int, float)."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_tokenizer_model("gpt2")
    tokens = byte_tokens()
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("<end>"))
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for key, value in {"tokenizer.ggml.pre": "smollm", **(metadata or {})}.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, array in tensors.items():
        if quantise is not None and array.ndim == 2:
            writer.add_tensor(name, quantize(array, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {**SIZES, "rope_theta": 50_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **changes}
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def llama_gguf(llama: LlamaForCausalLM, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", gguf_tensors(llama, is_llama=True))


def assert_same_logits(expected: torch.nn.Module, folder: Path) -> None:
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    token_ids = torch.arange(300).remainder(SIZES["vocab_size"]).unsqueeze(0)
    with torch.inference_mode():
        difference = (expected(token_ids).logits - converted(token_ids).logits).abs().max()
    assert difference < 1e-5


def test_a_llama_file_gives_the_logits_of_the_model_it_was_written_from(llama, llama_gguf, tmp_path):
    convert_gguf(llama_gguf, tmp_path / "model")
    assert_same_logits(llama, tmp_path / "model")


def test_without_undoing_the_row_order_the_logits_would_differ(llama, tmp_path):
    """Guards the test above: the reordering it relies on must matter."""
    path = write_gguf(tmp_path / "unordered.gguf", gguf_tensors(llama, is_llama=False))
    convert_gguf(path, tmp_path / "model")
    with pytest.raises(AssertionError):
        assert_same_logits(llama, tmp_path / "model")


def test_a_tied_llama_stays_tied(tmp_path):
    llama = tiny_llama(tie_word_embeddings=True)
    convert_gguf(write_gguf(tmp_path / "tied.gguf", gguf_tensors(llama, is_llama=True)), tmp_path / "model")
    assert read_model_config(tmp_path / "model").is_tied
    assert_same_logits(llama, tmp_path / "model")


def test_llama3_rotary_factors_come_back_as_their_settings(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 50_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # Heads of 64 make the frequencies span all three bands of the rule.
    llama = tiny_llama(rope_parameters=rope, hidden_size=256, max_position_embeddings=16384)
    plain = 50_000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    factors = (plain / llama.model.rotary_emb.inv_freq.double()).float().numpy()
    assert [(factors < 1.01).any(), ((factors > 1.01) & (factors < 7.9)).any(), (factors > 7.9).any()] == [True] * 3
    tensors = {**gguf_tensors(llama, is_llama=True), "rope_freqs.weight": factors}
    path = write_gguf(
        tmp_path / "rope.gguf", tensors, metadata={"llama.embedding_length": 256, "llama.context_length": 16384}
    )
    convert_gguf(path, tmp_path / "model")
    assert_same_logits(llama, tmp_path / "model")


def test_rotary_factors_of_an_unknown_rule_are_refused(llama, tmp_path):
    tensors = {**gguf_tensors(llama, is_llama=True), "rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    with pytest.raises(EngineError, match=r"rope_freqs\.weight"):
        convert_gguf(write_gguf(tmp_path / "rope.gguf", tensors), tmp_path / "model")


def test_a_qwen2_file_keeps_its_biases_and_row_order(tmp_path):
    torch.manual_seed(1)
    qwen = Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_theta=50_000.0, rms_norm_eps=1e-5)).eval()
    for name, parameter in qwen.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    tensors = gguf_tensors(qwen, is_llama=False)
    path = write_gguf(tmp_path / "qwen.gguf", tensors, "qwen2", {"tokenizer.ggml.pre": "qwen2"})
    convert_gguf(path, tmp_path / "model")
    assert_same_logits(qwen, tmp_path / "model")


GEMMA = SIZES | {"head_dim": 32, "rms_norm_eps": 1e-5}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
# architecture -> the model it stands for, names of its norms in a file, and metadata beyond what all have
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "qwen3": (
        "qwen3",
        SIZES | {"head_dim": 32, "rope_theta": 50_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        {},
        {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32},
    ),
    "gemma": ("gemma", GEMMA | {"rope_theta": 50_000.0}, {}, {"gemma.attention.key_length": 32}),
    "gemma2": (
        "gemma2",
        GEMMA
        | {"rope_theta": 50_000.0, "query_pre_attn_scalar": 32, "sliding_window": 64}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        {
            "gemma2.attention.key_length": 32,
            "gemma2.attention.sliding_window": 64,
            "gemma2.attn_logit_softcapping": 3.0,
            "gemma2.final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"rope_parameters": TWO_ROPES, "query_pre_attn_scalar": 32, "sliding_window": 64},
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        {
            "gemma3.attention.key_length": 32,
            "gemma3.attention.sliding_window": 64,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    ),
}


@pytest.mark.parametrize("architecture", OTHERS)
def test_files_of_other_families_give_the_logits_of_the_model_they_were_written_from(architecture, tmp_path):
    """Norms of Gemma are stored with 1 added; q and k keep their order."""
    family, settings, norms, metadata = OTHERS[architecture]
    torch.manual_seed(2)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    names = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"} | norms
    tensors = gguf_tensors(model, is_llama=False, names=BLOCK_NAMES | names)
    if architecture.startswith("gemma"):
        tensors = {name: array + 1 if "norm" in name else array for name, array in tensors.items()}
    path = write_gguf(tmp_path / "m.gguf", tensors, architecture, metadata)
    convert_gguf(path, tmp_path / "model")
    assert_same_logits(model, tmp_path / "model")
    engine = make_engine(tmp_path / "model", pool_bytes=4 << 20)
    (row,) = [Request("row", tuple(range(3, 100)), None, SamplingParams(max_tokens=4, ignore_eos=True))]
    tokens = serve(engine, [row])["row"].token_ids
    ids = torch.tensor([row.prompt_token_ids])
    for token in tokens:
        with torch.inference_mode():
            assert int(model(ids).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
def test_engines_compute_with_the_exact_values_of_blocks(kind, is_tied, tmp_path):
    of_kind = GGMLQuantizationType[kind]
    tensors = gguf_tensors(tiny_llama(tie_word_embeddings=is_tied), is_llama=True)
    exact = {
        name: dequantize(quantize(array, of_kind), of_kind) if array.ndim == 2 else array
        for name, array in tensors.items()
    }
    head = torch.from_numpy(exact["token_embd.weight" if is_tied else "output.weight"])
    # without compiled kernels nothing stays in blocks, and embeddings are in fp32
    looked_up = exact["token_embd.weight"].astype(np.float16 if can_widen_blocks("float32") else np.float32)
    exact["token_embd.weight"] = looked_up.astype(np.float32)
    convert_gguf(write_gguf(tmp_path / "blocks.gguf", tensors, quantise=of_kind), tmp_path / "blocks")
    convert_gguf(write_gguf(tmp_path / "exact.gguf", exact), tmp_path / "exact")
    stored = load_file(tmp_path / "blocks" / "model.safetensors")
    assert {t.dtype for t in stored.values() if t.ndim == 2} == {torch.uint8}
    in_blocks, plain = make_engine(tmp_path / "blocks"), make_engine(tmp_path / "exact")
    assert in_blocks.backend.decoder.linears["lm_head"].live.equal(head)
    assert in_blocks.backend.decoder.tensors["model.embed_tokens.weight"].equal(torch.from_numpy(looked_up))
    for ours, theirs in zip(in_blocks.backend.decoder.layers, plain.backend.decoder.layers, strict=True):
        assert all(linear.live.equal(theirs.linears[site].live) for site, linear in ours.linears.items())
    if not is_tied:
        rows = [Request(f"row-{i}", p, None, SamplingParams(max_tokens=8)) for i, p in enumerate(prompts(6, 272))]
        answers = [{i: r.token_ids for i, r in serve(engine, rows).items()} for engine in (in_blocks, plain)]
        assert answers[0] == answers[1]


def test_merging_into_blocks_and_restoring_them_gives_the_same_bits(llama, llama_gguf, make_adapter, tmp_path):
    convert_gguf(llama_gguf, tmp_path / "plain")
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "plain")
    tensors = gguf_tensors(llama, is_llama=True)
    path = write_gguf(tmp_path / "blocks.gguf", tensors, quantise=GGMLQuantizationType.Q4_1)
    convert_gguf(path, tmp_path / "blocks")
    engine = make_engine(tmp_path / "blocks")
    before = weights_sha256(engine)
    (adapter_id,) = register_all(engine, {"one": adapter}).values()
    engine.switch_weights(adapter_id)
    assert weights_sha256(engine) != before
    engine.switch_weights(None)
    assert weights_sha256(engine) == before
    linear = engine.backend.decoder.layers[0].linears["o"]
    # a plain copy of what is in blocks would stay, many times as large
    assert (linear.pristine is linear.pristine) != can_widen_blocks("float32")


def test_a_head_shares_the_memory_of_the_embedding_that_it_is_tied_to(tmp_path):
    tensors = gguf_tensors(tiny_llama(tie_word_embeddings=True), is_llama=True)
    convert_gguf(write_gguf(tmp_path / "tied.gguf", tensors), tmp_path / "model")
    model = read_model_config(tmp_path / "model")
    weights = load_weights(tmp_path / "model", model, EngineConfig(), torch.device("cpu"), torch.float32)
    decoder = Decoder(model, weights, torch.float32, products=None)
    assert decoder.linears["lm_head"].live.data_ptr() == decoder.tensors["model.embed_tokens.weight"].data_ptr()


@pytest.mark.skipif(not can_widen_blocks("float32"), reason="compiled kernels were not built on this machine")
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "F16"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
def test_the_cache_of_packed_weights_knows_what_they_will_take(kind, is_tied, tmp_path):
    tensors = gguf_tensors(tiny_llama(tie_word_embeddings=is_tied), is_llama=True)
    convert_gguf(write_gguf(tmp_path / "m.gguf", tensors, quantise=GGMLQuantizationType[kind]), tmp_path / "model")
    model = read_model_config(tmp_path / "model")

    def kept(max_bytes):
        return WeightCache(tmp_path / str(max_bytes), max_bytes, min_bytes=0).weights(
            tmp_path / "model", model, "float32"
        )

    weights, packed = kept(1 << 30)
    num_bytes = sum(t.nbytes for t in weights.values()) + sum(p.numbers.nbytes for p in packed.values())
    assert kept(int(1.1 * num_bytes)) is not None
    assert kept(int(0.9 * num_bytes)) is None


def test_a_converted_file_is_found_without_loading_torch(llama_gguf, tmp_path):
    folder = resolve_gguf(llama_gguf, tmp_path / "cache")
    code = (
        "import sys; from pathlib import Path; from lorabatch.engine.models.gguf.converted import resolve_gguf;"
        "print(resolve_gguf(*map(Path, sys.argv[1:])), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(llama_gguf), str(tmp_path / "cache")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{folder} False\n"


def test_damaged_kinds_of_blocks_are_refused(llama, tmp_path):
    tensors = gguf_tensors(llama, is_llama=True)
    convert_gguf(write_gguf(tmp_path / "q8.gguf", tensors, quantise=GGMLQuantizationType.Q8_0), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    stored = load_file(path)
    for kinds in (
        "{",
        "[" * 100_000,
        "[1]",
        '{"lm_head.weight": "Q4_2"}',
        '{"lm_head.weight": "Q6_K"}',
        '{"lm_head.weight": [1]}',
    ):
        save_file(stored, path, {"format": "pt", METADATA_KEY: kinds})
        with pytest.raises(ModelFilesError):
            make_engine(tmp_path / "model")


def test_for_other_programs_blocks_are_stored_as_float16_of_their_exact_values(llama, tmp_path):
    tensors = gguf_tensors(llama, is_llama=True)
    kind = GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "q8.gguf", tensors, quantise=kind)
    convert_gguf(path, tmp_path / "model", keep_blocks=False)
    stored = load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    exact = dequantize(quantize(tensors["blk.1.ffn_up.weight"], kind), kind)
    assert stored.dtype == torch.float16
    assert torch.equal(stored, torch.from_numpy(exact).half())


def test_large_models_are_written_as_shards_with_an_index(llama, llama_gguf, tmp_path):
    convert_gguf(llama_gguf, tmp_path / "model", shard_bytes=60_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert_same_logits(llama, tmp_path / "model")


def test_end_of_turn_tokens_all_end_an_answer(llama, tmp_path):
    tokens = byte_tokens()
    path = write_gguf(
        tmp_path / "eot.gguf",
        gguf_tensors(llama, is_llama=True),
        metadata={"tokenizer.ggml.eot_token_id": tokens.index("<turn>")},
    )
    convert_gguf(path, tmp_path / "model")
    config = read_model_config(tmp_path / "model")
    assert config.eos_token_ids == (tokens.index("<end>"), tokens.index("<turn>"))
    assert config.bos_token_id == tokens.index("<s>")


_CONVERT_ON_REQUEST = """
import sys
from pathlib import Path
from lorabatch.engine.models.decoder import Decoder
from lorabatch.engine.models.gguf.blocks import METADATA_KEY
from lorabatch.engine.models.gguf.convert import convert_gguf
print("ready", flush=True)
sys.stdin.readline()
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.long
def test_converters_racing_for_one_folder_leave_one_whole_folder(llama, llama_gguf, tmp_path):
    folder = tmp_path / "cache" / "model"
    command = [sys.executable, "-c", _CONVERT_ON_REQUEST, str(llama_gguf), str(folder)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    errors = [racer.communicate(timeout=120)[1] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], errors
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert_same_logits(llama, folder)


_RESOLVE_ON_REQUEST = """
import sys
from pathlib import Path
from lorabatch.engine.models.gguf import convert as module
from lorabatch.engine.models.gguf.converted import resolve_gguf

convert = module.convert_gguf

def reported(*places):
    print("converts", flush=True)
    convert(*places)

module.convert_gguf = reported
print("ready", flush=True)
sys.stdin.readline()
print(resolve_gguf(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.long
def test_processes_that_need_a_file_at_once_convert_it_once(llama_gguf, tmp_path):
    command = [sys.executable, "-c", _RESOLVE_ON_REQUEST, str(llama_gguf), str(tmp_path / "cache")]
    asking = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in asking:
        assert process.stdout.readline() == "ready\n"
    for process in asking:
        process.stdin.write("go\n")
        process.stdin.flush()
    reported = [process.communicate(timeout=120)[0].split() for process in asking]
    assert sum("converts" in words for words in reported) == 1
    (folder,) = {words[-1] for words in reported}
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [Path(folder).name]


def test_a_failed_conversion_leaves_nothing_behind(llama, tmp_path):
    tensors = gguf_tensors(llama, is_llama=True)
    tensors["blk.1.ffn_down.weight"] = np.full_like(tensors["blk.1.ffn_down.weight"], np.nan)
    path = write_gguf(tmp_path / "nan.gguf", tensors)
    with pytest.raises(ModelFilesError, match=r"blk\.1\.ffn_down\.weight"):
        convert_gguf(path, tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_follows_the_content_and_not_the_name(llama, llama_gguf, tmp_path):
    first = resolve_gguf(llama_gguf, tmp_path / "cache")
    before = (first / "config.json").stat().st_mtime_ns
    assert resolve_gguf(llama_gguf, tmp_path / "cache") == first
    assert (first / "config.json").stat().st_mtime_ns == before
    tensors = {name: array * 1.5 for name, array in gguf_tensors(llama, is_llama=True).items()}
    llama_gguf.unlink()
    assert resolve_gguf(write_gguf(llama_gguf, tensors), tmp_path / "cache") != first


def test_a_conversion_names_its_file_and_size_once(llama_gguf, tmp_path):
    lines = []
    with listening(lines.append):
        assert resolve_gguf(llama_gguf, tmp_path / "cache") == resolve_gguf(llama_gguf, tmp_path / "cache")
    assert [line for line in lines if "%" not in line] == ["converting tiny.gguf (0 MB), once for this machine"]


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_a_linear_factor_without_its_type_gives_the_logits_of_linear_positions(key, tmp_path):
    llama = tiny_llama(rope_parameters={"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0})
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(llama, is_llama=True), metadata={key: 4.0})
    convert_gguf(path, tmp_path / "model")
    assert_same_logits(llama, tmp_path / "model")


def test_the_cache_is_where_the_user_keeps_caches(llama_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_gguf(llama_gguf).is_relative_to(tmp_path / "xdg" / "lorabatch")


Damage = Callable[[dict[str, np.ndarray]], object]


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda t: t.pop("blk.1.attn_k.weight"), ModelFilesError, r"missing tensors: blk\.1\.attn_k\.weight"),
        (
            lambda t: t.update({"blk.0.ffn_gate_exps.weight": np.ones((2, 4), np.float32)}),
            EngineError,
            r"blk\.0\.ffn_gate_exps\.weight",
        ),
    ],
)
def test_missing_and_unknown_tensors_are_named(llama, tmp_path, damage: Damage, error, message):
    tensors = gguf_tensors(llama, is_llama=True)
    damage(tensors)
    with pytest.raises(error, match=message):
        convert_gguf(write_gguf(tmp_path / "damaged.gguf", tensors), tmp_path / "model")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type='longrope'"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count=8"),
        ({"tokenizer.ggml.pre": "viking"}, r"tokenizer\.ggml\.pre='viking'"),
    ],
)
def test_settings_that_would_not_be_exact_are_refused(llama, tmp_path, metadata, message):
    path = write_gguf(tmp_path / "odd.gguf", gguf_tensors(llama, is_llama=True), metadata=metadata)
    with pytest.raises(EngineError, match=message):
        convert_gguf(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_another_architecture_is_refused_by_name(llama, tmp_path):
    path = write_gguf(tmp_path / "mamba.gguf", gguf_tensors(llama, is_llama=True), "mamba")
    with pytest.raises(EngineError, match="'mamba' is not supported"):
        convert_gguf(path, tmp_path / "model")


def test_a_file_that_is_not_gguf_or_is_cut_short_is_refused(llama_gguf, tmp_path):
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    with pytest.raises(ModelFilesError, match="not a GGUF file"):
        convert_gguf(text, tmp_path / "model")
    with pytest.raises(ModelFilesError, match="cannot be read"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "model")
    whole = llama_gguf.read_bytes()
    for length in (4, 100, len(whole) // 3, len(whole) - 1000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFilesError, match="damaged or cut short"):
            convert_gguf(cut, tmp_path / "model")


def test_arrays_in_arrays_are_refused_as_damage(tmp_path):
    path = tmp_path / "nested.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    levels = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    path.write_bytes(head + struct.pack("<Q", 1) + b"x" + levels)
    with pytest.raises(ModelFilesError, match="damaged or cut short"):
        convert_gguf(path, tmp_path / "out")


def described(*values: bytes, tensors: int = 0) -> bytes:
    """A GGUF file that is nothing but metadata; `values`: type and content of each."""
    keys = (struct.pack("<Q", 1) + b"x" + value for value in values)
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(values)) + b"".join(keys)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (described(struct.pack("<IIQ", 9, 0, 2**63)), "9223372036854775809 values, expected at most 3000000"),
        (described(struct.pack("<IIQ", 9, 8, 2**64 - 1)), "18446744073709551616 values, expected"),
        (described(struct.pack("<IIQ", 9, 6, 2_000_000) + bytes(100)), "a value of 8000000 bytes in a file of"),
        (described(struct.pack("<IIQ", 9, 9, 1)), "an array in an array"),
        (described(struct.pack("<IQ", 8, 2**63)), "a value of 9223372036854775808 bytes"),
        (described(struct.pack("<I", 77)), "a value of type 77"),
        (described(tensors=2**63), "values, expected at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "values, expected at most"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 1), "its metadata ends with the file"),
    ],
)
def test_lengths_that_no_file_can_have_are_refused_before_anything_is_made_of_them(tmp_path, content, reason):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelFilesError, match=f"damaged or cut short .*{reason}"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_metadata_that_does_not_fit_together_is_refused_by_name(llama, tmp_path):
    tensors = gguf_tensors(llama, is_llama=True)
    for number, (key, value, reason) in enumerate(
        [
            ("tokenizer.ggml.eos_token_id", "text", "do not fit together"),
            ("llama.attention.head_count_kv", "\x1b[2J", "do not fit together"),
            ("llama.block_count", 2**31, "block_count=2147483648 and"),
            ("tokenizer.ggml.pre", "\x1b[2J", r"pre='\\x1b\[2J'"),
        ]
    ):
        path = write_gguf(tmp_path / f"{number}.gguf", tensors, metadata={key: value})
        with pytest.raises(EngineError, match=reason) as raised:
            convert_gguf(path, tmp_path / "out")
        assert str(raised.value).isprintable()
        assert not (tmp_path / "out").exists()
