"""Registers the adapters that an engine may be asked for, by content hash, and reads their tensors when needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import AdapterRefusedError, AdapterUnusableError, curable
from ..model_config.classifier import problem_type_of
from ..model_config.model import ModelConfig
from ..model_config.partition import Partition
from ..peft import AdapterAudit, audit_adapter
from ..peft.random import dummy_adapter_weights, dummy_audit
from ..peft.weights import AdapterWeights, load_adapter
from ..request import Request
from .adapter_layout import lay_out
from .packed import PackedAdapter, pack_adapter, pack_for_members, random_packed, read_packed, shapes_of_audit

BASE_CODE = -1


class AdapterRegistry:
    """Audits the headers of the adapters that it is given and numbers them, so that batchers see small integers.
    `page_elements`: numbers of a page of the pool. `partitions`: parts of a group's members, each of whose pools has a
    part of every adapter. `in_panels`: whether kernels read adapters in panels.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        page_elements: int,
        partitions: Sequence[Partition] = (),
        *,
        in_panels: bool = False,
    ) -> None:
        self._model = model
        self._partitions = partitions
        self._part = part = partitions[0].shard if partitions else model
        self._shapes = part.linear_shapes()
        self._dtype = dtype
        self._device = device
        self._page_elements = page_elements
        self._in_panels = in_panels
        self._audits: dict[str, AdapterAudit] = {}
        # Content hashes of adapters with another id.
        self._contents: dict[str, str] = {}
        self.code_of: dict[str | None, int] = {None: BASE_CODE}
        self._id_of_code: list[str] = []
        #: Numbers that each adapter's matrices take in a pool.
        self.num_elements: dict[str, int] = {}
        #: Pages that each adapter takes in a pool, of those that may be in one.
        self.num_pages: dict[str, int] = {}
        self._ranks: NDArray[np.float64] = np.zeros(0)
        of_layers = map(part.layer_shapes, range(part.num_layers))
        #: Numbers of an adapter of rank 1 on all linear layers.
        self.elements_per_rank = sum(sum(shape) for shapes in of_layers for shape in shapes.values())
        self._dummy_ids: set[str] = set()
        self._heads: dict[str, Tensor] = {}

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._audits

    def register(self, adapter_id: str, folder: Path, name: str, content_sha256: str = "") -> None:
        """Make an adapter known from its configuration and headers; loading it checks that its content is
        `content_sha256`, or `adapter_id`.

        Raises `AdapterRefusedError` when it cannot be applied exactly.
        """
        if adapter_id in self._audits:
            return
        audit = audit_adapter(folder, self._model, name, check_values=False)
        if audit.verdict == "refused":
            raise AdapterRefusedError("; ".join(audit.reasons))
        if content_sha256:
            self._contents[adapter_id] = content_sha256
        self._enter(adapter_id, audit)

    def register_dummy(self, name: str, rank: int) -> str:
        """Make an adapter of random weights known; returns its id."""
        audit = dummy_audit(self._model, rank, name)
        assert audit.content_sha256 is not None, f"{name}: random adapters have a hash"
        if audit.content_sha256 not in self._audits:
            self._enter(audit.content_sha256, audit)
            self._dummy_ids.add(audit.content_sha256)
        return audit.content_sha256

    def _enter(self, adapter_id: str, audit: AdapterAudit) -> None:
        self._audits[adapter_id] = audit
        shapes = []
        for module, rank, inputs, outputs, scaling in shapes_of_audit(audit):
            outputs, inputs = self._shapes.get(module, (outputs, inputs))  # those of a member's part
            shapes.append((module, rank, inputs, outputs, scaling))
        # asked before every step, for every adapter that rows wait with
        self.num_elements[adapter_id] = sum(rank * (inputs + outputs) for _, rank, inputs, outputs, _ in shapes)
        if audit.verdict == "exact":
            layout = lay_out(shapes, self._part, self._page_elements, in_panels=self._in_panels)
            self.num_pages[adapter_id] = layout.num_pages
        self.code_of[adapter_id] = len(self._id_of_code)
        self._id_of_code.append(adapter_id)

    def id_of(self, code: int) -> str:
        """The adapter behind a number."""
        return self._id_of_code[code]

    def name_of(self, adapter_id: str) -> str:
        """The adapter's name, for messages."""
        return self._audits[adapter_id].name

    def must_merge(self, code: int) -> bool:
        """Whether the adapter is exact only when merged."""
        return self.must_merge_id(self._id_of_code[code])

    def must_merge_id(self, adapter_id: str) -> bool:
        """`must_merge` by content hash."""
        return self._audits[adapter_id].verdict == "exact-by-merge"

    def vocab_size(self, adapter_id: str | None) -> int:
        """Token ids that a row may hold: an adapter with a resized vocabulary has its own."""
        return self._model.vocab_size if adapter_id is None else self._audits[adapter_id].vocab_size

    def audit_of(self, adapter_id: str) -> AdapterAudit:
        """The audit by which the adapter was registered."""
        return self._audits[adapter_id]

    def ranks(self) -> NDArray[np.float64]:
        """Rank of every adapter by its number, float64 [num_adapters]: as if it stood on all linear layers, so that
        an adapter of few layers counts for what it computes."""
        if len(self._ranks) < len(self._id_of_code):
            new = [self.num_elements[adapter_id] for adapter_id in self._id_of_code[len(self._ranks) :]]
            self._ranks = np.concatenate([self._ranks, np.array(new, np.float64) / self.elements_per_rank])
        return self._ranks

    def task_problem(self, request: Request) -> str:
        """Why a row's adapter, or the base, cannot do what the row asks, as a sentence; "" if it can."""
        sampling = request.sampling
        if sampling.task == "classify" and not self.labels(request.adapter_id)[0]:
            whose = (
                "the base model has"
                if request.adapter_id is None
                else f"adapter {self.name_of(request.adapter_id)!r} has"
            )
            return f"task='classify': {whose} no head that classifies"
        if self._model.is_classifier and not sampling.is_pooled:
            return "the base model classifies text and has no head that generates it"
        return ""

    def labels(self, adapter_id: str | None) -> tuple[tuple[str, ...], str]:
        """Labels by which rows of an adapter are classified, and what their numbers mean; none where they cannot be."""
        audit = None if adapter_id is None else self._audits[adapter_id]
        if audit is not None and audit.labels:
            return audit.labels, audit.problem_type
        labels = self._model.labels if self._model.is_classifier else ()
        return labels, problem_type_of(self._model.problem_type, len(labels))

    def head(self, adapter_id: str) -> Tensor | None:
        """The head of an adapter that was read, [num_labels, embedding_size]; None if it has none of its own."""
        return self._heads.get(adapter_id)

    def load(self, adapter_id: str) -> AdapterWeights:
        """Read the adapter's tensors from its folder to the device. Raises `AdapterUnusableError`."""
        return self._load(adapter_id, self._device)

    def load_packed(self, adapter_id: str) -> PackedAdapter:
        """Read what the pool holds of an adapter, and its head, which stays here. Any thread may call. Raises
        `AdapterUnusableError`."""
        packed = self._read_packed(adapter_id)
        if packed.head is not None:
            self._heads[adapter_id] = packed.head
        return packed

    def _read_packed(self, adapter_id: str) -> PackedAdapter:
        """Read what the pool holds of an adapter to the host; random ones are made where they are to go, for a group on
        the host. Raises `AdapterUnusableError`."""
        is_dummy = adapter_id in self._dummy_ids
        pool = self._dtype, self._page_elements
        if not is_dummy and not self._partitions:
            audit, content = self._audits[adapter_id], self._contents.get(adapter_id, adapter_id)
            try:
                return read_packed(
                    *(audit, content, self._model, *pool), in_panels=self._in_panels, device=self._device
                )
            except (AdapterRefusedError, OSError) as error:
                raise AdapterUnusableError(adapter_id, curable(error)) from error
        if is_dummy and self._device.type == "cuda" and not self._partitions:
            return random_packed(self._audits[adapter_id], self._model, *pool, self._device)
        weights = self._load(adapter_id, self._device if is_dummy else torch.device("cpu"))
        if self._partitions:
            return pack_for_members(weights, self._partitions, *pool, in_panels=self._in_panels, device=self._device)
        return pack_adapter(weights, self._model, *pool, in_panels=self._in_panels, device=self._device)

    def _load(self, adapter_id: str, device: torch.device) -> AdapterWeights:
        if adapter_id in self._dummy_ids:
            place = torch.device("cpu") if self._partitions and device.type == "cuda" else device
            return dummy_adapter_weights(self._audits[adapter_id], self._dtype, place)
        try:
            weights = load_adapter(self._audits[adapter_id], device, self._contents.get(adapter_id, adapter_id))
        except (AdapterRefusedError, OSError) as error:
            raise AdapterUnusableError(adapter_id, curable(error)) from error
        if weights.head is not None:
            self._heads[adapter_id] = weights.head
        return weights
