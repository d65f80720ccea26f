from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lorabatch.pipeline.shared_beginnings import shared_tokens

PROMPTS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.lists(st.integers(0, 300), max_size=6)), max_size=12)


def test_every_row_of_an_adapter_but_one_shares_the_systems_prompt() -> None:
    system = [7, 300, 2]
    prompts = [[*system, 1], [9, 9], [*system, 2, 5], [*system, 2, 6]]
    assert shared_tokens(["a"] * 4, prompts).tolist() == [0, 0, 3, 4]


def test_adapters_share_nothing_and_a_prompt_can_be_all_of_anothers_beginning() -> None:
    assert shared_tokens(["a", "b", None, ""], [[1, 2], [1, 2], [1], [1, 2]]).tolist() == [0, 0, 0, 1]
    assert shared_tokens([], []).tolist() == []


@given(PROMPTS)
def test_what_is_left_to_compute_are_the_nodes_of_the_tree_of_all_prompts(
    rows: list[tuple[str | None, list[int]]],
) -> None:
    adapters, prompts = [adapter for adapter, _ in rows], [prompt for _, prompt in rows]
    nodes = {(adapter, *prompt[: end + 1]) for adapter, prompt in rows for end in range(len(prompt))}
    assert sum(map(len, prompts)) - shared_tokens(adapters, prompts).sum() == len(nodes)
