"""Random damage: an audit never raises, and never calls exact what it cannot account for."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KEYS = st.sampled_from(
    [
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "modules_to_save",
        "trainable_token_indices",
        "bias",
        "use_dora",
        "use_rslora",
        "lora_bias",
        "ensure_weight_tying",
        "init_lora_weights",
        "task_type",
        "peft_type",
        "fan_in_fan_out",
        "alora_invocation_tokens",
        "unheard_of",
    ]
)
WORDS = st.sampled_from(["q_proj", "all-linear", ".*", "(", "*", "lm_head", "embed_tokens", "norm", "", "pissa", "all"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 40) | st.floats(-2, 64) | WORDS
VALUES = (
    SCALARS
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(WORDS, SCALARS | st.lists(SCALARS, max_size=2), max_size=2)
)
SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_accounts(audit: Any) -> None:
    """Every verdict comes with its reasons, and none but `refused` with a refusal anywhere."""
    uses = [*audit.key_uses.values(), *audit.tensor_uses.values()]
    if audit.verdict == "refused":
        assert audit.reasons
        assert audit.content_sha256 is None
    else:
        assert not any(use.startswith("refused") for use in uses)
        assert audit.content_sha256
        assert audit.changes


@SETTINGS
@given(changes=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
def test_any_value_under_any_key_gets_a_verdict(plain: Any, changes: dict[str, Any]) -> None:
    file = plain.folder / "adapter_config.json"
    original = file.read_text()
    try:
        file.write_text(json.dumps(json.loads(original) | changes))
        audit = plain.audit()
    finally:
        file.write_text(original)
    check_accounts(audit)
    assert changes.keys() <= audit.key_uses.keys()
    assert len(audit.tensor_uses) == 16


@SETTINGS
@given(seed=st.integers(0, 2**32 - 1))
def test_any_damaged_byte_of_the_header_gets_a_verdict(plain: Any, seed: int) -> None:
    dice = random.Random(seed)
    file = plain.folder / "adapter_model.safetensors"
    original = file.read_bytes()
    header_bytes = int.from_bytes(original[:8], "little")
    damaged = bytearray(original)
    for _ in range(dice.randint(1, 3)):
        damaged[dice.randrange(8 + header_bytes)] = dice.choice(b'09az"{}[],:. \x00\xff')
    if damaged == original:
        return
    expected = plain.audit()
    try:
        file.write_bytes(damaged)
        audit = plain.audit()
    finally:
        file.write_bytes(original)
    check_accounts(audit)
    # What still passes must be damage to a part without meaning, like blanks or metadata.
    assert audit.verdict == "refused" or audit.content_sha256 == expected.content_sha256


@SETTINGS
@given(data=st.data())
def test_any_tensors_left_out_or_renamed_are_noticed(plain: Any, data: st.DataObject) -> None:
    tensors = plain.tensors()
    key = data.draw(st.sampled_from(sorted(tensors)))
    part = key.split(".")[-2]
    words = [(part, word) for word in ("lora_C", "base_layer", "lora_embedding_A", "modules_to_save")]
    words += [("layers.0", word) for word in ("layers.2", "layers.00", "layer.0", "layers")]
    name = data.draw(st.none() | st.sampled_from(words).map(lambda pair: key.replace(*pair)))
    if name == key:
        return
    value = tensors.pop(key)
    if name is not None:
        tensors[name] = value
    original = plain.tensors()
    try:
        plain.write(tensors)
        audit = plain.audit()
    finally:
        plain.write(original)
    assert audit.verdict == "refused"
    check_accounts(audit)
    assert key not in tensors
