"""Penalties of tokens that were there before: the compiled kernel and its plain twin leave the same logits."""

from __future__ import annotations

import numpy as np
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabatch.kernels.token_penalties import PenalisedRow, penalise_tokens_
from lorabatch.kernels.token_penalties.reference import penalise

VOCAB = 50
tokens = st.lists(st.integers(0, VOCAB + 5), max_size=40)
penalised = st.builds(
    lambda prompt, generated, **penalties: PenalisedRow(
        0, np.unique(np.array(prompt, np.int64)), generated, **penalties
    ),
    tokens,
    tokens,
    repetition=st.sampled_from([1.0, 1.1, 0.3, 2.0]),
    frequency=st.sampled_from([0.0, 0.2, -2.0, 1.7]),
    presence=st.sampled_from([0.0, 0.5, -1.3]),
)


@given(rows=st.lists(penalised, max_size=5), stride=st.integers(0, 9), seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_compiled_penalties_are_those_of_the_plain_twin(
    rows: list[PenalisedRow], stride: int, seed: int, data: st.DataObject
) -> None:
    places = data.draw(st.permutations(range(6)))
    rows = [row._replace(place=place) for row, place in zip(rows, places, strict=False)]
    memory = torch.randn(6, VOCAB + stride, generator=torch.Generator().manual_seed(seed)) * 4
    memory[:, 3] = -torch.inf
    expected, found, double = memory.clone(), memory.clone(), memory.double()
    penalise(expected[:, :VOCAB], rows)
    penalise_tokens_(found[:, :VOCAB], rows)
    penalise_tokens_(double[:, :VOCAB], rows)
    assert torch.equal(found, expected)
    assert torch.allclose(double.float(), expected, atol=1e-5)
