"""How merging makes each base parameter that an adapter touches."""

from __future__ import annotations

from dataclasses import dataclass

from .base_layout import HEAD
from .contents import Contents
from .ledger import Ledger
from .saved import Twins, find_saved
from .sites import LoraSite
from .targets import ties_targets
from .token_rows import find_token_rows


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """One base parameter, in the order of computing.

    Start from the base's value, or from tensor `replaced_by`; put row i of `rows_key` in place of row `rows[i]`;
    add the pair of `site` (for a weight: scaling·B·A, then DoRA; for a bias: scaling times B's bias).
    `shape` is that of the result. A bias may be new to the base; its value there counts as zeros.
    """

    parameter: str
    shape: tuple[int, ...]
    replaced_by: str | None = None
    rows: tuple[int, ...] = ()
    rows_key: str | None = None
    site: LoraSite | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Tensors that take part, in a fixed order."""
        site = self.site
        parts: tuple[str | None, ...] = (self.replaced_by, self.rows_key)
        if site and self.parameter.endswith(".bias"):
            parts += (site.bias_key,)
        elif site:
            parts += (site.a_key, site.b_key, site.magnitude_key)
        return tuple(key for key in parts if key is not None)


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes by parameter name, and the tensors whose equality they rely on."""

    by_parameter: tuple[ParameterChange, ...]
    twins: tuple[Twins, ...]

    def unties(self, embedding: str) -> bool:
        """Whether embedding and head, one in a tied base, differ after merging."""
        made = {change.parameter: change for change in self.by_parameter}
        pair = [made.get(f"{module}.weight") for module in (embedding, HEAD)]
        if pair[0] is None or pair[1] is None:
            return pair[0] is not pair[1]
        if pair[0].site or pair[1].site:
            # Tied pairs are stored twice, once transposed; only PEFT's own tie makes them one.
            return True
        return (pair[0].rows, pair[0].rows_key) != (pair[1].rows, pair[1].rows_key) or not (
            pair[0].replaced_by == pair[1].replaced_by
            or any({pair[0].replaced_by, pair[1].replaced_by} == {t.first, t.second} for t in self.twins)
        )


def find_changes(contents: Contents, sites: tuple[LoraSite, ...], ledger: Ledger) -> Changes:
    """Put whole parameters, token rows and pairs together; enter what they ask of the verdict."""
    saved = find_saved(contents, ledger)
    rows = find_token_rows(contents, saved, ledger)
    pairs = {f"{site.module}.weight": site for site in sites}
    pairs |= {f"{site.module}.bias": site for site in sites if site.bias_key}
    changes = []
    for parameter in sorted(saved.replaced.keys() | rows.keys() | pairs.keys()):
        token_rows = rows.get(parameter)
        changes.append(
            ParameterChange(
                parameter,
                # A bias that lora_bias brings to a layer without one is new: zeros stand for the base's.
                contents.shapes.get(parameter) or (pairs[parameter].out_features,),
                saved.replaced.get(parameter),
                token_rows.indices if token_rows else (),
                token_rows.key if token_rows else None,
                pairs.get(parameter),
            )
        )
    twins = (*saved.twins, *_tied_pairs(contents, sites))
    _judge_sites(contents, sites, ledger)
    return Changes(tuple(changes), twins)


def _tied_pairs(contents: Contents, sites: tuple[LoraSite, ...]) -> tuple[Twins, ...]:
    """With ensure_weight_tying the head's pair is the embedding's, transposed."""
    if not (contents.layout.is_tied and ties_targets(contents.config)):
        return ()
    by_module = {site.module: site for site in sites}
    embedding, head = by_module.get(contents.layout.embedding), by_module.get(HEAD)
    if embedding is None or head is None:
        return ()
    return Twins(embedding.b_key, head.a_key, True), Twins(embedding.a_key, head.b_key, True)


def _judge_sites(contents: Contents, sites: tuple[LoraSite, ...], ledger: Ledger) -> None:
    """What a pair needs beyond the batched kernels."""
    for site in sites:
        if site.module not in contents.layout.batched:
            why = "a pair outside the decoder layers, so it runs as its own merged wave"
            ledger.merge_only(f"{site.a_key}: {why}", "outside the layers")
    if contents.config.use_dora and sites:
        ledger.merge_only("use_dora=True: whole weights are rescaled, so it runs as its own merged wave", "dora")
    if contents.config.lora_bias and sites:
        ledger.merge_only("lora_bias=True: biases change, so it runs as its own merged wave", "lora_bias")
