"""Tiny random models and adapters, made by transformers and PEFT themselves: the oracle's own files."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No deadline: how long an example takes depends on what else the machine does. `make test-all` asks for "long":
# see `tests/oracle/examples.py`.
settings.register_profile("short", deadline=None)
settings.register_profile("long", deadline=None)
settings.load_profile("short")

# Two test processes share the machine: with a thread for each core in both, they wait for one another. Tests of threads
# set their numbers themselves. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Jobs of tests neither use what others have measured or packed, nor keep it.
os.environ["LORABATCH_HISTORY"] = "off"
os.environ["LORABATCH_WEIGHT_CACHE"] = "off"

# Triton reads this when it is imported, so it stands before any test module is. TRITON_INTERPRET=0 tests the
# kernels on a GPU instead.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns when it is left open
if os.environ["TRITON_INTERPRET"] == "1" and find_spec("triton"):  # on Linux only
    from lorabatch.benchmarks.gpu.faster_interpreter import hasten

    hasten()


class RootIsNoTestPackage:
    """Collects the repository's root as a plain folder: as a package, it would be imported under its folder's name."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def _not_pinned(package: str) -> str:
    """What is installed of a package where that is another version than constraints.txt names; "" where it is not."""
    installed = version(package).partition("+")[0]
    pins = (Path(__file__).parents[1] / "constraints.txt").read_text("utf-8").splitlines()
    return "" if f"{package}=={installed}" in pins else f"{package} {installed}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What other versions than the pinned ones have is reported (XFAIL), and fails nothing."""
    for item in items:
        marker = item.get_closest_marker("reference")
        if marker is not None and (installed := _not_pinned(marker.args[0])):
            item.add_marker(pytest.mark.xfail(reason=f"compared with {installed}, which is not pinned", strict=False))


@pytest.fixture
def unclassified(request: pytest.FixtureRequest) -> Callable[[Iterable[str]], None]:
    """Takes what a reference implementation reads and lorabatch has in no list: the test fails, or reports it."""

    def report(found: Iterable[str]) -> None:
        names = ", ".join(sorted(found))
        if names and (installed := _not_pinned(request.node.get_closest_marker("reference").args[0])):
            pytest.xfail(f"new in {installed}: {names}")
        assert not names, "in none of the lists: what is read, known not to matter, named, refused"

    return report


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it after every test."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """At the end it may look at all, or libraries that count their objects complain."""
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    """A conftest's own hooks are not asked about the folders above it."""
    config.pluginmanager.register(RootIsNoTestPackage())


CORPUS = (
    "the quick brown fox jumps over the lazy dog. ",
    "name: Ada Lovelace, phone 555-0199, city London. ",
    "once upon a midnight dreary, while I pondered, weak and weary. ",
    "SELECT id, adapter FROM rows WHERE error IS NULL ORDER BY id; ",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """A byte-level BPE tokenizer with a chat template; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_model(folder: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A random model of a family, with its tokenizer. Weights are large enough for logits that differ."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "bos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(family, **(settings | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith(".sinks"):
                parameter.add_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, model_folder: Path, seed: int = 0, **lora: Any) -> Path:
    """A random PEFT adapter (B not zero) for a model folder, saved by PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(**(settings | lora)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_A" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.create_or_update_model_card = lambda folder: None  # its README.md takes most of the time
    model.save_pretrained(folder)
    return folder


def write_classifier(folder: Path, model_folder: Path, num_labels: int, seed: int = 0, **lora: Any) -> Path:
    """A random PEFT adapter with a head of `num_labels` (`SEQ_CLS`), saved by PEFT; of 0 labels: one without a head,
    for embeddings (`FEATURE_EXTRACTION`).
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel, AutoModelForSequenceClassification

    if num_labels:
        base = AutoModelForSequenceClassification.from_pretrained(
            model_folder, dtype=torch.float32, num_labels=num_labels
        )
    else:
        base = AutoModel.from_pretrained(model_folder, dtype=torch.float32)
    task = "SEQ_CLS" if num_labels else "FEATURE_EXTRACTION"
    settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    model = get_peft_model(base, LoraConfig(**(settings | {"task_type": task} | lora)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_A" in name or "score.modules_to_save" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.create_or_update_model_card = lambda folder: None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    """`make_model(folder, family="llama", seed=0, **config)`: see `write_model`."""
    return write_model


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Path]:
    """`make_adapter(folder, model_folder, seed=0, **lora_config)`: see `write_adapter`."""
    return write_adapter


@pytest.fixture(scope="session")
def make_classifier() -> Callable[..., Path]:
    """`make_classifier(folder, model_folder, num_labels, seed=0, **lora_config)`: see `write_classifier`."""
    return write_classifier


@pytest.fixture(scope="session")
def weightless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder of 128 tokens' context with configuration and tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("weightless") / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": write_tokenizer(folder),
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with grouped-query attention."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of ranks 1, 8, 20 and 64 on different layers of `tiny_llama`, one of them rank-stabilised."""
    root = tmp_path_factory.mktemp("adapters")
    settings: dict[str, dict[str, Any]] = {
        "rank1": {"r": 1, "lora_alpha": 2},
        "rank8": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        "rank20": {"r": 20, "lora_alpha": 10, "target_modules": ["gate_proj", "down_proj", "o_proj"]},
        "rank64": {"r": 64, "lora_alpha": 8, "use_rslora": True},
    }
    return {
        name: write_adapter(root / name, tiny_llama, seed=i + 1, **lora)
        for i, (name, lora) in enumerate(settings.items())
    }
