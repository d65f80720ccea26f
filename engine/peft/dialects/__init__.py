"""Dialects: forms other than PEFT's in which people have adapters, read as PEFT's configuration and tensors.

Only `translate` of this folder and `folder.py` know of them. What they yield has PEFT's names, orientation and order,
so that verdicts and content hashes do not depend on the form.
"""

from .dialect import Dialect, translate
from .gguf import read_gguf_header

__all__ = ["Dialect", "read_gguf_header", "translate"]
