"""The zoo of adapters over every family: each is served as PEFT computes it, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_zoo import WEIGHTS, Specimen, build_zoo
from other_forms import PICKLE
from peft_oracle import make_engine, register_all, serve
from tiny_bases import DENSE_FAMILIES, FAMILIES, WRAPPED, whole_model, write_wrapper
from trained_adapters import Base

from lorabatch.engine.config import Mode, read_model_config
from lorabatch.engine.model_config import SUPPORTED_MODEL_TYPES
from lorabatch.engine.peft import AdapterAudit, audit_adapter
from lorabatch.engine.peft.dialects import pickled
from lorabatch.engine.request import Request, Result, SamplingParams

MakeFolder = Callable[..., Path]
NUM_TOKENS = 3
PICKLED = "weights pickled"
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, logprobs=True, ignore_eos=True)
ALWAYS = ("gemma2", "gpt2", "images: gemma3")
BASES = [*FAMILIES, *DENSE_FAMILIES, *(f"images: {case}" for case in WRAPPED)]
EVERY = [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.long) for case in BASES]


def open_case(case: str, folder: Path, make_model: MakeFolder, compare: Any) -> Base:
    """The tiny base of a case, in its folder and in transformers."""
    if case.startswith("images: "):
        write_wrapper(folder, case.removeprefix("images: "), make_model)
        return Base(folder, read_model_config(folder), whole_model(folder))
    family, settings = (FAMILIES | DENSE_FAMILIES)[case]
    make_model(folder, family, **settings)
    return Base(folder, read_model_config(folder), compare.model(folder))


def test_every_family_and_wrapper_has_a_base() -> None:
    families = {family for family, _ in (FAMILIES | DENSE_FAMILIES).values()}
    assert families | {family for family, *_ in WRAPPED.values()} == set(SUPPORTED_MODEL_TYPES)


class Oracle:
    """Greedy tokens of PEFT in fp32 and their log-probabilities, one adapter at a time."""

    def __init__(self, base: Base, root: Path, prompt: tuple[int, ...]) -> None:
        self._base, self._root, self._prompt = base, root, prompt
        self._found: dict[tuple[str, int | None], tuple[list[int], torch.Tensor]] = {}

    @torch.no_grad()
    def answer(self, source: str, vocab_size: int | None = None) -> tuple[list[int], torch.Tensor]:
        """Tokens, and log-probabilities of all tokens at their places, [NUM_TOKENS, vocab_size]. "": the base."""
        from peft import PeftModel

        if (source, vocab_size) not in self._found:
            model = self._base.fresh()
            if vocab_size is not None:
                model.resize_token_embeddings(vocab_size)
            if source:
                model = PeftModel.from_pretrained(model, self._root / source)
            tokens: list[int] = []
            places = []
            for _ in range(NUM_TOKENS):
                ids = torch.tensor([[*self._prompt, *tokens]])
                places.append(model.eval()(input_ids=ids).logits[0, -1].log_softmax(-1))
                tokens.append(int(places[-1].argmax()))
            self._found[source, vocab_size] = tokens, torch.stack(places)
        return self._found[source, vocab_size]

    def difference(self, specimen: Specimen, result: Result) -> str:
        """What is wrong with a row's answer; "" if nothing is."""
        tokens, places = self.answer(specimen.source, specimen.vocab_size)
        if result.error is not None:
            return str(result.error)
        for place, expected, token, logprob in zip(
            places, tokens, result.token_ids, result.token_logprobs or (), strict=True
        ):
            distance = abs(float(place[token]) - logprob), float(place[expected] - place[token])
            if max(distance) >= 1e-3:
                return f"{result.token_ids}, expected {tokens}; log-probability off by {max(distance):.4f}"
            if token != expected:  # a tie: what follows is another row
                return ""
        return ""


def wrong_verdicts(zoo: Mapping[str, Specimen], audits: Mapping[str, AdapterAudit]) -> dict[str, str]:
    """Name -> what is wrong with its audit."""
    wrong = {}
    for name, specimen in zoo.items():
        audit = audits[name]
        text = "\n".join(audit.reasons)
        if audit.verdict != specimen.verdict:
            wrong[name] = f"{audit.verdict}, expected {specimen.verdict}: {text}"
        elif specimen.verdict == "refused" and not (specimen.word in text and f"adapter {name!r}" in text):
            wrong[name] = f"its refusal lacks {specimen.word!r}: {text}"
        elif specimen.is_same and audit.content_sha256 != audits[specimen.source].content_sha256:
            wrong[name] = f"another content than {specimen.source}"
    return wrong


def rounds(audits: Mapping[str, AdapterAudit]) -> Iterator[list[str]]:
    """Names in groups without two of one content: of these an engine reads one folder alone."""
    left = list(audits)
    while left:
        by_content = {audits[name].content_sha256: name for name in reversed(left)}
        yield (group := list(by_content.values()))
        left = [name for name in left if name not in group]


def answers(base: Base, mode: Mode, folders: dict[str, Path], prompt: tuple[int, ...]) -> dict[str, Result]:
    """The row of each adapter, all in one batch with the base's, by name."""
    engine = make_engine(base.folder, mode)
    ids: dict[str, str | None] = {"": None, **register_all(engine, folders)}
    return serve(engine, [Request(name, prompt, adapter_id, SAMPLING) for name, adapter_id in ids.items()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", EVERY)
def test_every_adapter_is_served_as_peft_computes_it_or_refused_by_name(
    case: str, tmp_path: Path, make_model: MakeFolder, compare: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base = open_case(case, tmp_path / "base", make_model, compare)
    root = tmp_path / "adapters"
    zoo = build_zoo(root, base, is_wrapped=case.startswith("images: "))
    pickled.run({"source": f"{root / PICKLED / PICKLE}", "target": f"{root / PICKLED / WEIGHTS}"})
    audits = {name: audit_adapter(root / name, base.config, name) for name in zoo}
    wrong = wrong_verdicts(zoo, audits)
    served = {name: audits[name] for name, specimen in zoo.items() if specimen.source and name not in wrong}
    prompt = compare.prompt(30, make_engine(base.folder))
    oracle = Oracle(base, root, prompt)
    of_base = oracle.answer("")[1]
    for number, names in enumerate(rounds(served)):
        folders = {name: root / name for name in names}
        for mode in ("unmerged", "merged") if number == 0 else ("unmerged",):
            for name, result in answers(base, mode, folders, prompt).items():
                specimen = zoo.get(name, Specimen("exact"))
                if difference := oracle.difference(specimen, result):
                    wrong[name] = f"{mode}: {difference}"
                elif name and result.mode != ("merged" if specimen.verdict == "exact-by-merge" else mode):
                    wrong[name] = f"runs {result.mode}"
                places = oracle.answer(specimen.source, specimen.vocab_size)[1][:, : of_base.shape[1]]
                assert not name or (places - of_base)[0].abs().max() > 0.01, f"{name} changes too little to show"
    with capsys.disabled():
        print(f"\n{case}: {len(served)} served, {len(zoo) - len(served)} refused, {len(wrong)} wrong")
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
