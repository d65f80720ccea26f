"""Checks what a row asks of its tokens against the model: tokens that it has, grammars that can be enforced."""

from __future__ import annotations

from ..request import SamplingParams


def problems_with_model(sampling: SamplingParams, vocab_size: int) -> list[str]:
    """What a model of `vocab_size` tokens cannot do of a sampling, as plain sentences."""
    beyond = sorted({token for token in sampling.token_ids if token >= vocab_size})
    problems = [f"token {beyond[0]} of the sampling options: expected tokens up to {vocab_size - 1}"] if beyond else []
    if sampling.is_constrained:
        from .grammar import grammar_problem  # loads a library of its own

        problem = grammar_problem(sampling.constraint)
        problems += [problem] if problem else []
    return problems
