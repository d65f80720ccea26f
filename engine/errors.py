"""Errors of the engine.

    EngineError                 what is asked for is not served exactly: a model, a device with these settings, a schema
    ├── ModelFilesError         the model folder is incomplete or damaged
    ├── TokenizerError          the tokenizer makes no tokens of a text, its chat template no prompt of messages
    ├── AdapterRefusedError     an adapter cannot be applied exactly (the audit says why)
    └── AdapterUnusableError    an adapter passed its audit, but cannot be loaded or merged now; costs its rows only

Each message names the field or file, its value, what was expected, and what to do next.
"""

from __future__ import annotations

#: Next step in the message about a row that failed for a reason outside it: another run computes the row again.
RUN_AGAIN = "Run the same command again when that is put right: it computes these rows again."


def curable(error: object) -> str:
    """The message of an error about files, with what to do about it."""
    return f"{str(error).rstrip('.')}. {RUN_AGAIN}"


class EngineError(Exception):
    """Base of everything the engine raises on purpose. It is raised itself where something is not served exactly: a
    kind or setting of a model, a keyword of a schema, or a device that is not there, does not multiply in the number
    format asked for, would promise nothing in mode `exact`, or holds no page.
    """


class ModelFilesError(EngineError):
    """A model file is missing, unreadable, or disagrees with `config.json`."""


class TokenizerError(EngineError):
    """The tokenizer makes no tokens of a text, or its chat template cannot render messages; or they take too long."""


class AdapterRefusedError(EngineError):
    """The adapter cannot be applied exactly."""


class AdapterUnusableError(EngineError):
    """An adapter passed its audit and cannot be loaded or merged all the same: a file is gone, a merge overflows."""

    def __init__(self, adapter_id: str, reason: str) -> None:
        super().__init__(reason)
        self.adapter_id = adapter_id
