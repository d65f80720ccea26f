"""Every number of a layer belongs to one member of a group; what is filled up with zeros is the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabatch.engine.model_config import parse_model_config
from lorabatch.engine.model_config.model import ModelConfig
from lorabatch.engine.model_config.partition import Piece, partition_problem, partitions_of


def make_model(family: str = "llama", **settings: object) -> ModelConfig:
    raw = {
        "model_type": family,
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return parse_model_config(raw | settings, {})


def numbers(pieces: tuple[Piece, ...] | None) -> list[int]:
    """Places of the whole that pieces take; -1 for zeros."""
    assert pieces is not None
    return [n for piece in pieces for n in [*range(piece.start, piece.end), *[-1] * piece.num_zeros]]


@given(
    kv_heads=st.integers(1, 12),
    per_kv=st.integers(1, 5),
    features=st.integers(1, 64),
    vocab_size=st.integers(64, 200),
    num_members=st.integers(1, 8),
    is_fused=st.booleans(),
)
def test_members_have_each_query_and_feature_once_and_the_keys_of_their_queries(
    kv_heads: int, per_kv: int, features: int, vocab_size: int, num_members: int, is_fused: bool
) -> None:
    size = 8
    model = make_model(
        "phi3" if is_fused else "llama",
        num_attention_heads=kv_heads * per_kv,
        num_key_value_heads=kv_heads,
        hidden_size=kv_heads * per_kv * size,
        intermediate_size=features,
        vocab_size=vocab_size,
        pad_token_id=0,
    )
    starts = (0, model.attention.q_size, model.attention.q_size + model.attention.kv_size)
    queries: Counter[int] = Counter()
    inner: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for partition in partitions_of(model, num_members):
        part = partition.shard
        if is_fused:
            qkv = numbers(partition.linear("model.layers.0.self_attn.qkv_proj")[0])
            gate_up = numbers(partition.linear("model.layers.0.mlp.gate_up_proj")[0])
        else:
            names = ("q_proj", "k_proj", "v_proj")
            qkv = [
                n if n < 0 else n + start
                for name, start in zip(names, starts, strict=True)
                for n in numbers(partition.linear(f"model.layers.0.self_attn.{name}")[0])
            ]
            gate_up = [
                n if n < 0 else n + start
                for name, start in (("gate_proj", 0), ("up_proj", features))
                for n in numbers(partition.linear(f"model.layers.0.mlp.{name}")[0])
            ]
        assert len(qkv) == sum(part.parts_of_site(0, "qkv"))
        assert len(gate_up) == 2 * part.intermediate_size
        size_of_q, size_of_k, _ = part.parts_of_site(0, "qkv")
        q, k, v = qkv[:size_of_q], qkv[size_of_q:-size_of_k], qkv[-size_of_k:]
        group = part.num_heads // part.num_kv_heads
        for i, place in enumerate(q):
            if place >= 0:
                head = i // size // group
                expected = place // size // per_kv
                assert k[head * size] == starts[1] + expected * size, "a query beside another's keys"
                assert v[head * size] == starts[2] + expected * size
        queries.update(n for n in q if n >= 0)
        gate, up = gate_up[: part.intermediate_size], gate_up[part.intermediate_size :]
        assert [n - features for n in up if n >= 0] == [n for n in gate if n >= 0]
        inner.update(n for n in gate if n >= 0)
        # what comes out of these is what the next layer takes in
        assert numbers(partition.linear("model.layers.0.self_attn.o_proj")[1]) == q
        assert numbers(partition.linear("model.layers.0.mlp.down_proj")[1]) == gate
        tokens.update(range(*partition.tokens(vocab_size)))
        assert part.vocab_size == len(range(*partition.tokens(vocab_size)))
    assert queries == Counter(range(model.attention.q_size))
    assert inner == Counter(range(features))
    assert tokens == Counter(range(vocab_size))


OF_KINDS = {
    "delta": ("qwen3_5_text", {"num_hidden_layers": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 2}),
    "keys that layers share": ("gemma4_text", {"num_kv_shared_layers": 2}),
    "keys that are values": ("gemma4_text", {"attention_k_eq_v": True}),
    "sinks": ("granite_swa", {"num_hidden_layers": 4, "sliding_window": 8}),
    "packed": ("phi3", {"pad_token_id": 0}),
}
OF_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 2,
    "vocab_size_per_layer_input": 107,
    "use_double_wide_mlp": True,
    "sliding_window": 8,
}


@given(case=st.sampled_from(list(OF_KINDS)), keys=st.integers(1, 5), group=st.integers(1, 4), members=st.integers(2, 7))
def test_parts_of_all_parameters_have_the_shapes_of_the_parts_model(
    case: str, keys: int, group: int, members: int
) -> None:
    family, settings = OF_KINDS[case]
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * group}
    heads |= {"num_key_value_heads": keys, "num_attention_heads": keys * group, "hidden_size": keys * group * 8}
    model = make_model(family, **(OF_GEMMA4 if family == "gemma4_text" else {}) | heads | settings)
    assert model.family == family
    covered: dict[str, set[int]] = {name: set() for name in model.parameter_shapes()}
    for partition in partitions_of(model, members):
        of_part = partition.shard.parameter_shapes()
        assert of_part.keys() == covered.keys()
        for name, shape in model.parameter_shapes().items():
            pieces = list(partition.parameter(name))
            if partition.is_by_token(name.rpartition(".")[0]):
                pieces[0] = (Piece(*partition.tokens(shape[0])),)
            places = [range(size) if part is None else numbers(part) for size, part in zip(shape, pieces, strict=False)]
            assert (*map(len, places), *shape[2:]) == of_part[name], name
            covered[name].update(places[1 if pieces[1] else 0])
    for name, shape in model.parameter_shapes().items():
        is_narrowing = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        assert covered[name] - {-1} == set(range(shape[1 if is_narrowing else 0])), name


@given(keys=st.integers(1, 6), group=st.integers(1, 4), num_members=st.integers(2, 8))
def test_value_heads_stand_beside_the_key_head_that_they_share(keys: int, group: int, num_members: int) -> None:
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * group}
    model = make_model("qwen3_5_text", **OF_KINDS["delta"][1], **heads)
    below, whole, seen = "model.layers.0.linear_attn", model.layers[0].delta, Counter[int]()
    assert whole is not None
    for partition in partitions_of(model, num_members):
        sizes = partition.shard.layers[0].delta
        assert sizes is not None
        channels = numbers(partition.linear(f"{below}.in_proj_qkv")[0])
        assert channels == numbers(partition.parameter(f"{below}.conv1d.weight")[0])
        queries, others, values = channels[: sizes.num_keys], channels[sizes.num_keys :], channels[2 * sizes.num_keys :]
        assert [n - whole.num_keys for n in others[: sizes.num_keys] if n >= 0] == [n for n in queries if n >= 0]
        value_heads = numbers(partition.parameter(f"{below}.A_log")[0])
        of_values = [n - 2 * whole.num_keys if n >= 0 else n for n in values]
        assert of_values == numbers(partition.linear(f"{below}.in_proj_z")[0])
        assert of_values == numbers(partition.linear(f"{below}.out_proj")[1])
        assert value_heads == numbers(partition.linear(f"{below}.in_proj_b")[0])
        for i, head in enumerate(value_heads):
            if head >= 0:
                key_head = i // (sizes.value_heads // sizes.key_heads)
                assert queries[key_head * sizes.key_size] == head // group * sizes.key_size
                assert of_values[i * sizes.value_size] == head * sizes.value_size
        seen.update(head for head in value_heads if head >= 0)
    assert seen == Counter(range(keys * group))


def test_layers_that_would_differ_in_query_heads_alone_are_not_split() -> None:
    """Three heads of four key heads each, and four of three, are one key head with three or four for each of four."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_global_key_value_heads": 3}
    sizes = {"attention_k_eq_v": True, "hidden_size": 96}
    model = make_model("gemma4_text", **OF_GEMMA4 | heads | sizes | {"global_head_dim": 8})
    assert "unlike numbers of query heads in a process" in str(partition_problem(model, 4, has_blocks=False))
    assert partition_problem(model, 3, has_blocks=False) is None


@given(vocab_size=st.integers(8, 300), other=st.integers(1, 600), num_members=st.integers(1, 8))
def test_a_resized_vocabulary_leaves_tokens_where_they_are(vocab_size: int, other: int, num_members: int) -> None:
    members = partitions_of(make_model(vocab_size=vocab_size), num_members)
    before = [range(*member.tokens(vocab_size)) for member in members]
    after = [range(*member.tokens(other)) for member in members]
    assert [token for tokens in after for token in tokens] == list(range(other))
    for token in range(min(vocab_size, other)):
        assert [token in tokens for tokens in before] == [token in tokens for tokens in after]


def test_one_member_adds_the_bias_of_a_sum() -> None:
    members = partitions_of(make_model(attention_bias=True), 4)
    assert [member.adds_bias("model.layers.0.self_attn.o_proj") for member in members] == [True] + [False] * 3
    assert all(member.adds_bias("model.layers.0.self_attn.q_proj") for member in members)


@pytest.mark.parametrize(("num_members", "expected"), [(1, None), (8, None), (9, "the model has 8 query heads")])
def test_more_members_than_queries_are_refused(num_members: int, expected: str | None) -> None:
    found = partition_problem(make_model(), num_members, has_blocks=False)
    assert (found is None) == (expected is None)
    assert expected is None or expected in str(found)


def test_blocks_of_few_bits_are_not_split() -> None:
    assert "GGUF" in str(partition_problem(make_model(), 2, has_blocks=True))
    assert partition_problem(replace(make_model()), 1, has_blocks=True) is None


@pytest.mark.parametrize(
    ("family", "settings", "what"),
    [
        ("olmo2", {}, "norms over all heads"),
        ("cohere", {"use_qk_norm": True}, "norms over all heads"),
        ("gpt2", {}, "weights that are stored transposed"),
        ("cohere", {}, None),
        ("glm4", {}, None),
        ("hunyuan_v1_dense", {}, None),
    ],
)
def test_families_of_which_a_part_is_no_model_are_not_split(
    family: str, settings: dict[str, object], what: str | None
) -> None:
    found = partition_problem(make_model(family, **settings), 2, has_blocks=False)
    assert found is None if what is None else what in str(found)
    assert partition_problem(make_model(family, **settings), 1, has_blocks=False) is None
