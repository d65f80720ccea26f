"""lorabatch: offline batch inference for many LoRA adapters over one base model, on Dask.

result = lorabatch.run(lorabatch.JobSpec(model=…, adapters=…, input=…, output=…), client=dask_client)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .jobs.spec import JobSpec
    from .pipeline.result import JobResult
    from .pipeline.run import run

__all__ = ["JobResult", "JobSpec", "__version__", "run"]

# Loaded when first asked for: `import lorabatch` alone costs nothing.
_HOMES = {"JobSpec": "jobs.spec", "JobResult": "pipeline.result", "run": "pipeline.run"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
