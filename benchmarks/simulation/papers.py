"""The papers' comparisons over seeds: a verdict for each claim, and what each tuned choice does to it.

python -m lorabatch.benchmarks.simulation.papers [--trace CSV] [--seeds 5] [--rows 200] [--only dLoRA …]

Each ratio is of the worse policy over the better one, so that more than 1 agrees with the paper: its geometric mean
over the points of a figure, then over seeds, with the 95 % t-interval of the seeds. Everything is simulated seconds and
repeats exactly. Writes `DATE-papers.md`; `--keep FOLDER` remembers parts, so that a run can be broken off.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from lorabatch.benchmarks.fidelity_results import RESULTS
from lorabatch.benchmarks.simulation import dlora_figures as dlora
from lorabatch.benchmarks.simulation import loraserve_figures as loraserve
from lorabatch.benchmarks.simulation.figure import Claim, Figure, Finding
from lorabatch.benchmarks.simulation.kept import Kept
from lorabatch.benchmarks.simulation.lengths import Lengths, read_trace, synthetic_lengths

Maker = Callable[[Lengths, int, int], list[Figure]]
#: Makers of figures, and how many times `--rows` each needs.
MAKERS: dict[str, tuple[Maker, int]] = {
    "dLoRA 10": (dlora.figure_10_and_14, 1),
    "dLoRA 11": (dlora.figure_11, 2),
    "dLoRA 12": (dlora.figure_12, 1),
    "LoRAServe 17": (loraserve.figure_17, 6),
    "LoRAServe 18": (loraserve.figure_18, 6),
    "LoRAServe 19": (loraserve.figure_19, 6),
    "LoRAServe 21": (loraserve.figure_21, 6),
    "LoRAServe 22": (loraserve.figure_22, 6),
}


@dataclass(frozen=True, slots=True)
class Tuned:
    """A choice that a paper leaves open. `chosen`, `otherwise`: a figure and a claim of it, which may exchange its
    policies; compared at the points that both figures have.
    """

    what: str
    chosen: tuple[str, Claim]
    otherwise: tuple[str, Claim]


def _tuned() -> list[Tuned]:
    ten, eleven, seventeen = "dLoRA 10", "dLoRA 11", "LoRAServe 17"
    merged = Claim("dLoRA", "Merged-only", "", dlora.LATENCY)
    unmerged = replace(merged, worse="Unmerged-only, S-LoRA")
    p90, round_robin = replace(unmerged, metric=dlora.P90), replace(merged, worse="RR")
    proactive = replace(merged, worse="Proactive")
    toppings = Claim("LoRAServe", "Toppings", "", loraserve.RATE, higher_is_better=True)
    contiguous, scaling = (
        replace(toppings, worse="S-LoRA Contiguous"),
        replace(toppings, worse="LoRAServe on 4, in proportion"),
    )
    first_token = Claim("LoRAServe", "Toppings", "", loraserve.TTFT, least=loraserve.LEAST_TTFT_S)
    lower, known, levelled = "dLoRA, alpha 1.2, beta 0.6", loraserve.KNOWN, loraserve.LEVELLED
    cheaper, seconds = "S-LoRA, kernel of 25 %", "least seconds"
    other_policy = [
        ("S-LoRA's kernel costs what dLoRA's does; 25 % of the base", ten, unmerged, replace(unmerged, worse=cheaper)),
        ("alpha and beta start at 0.9, 0.5; 1.2, 0.6", ten, unmerged, replace(unmerged, better=lower)),
        ("the same", ten, p90, replace(p90, better=lower)),
        ("credit of 200 batches; 20,000", ten, p90, replace(p90, better="dLoRA, 100 times the credit")),
        (
            "migration above 1.05 times the mean, each 5 s; 1.2, 2 s",
            f"{eleven}, one burst, memory full, long rows",
            proactive,
            replace(proactive, better="dLoRA, migration as in jobs"),
        ),
        ("Toppings is blind to ranks; knows seconds", seventeen, toppings, replace(toppings, worse=seconds)),
        ("the same", "LoRAServe 19", first_token, replace(first_token, worse=seconds)),
        ("the same", "LoRAServe 22", first_token, replace(first_token, worse=seconds)),
        (
            "adapters have copies by burst tolerance; one each",
            eleven,
            round_robin,
            replace(merged, worse=dlora.ONE_COPY),
        ),
        ("leftovers are whole; split and levelled", seventeen, contiguous, replace(contiguous, better=levelled)),
        ("the same", "LoRAServe 19", first_token, replace(first_token, better=levelled)),
        ("the same", "LoRAServe 22", first_token, replace(first_token, better=levelled)),
        (
            "demand is estimated; known",
            "LoRAServe 21",
            scaling,
            replace(scaling, better=known, worse=f"{known} on 4, in proportion"),
        ),
    ]
    other_figure = [
        ("each adapter has bursts of its own; all together", eleven, round_robin, "all adapters' bursts at once"),
        ("load 95 % of the rows' at once; twice that", eleven, round_robin, "twice the load"),
        ("a rank costs 0.37 % of a token; 1.6 %", seventeen, toppings, "first price of ranks"),
        ("the same", seventeen, contiguous, "first price of ranks"),
        ("shares of ranks 45, 5, 25, 5, 20 %; even", seventeen, toppings, "even shares of ranks"),
        ("the same", seventeen, contiguous, "even shares of ranks"),
    ]
    return [
        *(Tuned(what, (name, claim), (name, otherwise)) for what, name, claim, otherwise in other_policy),
        *(Tuned(what, (name, claim), (f"{name}, {change}", claim)) for what, name, claim, change in other_figure),
    ]


@dataclass(frozen=True, slots=True)
class Table:
    """`figures[name]`: one of each seed."""

    figures: dict[str, list[Figure]]

    def claims(self) -> list[str]:
        """One line for each claim."""
        lines = [
            "| figure | better | worse | measure | paper | mean over points (95 %) | verdict | points | largest |",
            "|---|---|---|---|---:|---|---|---|---|",
        ]
        for name, figures in self.figures.items():
            for claim in figures[0].claims:
                found = Finding.of(figures, claim)
                cells = (claim.better, claim.worse, claim.metric, claim.paper, str(found.whole or "-"), found.verdict)
                lines.append("| " + " | ".join((name, *cells, found.points_by_verdict, found.largest)) + " |")
        return lines

    def tuned(self) -> list[str]:
        """One line for each claim that a tuned choice bears on."""
        lines = [
            "| chosen; otherwise | figure | better over worse | measure | as chosen | otherwise |",
            "|---|---|---|---|---|---|",
        ]
        for one in _tuned():
            if one.chosen[0] not in self.figures:
                continue
            sides = [self.figures[name] for name, _ in (one.chosen, one.otherwise)]
            points = tuple(point for point in sides[0][0].points if point in sides[1][0].points)
            cells = []
            for figures, (_, claim) in zip(sides, (one.chosen, one.otherwise), strict=True):
                found = Finding.of([figure.at(points) for figure in figures], claim)
                cells.append(f"{found.whole}: {found.verdict}" if found.whole else found.verdict)
            claim = one.chosen[1]
            compared = f"{claim.better} over {claim.worse}"
            lines.append("| " + " | ".join((one.what, one.chosen[0], compared, claim.metric, *cells)) + " |")
        return lines

    def numbers(self) -> list[str]:
        """Means over seeds of every policy, metric and point."""
        lines = []
        for name, figures in self.figures.items():
            for metric, of_policy in figures[0].values.items():
                points = figures[0].points
                lines += [f"### {name}: {metric}", f"| {figures[0].x_label} |" + "".join(f" {p:.3g} |" for p in points)]
                lines.append("|---|" + "---:|" * len(points))
                for policy in of_policy:
                    means = np.mean([figure.values[metric][policy] for figure in figures], axis=0)
                    lines.append(f"| {policy} |" + "".join(f" {value:.3g} |" for value in means))
                lines.append("")
        return lines


def main() -> None:
    """Parse, simulate, print, write."""
    parser = argparse.ArgumentParser(prog="python -m lorabatch.benchmarks.simulation.papers", description=__doc__)
    parser.add_argument("--trace", type=Path, help="AzureLLMInferenceTrace_conv.csv; else lengths are drawn")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200, help="requests of the shortest runs; others have multiples")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of figures' names")
    parser.add_argument("--keep", type=Path, help="folder for parts that are done")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result page")
    chosen = parser.parse_args()
    lengths = read_trace(chosen.trace) if chosen.trace else synthetic_lengths()
    kept, figures = Kept(chosen.keep), dict[str, list[Figure]]()
    for name, (make, factor) in MAKERS.items():
        if not name.startswith(tuple(chosen.only)):
            continue
        for seed in range(chosen.seeds):
            work = partial(make, lengths, factor * chosen.rows, seed)
            for figure in kept.get(f"{name} seed {seed}", work):
                figures.setdefault(figure.name, []).append(figure)
    table = Table(figures)
    claims, tuned = table.claims(), table.tuned()
    print("\n".join([*claims, "", *tuned]))
    path = chosen.output / f"{datetime.now(UTC):%Y-%m-%d}-papers.md"
    path.write_text(
        "\n".join(_page(lengths, chosen.seeds, chosen.rows, claims, tuned, table.numbers())).rstrip() + "\n"
    )
    print(f"wrote {path}")


def _page(
    lengths: Lengths, num_seeds: int, num_rows: int, claims: list[str], tuned: list[str], numbers: list[str]
) -> list[str]:
    return [
        f"# The papers' comparisons, {num_seeds} seeds, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m lorabatch.benchmarks.simulation.papers --seeds {num_seeds} --rows {num_rows}`;",
        f"{lengths.source}.",
        "Simulated seconds, which repeat exactly. Ratios are of the worse policy over the better one (more",
        "than 1 agrees with the paper): geometric means over the points of a figure and over seeds, with 95 %",
        "t-intervals. Verdicts: yes (the interval is above 1), same (it holds 1), no (it is below 1). Of",
        "parity: yes unless it is below 1. No ratio: the better policy's value is too near zero.",
        "",
        "## Claims",
        *claims,
        "",
        "## What was tuned, and its effect",
        "Ratios at the points that both sides have.",
        "",
        *tuned,
        "",
        "## Means over seeds",
        *numbers,
    ]


if __name__ == "__main__":
    main()
