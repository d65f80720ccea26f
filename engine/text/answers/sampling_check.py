"""Checks what a row asks of its tokens against the model: tokens that it has, grammars that can be enforced."""

from __future__ import annotations

from ...request import SamplingParams

#: More tokens than any model has.
MAX_TOKENS = 1 << 31


def token_problems(sampling: SamplingParams, vocab_size: int) -> list[str]:
    """Tokens of a sampling that a model of `vocab_size` tokens does not have, as plain sentences."""
    beyond = sorted({token for token in sampling.token_ids if token >= vocab_size})
    if sampling.teacher_top_k > vocab_size:
        return [f"teacher_top_k={sampling.teacher_top_k}: expected at most {vocab_size}, the tokens of the model"]
    return [f"token {beyond[0]} of the sampling options: expected tokens up to {vocab_size - 1}"] if beyond else []


def problems_with_model(sampling: SamplingParams, vocab_size: int) -> list[str]:
    """Options of a sampling that a model of `vocab_size` tokens cannot serve, as plain sentences.

    Grammars are compiled for it in a process of their own: once for a job, not for each engine that gets the row.
    """
    problems = token_problems(sampling, vocab_size)
    if sampling.is_constrained:
        from .grammar import grammar_problem  # loads a library of its own

        problem = grammar_problem(sampling.constraint)
        problems += [problem] if problem else []
    return problems
