"""What computes the steps of a decoder."""

from __future__ import annotations

from torch import Tensor

from .completion import Completion
from .config import EngineConfig
from .decoder import Decoder
from .device_decoder import DeviceDecoder
from .device_runner import DeviceRunner
from .host_runner import HostRunner
from .live_weights import LiveWeights
from .step_batch import PageLayout
from .step_runner import StepRunner


def choose_runner(
    decoder: Decoder,
    live: LiveWeights,
    memory: Tensor,
    layout: PageLayout,
    config: EngineConfig,
    completion: Completion,
) -> StepRunner:
    """Steps over `memory` (the flat pool): on a device by its kernels, else on the host. `live`: of the decoder."""
    if isinstance(decoder, DeviceDecoder):
        return DeviceRunner(decoder, live, memory, layout, config, completion.stop_tokens)
    return HostRunner(decoder, memory, layout, completion.stop_tokens)
