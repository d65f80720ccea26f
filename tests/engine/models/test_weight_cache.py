"""Weights mapped from a file are those that an engine packs itself; a file in doubt is not used."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_oracle import prompts, register_all, serve, weights_sha256
from safetensors.torch import load_file, save_file

from lorabatch.engine.config import EngineConfig, read_model_config
from lorabatch.engine.engine import Engine
from lorabatch.engine.models.weight_cache import WeightCache
from lorabatch.engine.request import Request, SamplingParams
from lorabatch.engine.runner.backend import CpuBackend
from lorabatch.kernels.packed_weight import Products, can_multiply
from lorabatch.kernels.packed_weight.panels import has_panels

pytestmark = pytest.mark.skipif(not has_panels(), reason="compiled kernels were not built on this machine")
MakeFolder = Callable[..., Path]
CONFIG = EngineConfig(max_batch_rows=8, max_step_tokens=24, pool_bytes=4 << 20)


class Caching(CpuBackend):
    """A backend with a cache of its own, which takes models of any size."""

    folder: Path

    def weight_cache(self) -> WeightCache:
        return WeightCache(self.folder, min_bytes=0)


@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., Engine]:
    """Makes engines whose weights are in `tmp_path / "cache"`."""

    class Here(Caching):
        folder = tmp_path / "cache"

    return lambda model, config=CONFIG: Engine(model, config, make_backend=Here)


@pytest.fixture
def model(tmp_path: Path, make_model: MakeFolder) -> Path:
    return make_model(tmp_path / "model")


def only_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache").glob("*.panels")
    return path


def store_as(model: Path, dtype: torch.dtype) -> None:
    path = model / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path, {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"hidden_size": 56, "intermediate_size": 97, "num_key_value_heads": 4}),
        ("phi3", {}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "init_std": 0.2}),
    ],
    ids=["llama", "llama tied", "qwen2 odd sizes", "phi3", "opt with projections"],
)
def test_mapped_weights_have_the_bits_of_packed_ones(
    family: str, settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path, make_model: MakeFolder, cached: Any
) -> None:
    model = make_model(tmp_path / "model", family, **settings)
    store_as(model, dtype)
    expected = weights_sha256(Engine(model, CONFIG))
    first, second = cached(model), cached(model)
    assert weights_sha256(first) == weights_sha256(second) == expected
    rows = [Request(f"row-{i}", p, None, SamplingParams(max_tokens=6)) for i, p in enumerate(prompts(6, 300))]
    tokens = [
        {key: result.token_ids for key, result in serve(engine, rows).items()}
        for engine in (second, Engine(model, CONFIG))
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("products", ["bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_in_other_formats_are_mapped_too(
    products: Products, dtype: torch.dtype, tmp_path: Path, make_model: MakeFolder, cached: Any
) -> None:
    if not can_multiply(products):
        pytest.skip(f"this processor has no instructions for products in {products}")
    settings = {"hidden_size": 56, "intermediate_size": 97, "num_key_value_heads": 4, "tie_word_embeddings": True}
    model = make_model(tmp_path / "model", "qwen2", **settings)
    store_as(model, dtype)
    config = replace(CONFIG, **{"dtype": "bfloat16"} if products == "bfloat16" else {"base_quantization": "int8"})
    expected = weights_sha256(Engine(model, config))
    assert weights_sha256(cached(model)) != expected
    assert weights_sha256(cached(model, config)) == weights_sha256(cached(model, config)) == expected
    assert len(list((tmp_path / "cache").glob("*.panels"))) == 2


def test_merging_into_mapped_weights_and_restoring_them_gives_the_same_bits(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path, cached: Any
) -> None:
    plain, mapped = Engine(tiny_llama, CONFIG), cached(tiny_llama)
    path = only_file(tmp_path)
    before, content = weights_sha256(plain), path.read_bytes()
    for engine in (plain, mapped):
        ids = register_all(engine, tiny_adapters)
    for adapter_id in [*ids.values(), None] * 2:
        plain.switch_weights(adapter_id)
        mapped.switch_weights(adapter_id)
        assert weights_sha256(mapped) == weights_sha256(plain)
    assert weights_sha256(mapped) == before
    assert path.read_bytes() == content


def test_files_are_private_and_written_once(model: Path, tmp_path: Path, cached: Any) -> None:
    with ThreadPoolExecutor(3) as threads:
        hashes = {weights_sha256(engine) for engine in threads.map(cached, [model] * 3)}
    assert len(hashes) == 1
    path = only_file(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    inode = path.stat().st_ino
    cached(model)
    assert only_file(tmp_path).stat().st_ino == inode


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip(path, 1000), "have changed"),
        (lambda path: flip(path, -100), "index has changed"),
        (lambda path: flip(path, -1), "cut off"),
        (lambda path: os.truncate(path, path.stat().st_size - 64), ""),
        (lambda path: os.truncate(path, 10), ""),
        (lambda path: os.truncate(path, 0), ""),
        (lambda path: path.write_bytes(bytes(64) + path.read_bytes()), "size is another"),
        (lambda path: path.chmod(0o622), "this user's"),
    ],
    ids=["number", "index", "length", "end", "almost all", "all", "moved", "writable by others"],
)
def test_a_file_in_doubt_is_written_again(
    damage: Callable[[Path], None],
    said: str,
    model: Path,
    tmp_path: Path,
    cached: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = weights_sha256(cached(model))
    whole = only_file(tmp_path).read_bytes()
    damage(only_file(tmp_path))
    assert weights_sha256(cached(model)) == expected
    assert "weights are packed again" in caplog.text
    assert said in caplog.text
    assert only_file(tmp_path).read_bytes() == whole
    assert stat.S_IMODE(only_file(tmp_path).stat().st_mode) == 0o600


def test_changed_weights_have_a_file_of_their_own(model: Path, tmp_path: Path, cached: Any) -> None:
    before = weights_sha256(cached(model))
    path = model / "model.safetensors"
    times = path.stat()
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that keeps times would
    assert path.stat().st_size == times.st_size
    assert weights_sha256(cached(model)) == weights_sha256(Engine(model, CONFIG)) != before
    assert len(list((tmp_path / "cache").glob("*.panels"))) == 2


def test_the_least_recently_used_leave_when_there_is_no_room(tmp_path: Path, make_model: MakeFolder) -> None:
    models = [make_model(tmp_path / f"model-{i}", seed=i) for i in range(3)]
    configs = [read_model_config(model) for model in models]
    folder = tmp_path / "cache"
    unbounded = WeightCache(folder, min_bytes=0)
    for age, model, config in zip((50, 100), models, configs, strict=False):
        before = set(folder.glob("*.panels"))
        assert unbounded.weights(model, config, "float32") is not None
        (path,) = set(folder.glob("*.panels")) - before
        os.utime(path, (time.time() - age,) * 2)
    first, second = sorted(folder.glob("*.panels"), key=lambda path: -path.stat().st_mtime)
    left, recent = folder / ".packing-left", folder / ".packing-recent"
    for path in (left, recent):
        path.touch()
    os.utime(left, (0, 0))
    mapped = unbounded.weights(models[1], configs[1], "float32")  # used again
    bounded = WeightCache(folder, max_bytes=int(2.5 * first.stat().st_size), min_bytes=0)
    assert bounded.weights(models[2], configs[2], "float32") is not None
    assert not first.exists()
    assert second.exists()
    assert recent.exists()
    assert not left.exists()
    second.unlink()
    assert mapped is not None
    assert torch.isfinite(mapped[0]["model.norm.weight"]).all(), "what is mapped stays"


def test_models_too_large_or_too_small_are_not_kept(model: Path, tmp_path: Path) -> None:
    config = read_model_config(model)
    assert WeightCache(tmp_path / "cache").weights(model, config, "float32") is None
    assert WeightCache(tmp_path / "cache", max_bytes=1000, min_bytes=0).weights(model, config, "float32") is None
    assert WeightCache(None, min_bytes=0).weights(model, config, "float32") is None
    assert not list((tmp_path / "cache").glob("*.panels"))


def test_the_environment_names_the_folder_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default, other = tmp_path / "lorabatch" / "packed", tmp_path / "x"
    for value, folder in [("", default), (str(other), other), ("off", None)]:
        monkeypatch.setenv("LORABATCH_WEIGHT_CACHE", value)
        assert WeightCache.of_this_host().folder == folder


@pytest.mark.parametrize("kind", ["a file", "writable by others"])
def test_a_folder_that_is_not_private_is_not_used(kind: str, model: Path, tmp_path: Path, cached: Any) -> None:
    folder = tmp_path / "cache"
    if kind == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert weights_sha256(cached(model)) == weights_sha256(Engine(model, CONFIG))
    assert kind == "a file" or not list(folder.iterdir())


def test_a_link_is_not_followed(model: Path, tmp_path: Path, cached: Any) -> None:
    cached(model)
    path = only_file(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert weights_sha256(cached(model)) == weights_sha256(Engine(model, CONFIG))


FULL_DISK = """
import resource, sys
from pathlib import Path
from lorabatch.engine.config import read_model_config
from lorabatch.engine.models.weight_cache import WeightCache
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
model, folder = map(Path, sys.argv[1:])
assert WeightCache(folder, min_bytes=0).weights(model, read_model_config(model), "float32") is None
assert not list(folder.iterdir()), list(folder.iterdir())
"""


@pytest.mark.long
def test_a_disk_that_fills_up_leaves_nothing(model: Path, tmp_path: Path) -> None:
    assert (model / "model.safetensors").stat().st_size > 100_000
    command = [sys.executable, "-c", FULL_DISK, str(model), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
