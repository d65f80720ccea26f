"""`LinearRecord`: a linear layer with a packed weight, as compiled kernels read it (`linear.h`)."""

from __future__ import annotations

import ctypes

from . import ADDRESS, COUNT


class LinearRecord(ctypes.Structure):
    """`Linear` of `linear.h`. Valid as long as the tensors it names."""

    _fields_ = (
        ("w", ADDRESS),
        ("scales", ADDRESS),
        ("bias", ADDRESS),
        ("out_features", COUNT),
        ("in_features", COUNT),
        ("kind", COUNT),
        ("type", COUNT),
    )

    out_features: int
    in_features: int
