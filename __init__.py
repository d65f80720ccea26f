"""lorabatch: offline batch inference for many LoRA adapters over one base model, on Dask.

result = lorabatch.run(model=…, adapters=…, input=…, output=…)
job = lorabatch.submit(model=…, adapters=…, input=…, output=…)
answers = job.to_pandas()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import Job, JobPlan, audit, plan, run, status, submit
    from .engine.errors import EngineError
    from .jobs.errors import (
        ErrorBudgetError,
        InputRowsError,
        JobCancelledError,
        JobError,
        JobFailedError,
        JobInterruptedError,
        JobLimitError,
        JobRequestError,
        OutputConflictError,
        StorageError,
    )
    from .jobs.options.types import Stage
    from .jobs.spec import JobSpec
    from .jobs.status.job_status import JobStatus
    from .pipeline.result import JobResult

__all__ = [
    "EngineError",
    "ErrorBudgetError",
    "InputRowsError",
    "Job",
    "JobCancelledError",
    "JobError",
    "JobFailedError",
    "JobInterruptedError",
    "JobLimitError",
    "JobPlan",
    "JobRequestError",
    "JobResult",
    "JobSpec",
    "JobStatus",
    "OutputConflictError",
    "Stage",
    "StorageError",
    "__version__",
    "audit",
    "plan",
    "run",
    "status",
    "submit",
]

# Loaded when first asked for: `import lorabatch` alone costs nothing. Errors are in `jobs.errors`, the rest in `api`.
_HOMES = {
    "EngineError": "engine.errors",
    "JobResult": "pipeline.result",
    "JobSpec": "jobs.spec",
    "Stage": "jobs.options.types",
    "JobStatus": "jobs.status.job_status",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES.get(name, "jobs.errors" if name.endswith("Error") else "api")
    value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
