"""Triton's interpreter without work that changes nothing, which takes more than half of its time.

- On every call of a function in a kernel it replaces the functions of `triton.language` by its own, for 3 ms. They have
  been since the kernel's launch, and stay until it ends.
- For every sum it computes whether it overflows, for an assertion that it makes in its debug mode only.
- For every number it makes a dictionary of all types to look up one.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Leave out that work. A version of Triton that does it in another way is left as it is."""
    if not all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_lang", "_get_np_dtype")):
        return
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _once_a_launch(patch: Any) -> Any:
    patched: set[tuple[bool, bool]] = set()

    class OfLaunch:
        """Restores what was replaced when a launch began, as the interpreter's own does."""

        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            patched.clear()
            self._scope.restore()

    def patch_once(fn: FunctionType) -> Any:
        seen = list(fn.__globals__.values())
        modules = any(value is tl for value in seen), any(value is tl.core for value in seen)
        if modules in patched:
            return None
        is_launch = not patched
        patched.add(modules)
        scope = patch(fn)
        return OfLaunch(scope) if is_launch else scope

    return patch_once


def _remembered(find: Any) -> Any:
    found: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    return remembered
