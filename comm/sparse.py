# SPDX-License-Identifier: Apache-2.0
"""The sparse collective: gradients travel as their non-zero blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.agreement import Header, agree, digest_of
from wavemare.comm.arguments import bucket_key, check_bucket, check_settings, pieces_of
from wavemare.comm.blocks.layout import Piece
from wavemare.comm.blocks.masks import Masks
from wavemare.comm.blocks.rows import RowReducer, check_rows
from wavemare.comm.calls import Calls
from wavemare.comm.compress.compressors import Compressor, make_compressor
from wavemare.comm.config import HALVES, CompressorConfig, Mode
from wavemare.comm.executors import Scratch
from wavemare.comm.executors.hierarchy import Hierarchy
from wavemare.comm.reduction import Reduction
from wavemare.comm.selection.calibration import calibrate
from wavemare.comm.selection.cost import EXECUTORS, IN_ORDER, Constants
from wavemare.comm.selection.selector import ExecutorChoice, choose_executor
from wavemare.comm.statistics import Statistics
from wavemare.comm.transport import Transport, open_transport
from wavemare.comm.transport.choice import Choice, Staging
from wavemare.comm.worker import Handle
from wavemare.errors import ConfigError

__all__ = ["SparseComm"]


class SparseComm:
    """Sums gradients over a group of ranks, moving the blocks that are not zero.

    All ranks of the group make one together and call its methods in the same order. Collectives
    run one after the other on a thread of their own; each method returns a `Handle`, and has ended
    unless ``async_op`` is true.

    Args:
        group: An MPI communicator, a torch process group, a `Transport` (which then is used by
            nobody else, as it is, and closed with this), or None for all ranks.
        block: Elements per block; 64 to 4096 are useful.
        mode: ``auto`` or the name of an executor.
        average: Whether results are means rather than sums.
        deterministic: Whether sums are made in the order of the ranks, from +0.0, in float32 for
            16-bit floats: all executors then give the same bits, and so do all ranks.
        hierarchical: Whether ranks of one node first sum densely among themselves, in `allreduce_`;
            the order is then that of the ranks within each node, and of the nodes.
        compressor: What each rank leaves out of its gradients, and adds to the next ones.
        transport: ``mpi``, ``torch`` or ``auto``: what the launch offers.
        staging: How an accelerator's tensors travel: ``direct``, ``pinned`` or ``auto``.
        timeout_s: Seconds after which a silent peer counts as lost.
        constants: Of the cost model; measured here if omitted and needed.
        device: Where buckets will be; that of the present accelerator if omitted.

    Raises:
        ConfigError: A value cannot be.
        CommError: There is no such transport, a peer was lost, or the ranks' settings differ.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        block: int = 256,
        mode: Mode = "auto",
        average: bool = True,
        deterministic: bool = True,
        hierarchical: bool = False,
        compressor: Compressor | CompressorConfig | None = None,
        transport: Choice = "auto",
        staging: Staging = "auto",
        timeout_s: float = 300.0,
        constants: Constants | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_settings(block, mode, deterministic)
        if isinstance(compressor, CompressorConfig):
            compressor = make_compressor(compressor, block)
        self.block = block
        self.mode = mode
        self.average = average
        self.deterministic = deterministic
        self.compressor = compressor
        device = torch.device(device or _present_device())
        measures = constants is None and mode == "auto"
        self._transport = open_transport(
            group, choice=transport, staging=staging, timeout_s=timeout_s
        )
        self._hierarchy: Hierarchy | None = None
        stages = measures and self._transport.stages(torch.empty(0, device=device))
        alike = digest_of(mode, deterministic, hierarchical, measures, stages)
        try:
            header = Header(0, "SparseComm", 0, torch.float32, block, terms=alike)
            agree(self._transport, header)  # before they measure, each in its own way
            self._hierarchy = Hierarchy.find(self._transport) if hierarchical else None
            between = self._hierarchy.between if self._hierarchy else self._transport
            if measures and between.size > 1:
                constants = calibrate(between, block, device, everyone=self._transport)
        except BaseException:
            if self._hierarchy is not None:
                self._hierarchy.close()
            self._transport.close()
            raise
        self.constants = constants or Constants()
        scratch = Scratch()
        self._reduction = Reduction(
            self._transport,
            self._hierarchy,
            block=block,
            mode=mode,
            constants=self.constants,
            allowed=IN_ORDER if deterministic else EXECUTORS,
            compressor=compressor,
            scratch=scratch,
        )
        self._rows = RowReducer(self._transport, scratch, self.constants, mode)
        self._scratch = scratch
        transports = [self._transport]
        if self._hierarchy:
            transports += [self._hierarchy.within, self._hierarchy.between]
        terms = digest_of(alike, self.constants)
        self._calls = Calls(transports, self._reduction, block, terms)
        self.totals = self._calls.totals

    # --- what this is -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._transport.size

    @property
    def transport(self) -> Transport:
        """The transport."""
        return self._transport

    @property
    def num_scratch_bytes(self) -> int:
        """Bytes held to pack and receive blocks; they grow to what the largest call needed."""
        return self._scratch.num_bytes

    def plan(
        self, masks: Masks | np.ndarray[Any, Any] | Tensor, itemsize: int = 4
    ) -> ExecutorChoice:
        """Say what ``auto`` would do with a bucket: a pure function of its masks, without history.

        Args:
            masks: (N, nb), whether each rank's block is not zero.
            itemsize: Bytes of an element.

        Returns:
            The choice, which prints as a table.
        """
        if not isinstance(masks, Masks):
            masks = Masks.of(masks.cpu().numpy() if isinstance(masks, Tensor) else masks)
        allowed = self._reduction.selector.allowed
        return choose_executor(masks, self.block * itemsize, self.constants, allowed)

    # --- collectives ------------------------------------------------------------------------------

    def allreduce_(
        self,
        flat: Tensor,
        *,
        key: str | None = None,
        weights: Tensor | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Sum (or average) a bucket over all ranks, in place.

        Args:
            flat: (E,), contiguous; float32, bfloat16, float16, float64 or int32.
            key: Name of the bucket, under which its history and residual are kept; by default its
                size and type. With a compressor it must be given.
            weights: (E,), the weights whose gradient it is, if the compressor asks for them.
            async_op: Whether to return at once.

        Returns:
            A handle, whose ``wait`` returns ``flat``.

        Raises:
            ConfigError: The tensor has another layout or type; nothing was sent.
            CommError: A peer was lost, or calls something else.
        """
        scale = self._scale(flat)
        key = bucket_key(key, flat, weights, self.compressor)
        data = flat.detach()  # sums are no part of a graph, even of a leaf that requires gradients

        def work(stats: Statistics) -> Tensor:
            if data.numel():
                self._reduction.all_reduce(data, key, scale, weights, stats)
            return flat

        return self._calls.submit("allreduce_", flat, work, async_op, self.average, key=key)

    def reduce_scatter_(
        self,
        flat: Tensor,
        partition: Sequence[Piece] | Sequence[int],
        *,
        key: str | None = None,
        weights: Tensor | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Sum (or average) a bucket over all ranks, each range on the rank that owns it.

        Args:
            flat: As for `allreduce_`. Afterwards this rank's own ranges hold the result and the
                others are undefined.
            partition: Who owns what: pieces, or the N + 1 borders of one range for each rank. The
                same on all ranks.
            key: As for `allreduce_`.
            weights: As for `allreduce_`.
            async_op: Whether to return at once.

        Raises:
            ConfigError: As for `allreduce_`; or the mode has no reduce-scatter.
        """
        if self.mode not in ("auto", *HALVES):
            reason = "it has no reduce_scatter_"
            raise ConfigError("mode", self.mode, reason, f"Choose auto, {' or '.join(HALVES)}")
        scale = self._scale(flat)
        pieces = pieces_of(partition, flat.numel(), self.size)
        if key is None and self.compressor is None:
            key = f"{flat.numel()} {flat.dtype}"
        key = bucket_key(f"scatter {key}" if key else None, flat, weights, self.compressor)
        data = flat.detach()

        def work(stats: Statistics) -> Tensor:
            if data.numel():
                self._reduction.reduce_scatter(data, pieces, key, scale, weights, stats)
            return flat

        return self._calls.submit(
            "reduce_scatter_", flat, work, async_op, self.average, pieces, key=key
        )

    def allgather_(
        self, flat: Tensor, partition: Sequence[Piece] | Sequence[int], *, async_op: bool = False
    ) -> Handle:
        """Give all ranks each range as it is on the rank that owns it.

        Args:
            flat: As for `allreduce_`; its ranges of other owners are written.
            partition: As for `reduce_scatter_`.
            async_op: Whether to return at once.
        """
        check_bucket(flat)
        pieces = pieces_of(partition, flat.numel(), self.size)
        data = flat.detach()

        def work(stats: Statistics) -> Tensor:
            self._reduction.all_gather(data, pieces, stats)
            return flat

        return self._calls.submit("allgather_", flat, work, async_op, self.average, pieces)

    def allreduce_rows_(
        self, ids: Tensor, rows: Tensor, num_rows: int | None = None, *, async_op: bool = False
    ) -> Handle:
        """Sum (or average) some rows of a table, such as an embedding's gradient, over all ranks.

        Modes ``pushpull`` and ``allgather`` hold for rows as well; in all others the faster of
        these two is chosen. Of large tables, or of none that is known, ranks exchange their ids.

        Args:
            ids: (k,), int64: which rows; a row that stands several times is summed first.
            rows: (k, dim), contiguous: their values.
            num_rows: Rows of the table; None if ids can be any number.
            async_op: Whether to return at once.

        Returns:
            A handle, whose ``wait`` returns (ids, rows): ascending ids of the rows that some rank
            gave, and their sums, the same on all ranks.

        Raises:
            ConfigError: Shapes or types do not fit, or an id is not a row; nothing was sent.
        """
        check_rows(ids, rows, num_rows)
        scale = self._scale(rows.view(-1))
        data = rows.detach()
        num_items = -1 if num_rows is None else num_rows

        def work(stats: Statistics) -> tuple[Tensor, Tensor]:
            return self._rows.reduce(ids, data, num_rows, scale, stats)

        return self._calls.submit(
            "allreduce_rows_", rows, work, async_op, self.average, num_items=num_items
        )

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved with a checkpoint: the compressor's residuals."""
        return {"compressor": self.compressor.state_dict()} if self.compressor else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `state_dict`.

        Raises:
            CheckpointError: It is of another compressor.
        """
        if self.compressor is not None and "compressor" in state:
            self.compressor.load_state_dict(state["compressor"])

    def close(self) -> None:
        """End the collectives under way, then the thread and the transport."""
        self._calls.close()
        if self._hierarchy:
            self._hierarchy.close()
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _scale(self, flat: Tensor) -> float:
        """Check a bucket that is to be summed, and return the factor of its sum."""
        check_bucket(flat, averages=self.average)
        return 1.0 / self.size if self.average else 1.0


def _present_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
