"""Reads PEFT adapter folders, audits them against a base, and (in `weights`) loads them.

Everything named here is free of torch; `lorabatch.engine.peft.weights` is the part that needs it.
"""

from .audit import AdapterAudit, audit_adapter, find_adapter_folders
from .findings import Verdict
from .sites import LoraSite, ParameterChange

__all__ = [
    "AdapterAudit",
    "LoraSite",
    "ParameterChange",
    "Verdict",
    "audit_adapter",
    "find_adapter_folders",
]
