"""Checks that a GGUF file can be converted exactly, before its weights are read; loads no torch."""

from __future__ import annotations

from ....system.untrusted import STOPS, shown_name
from ...errors import EngineError, ModelFilesError
from .config import ROPE_FACTORS, model_config
from .file import GgufFile
from .tokenizer import check_tokenizer

_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_HEAD_NORMS = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in ("q", "k")}
_SANDWICH_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
# Architecture -> tensors of a block that differ from Llama's.
_OTHER_TENSORS = {
    "qwen2": {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in ("q", "k", "v")},
    "qwen3": _HEAD_NORMS,
    "gemma2": _SANDWICH_NORMS,
    "gemma3": {**_SANDWICH_NORMS, **_HEAD_NORMS},
}


def check_convertible(gguf: GgufFile) -> None:
    """Raises `ModelFilesError` and `EngineError` as `convert_gguf` does, for what the metadata says."""
    try:
        checkpoint_names(gguf)
        model_config(gguf, "float32")
        check_tokenizer(gguf.metadata)
    except (*STOPS, EngineError):
        raise
    except Exception as error:
        raise unfitting(gguf, error) from None


def unfitting(gguf: GgufFile, error: BaseException) -> ModelFilesError:
    """The error for metadata that does not fit together: text where a number should be, a vocabulary without tokens, a
    panic of the tokenizer library.
    """
    return ModelFilesError(
        f"{gguf.path}: its metadata or tensors do not fit together ({type(error).__name__}: "
        f"{shown_name(str(error))}). Fetch the file again."
    )


def checkpoint_names(gguf: GgufFile) -> dict[str, str]:
    """GGUF tensor name -> checkpoint tensor name, for every tensor; missing and unknown ones are refused."""
    of_block = _BLOCK_TENSORS | _OTHER_TENSORS.get(gguf.architecture, {})
    names = dict(_TOP_TENSORS)
    num_blocks = int(gguf.require("block_count"))
    if num_blocks > len(gguf.tensors):
        raise ModelFilesError(
            f"{gguf.path}: block_count={num_blocks} and {len(gguf.tensors)} tensors: it is incomplete. Fetch it again."
        )
    for block in range(num_blocks):
        names |= {f"blk.{block}.{ours}": f"model.layers.{block}.{theirs}" for ours, theirs in of_block.items()}
    unknown = sorted(gguf.tensors.keys() - names.keys() - {ROPE_FACTORS})
    if unknown:
        raise EngineError(
            f"{gguf.path}: tensors with no place in a {gguf.architecture} model: "
            f"{', '.join(map(shown_name, unknown[:5]))}{' …' if len(unknown) > 5 else ''}. "
            "Dense models only; give a Hugging Face folder instead."
        )
    missing = sorted(names.keys() - gguf.tensors.keys() - {"output.weight"})
    if missing:
        raise ModelFilesError(
            f"{gguf.path}: missing tensors: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}. "
            "The file is incomplete (or one of a split set); fetch or join it again."
        )
    return {ours: theirs for ours, theirs in names.items() if ours in gguf.tensors}
