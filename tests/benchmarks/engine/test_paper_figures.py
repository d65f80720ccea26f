"""The experiments of the papers run on a small model, and say what does not depend on its size."""

from __future__ import annotations

import pytest

from lorabatch.benchmarks.engine.paper_figures import EXPERIMENTS, Scale, table


@pytest.fixture
def scale(tiny_llama):
    return Scale(tiny_llama, batch_rows=6, rows=20, adapters=(1, 5), peft_adapters=0, prompts=(40,), turns=1)


def test_one_type_at_a_time_uses_half_of_the_places(scale):
    # dLoRA, figure 2a: "the serving system only utilizes 50% of the total GPU resources".
    peft, unmerged = EXPERIMENTS["dlora-2a"](scale)
    assert (peft["places used"], unmerged["places used"]) == (0.5, 1.0)


def test_throughput_has_a_line_for_the_base_and_each_number_of_adapters(scale):
    found = EXPERIMENTS["slora-throughput"](scale)
    assert [line["adapters"] for line in found] == [0, 1, 5]
    assert [line["loads"] for line in found] == [0, 1, 5]
    assert found[0]["of the base"] == "100.0%"


@pytest.mark.parametrize("name", ["dlora-5", "dlora-15", "slora-7", "loraserve-1", "loraserve-3"])
def test_each_experiment_fills_its_table(scale, name):
    found = EXPERIMENTS[name](scale)
    lines = table(found).splitlines()
    assert len(lines) == 2 + len(found) > 2
    assert "nan" not in "".join(lines)


@pytest.mark.long
@pytest.mark.parametrize("name", ["slora-3", "loraserve-5"])
def test_each_longer_experiment_fills_its_table(scale, name):
    assert len(EXPERIMENTS[name](scale)) > 1
