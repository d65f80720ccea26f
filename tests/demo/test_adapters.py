"""The adapters that ship: small, portable, and with the effect the demo's table claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from lorabatch.demo.tasks import TASKS
from lorabatch.demo.train_adapters import ADAPTERS, HUB_ID, RECIPES

MAX_ADAPTER_BYTES = 4 * 2**20


def test_every_recipe_has_its_folder_and_every_folder_its_recipe():
    assert {path.name for path in ADAPTERS.iterdir()} == set(RECIPES) == set(TASKS)


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_files_agree_with_the_recipe_and_name_no_local_path(name):
    folder, recipe = ADAPTERS / name, RECIPES[name]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == HUB_ID
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (
        recipe.rank,
        recipe.alpha,
        recipe.use_rslora,
    )
    assert sorted(config["target_modules"]) == sorted(recipe.target_modules)
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    weights = folder / "adapter_model.safetensors"
    assert weights.stat().st_size < MAX_ADAPTER_BYTES
    with safe_open(weights, framework="pt") as tensors:
        dtypes = {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
        assert dtypes == {"BF16"}
        assert len(list(tensors.keys())) == 2 * 30 * len(recipe.target_modules)


def test_ranks_scalings_and_targets_differ_between_adapters():
    recipes = RECIPES.values()
    assert len({recipe.rank for recipe in recipes}) == len(RECIPES)
    assert len({recipe.target_modules for recipe in recipes}) == len(RECIPES)
    assert any(recipe.use_rslora for recipe in recipes)


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "least_share"), [("sql", 0.7), ("sentiment", 0.8), ("contacts", 0.8), ("pirate", 0.9)]
)
def test_each_adapter_beats_the_base_on_held_out_prompts(name: str, least_share: float):
    from lorabatch.demo.evaluate_adapters import Evaluator

    headline, *_ = Evaluator(Path(ADAPTERS), [name]).figures(TASKS[name], num_prompts=12, num_shown=0)
    assert headline.adapter_share >= least_share
    assert headline.adapter_share > headline.base_share + 0.3
