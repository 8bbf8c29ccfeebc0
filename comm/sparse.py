# SPDX-License-Identifier: Apache-2.0
"""The sparse collective: gradients travel as their non-zero blocks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.calibration import calibrate
from wavemare.comm.changes import gather_changes
from wavemare.comm.collective_queue import (
    CollectiveQueue,
    End,
    Finish,
    Handle,
    Statistics,
    Timer,
    Totals,
)
from wavemare.comm.compressor import Compressor, make_compressor
from wavemare.comm.config import HALVES, MODES, CompressorConfig, Mode
from wavemare.comm.cost import EXECUTORS, IN_ORDER, Constants, ExecutorChoice, choose_executor
from wavemare.comm.executors import EXECUTORS_BY_MODE, CollectiveCall, Nodes, Scratch
from wavemare.comm.kernels import DTYPES, num_blocks
from wavemare.comm.masks import Masks, OwnedRange, ranges_of
from wavemare.comm.reduction import Agreement, Reduction, digest_of
from wavemare.comm.rows import RowReducer
from wavemare.comm.transport import Choice, Staging, open_transport
from wavemare.errors import CommError, ConfigError, check_number, did_you_mean
from wavemare.extras import require

_REPEATS = 15
"""Calls of a settled bucket between two in which the ranks look at it."""


class _Turn:
    """When the ranks look at a bucket again.

    Args:
        looked: The end of the last call in which they did; None once its outcome is known.
    """

    def __init__(self, looked: End) -> None:
        self.looked: End | None = looked
        self.left = 0


class SparseComm:
    """Sums gradients over a group of ranks; only blocks that are not zero travel.

    All ranks of the group create it together and call its methods in the same order. Collectives
    run one after the other on a background thread. Each method returns a `Handle`, and waits for
    the end unless ``async_op`` is true.

    Args:
        group: An MPI communicator, a torch process group, a `Transport` (used as it is, by nobody
            else, and closed with this object), or None for all ranks.
        block: Elements per block; 64 to 4096 are useful.
        mode: ``auto`` or the name of an executor.
        average: Whether results are means rather than sums, or the number to divide sums by.
        deterministic: Whether to add in rank order, starting from +0.0, in float32 for 16-bit
            floats. All executors and all ranks then give the same bits.
        hierarchical: Whether `allreduce_` first sums densely within each node. The order is then
            by rank within the node, and by node.
        compressor: Selects the blocks that are sent; the others wait for the next step.
        transport: ``mpi``, ``torch`` or ``auto``.
        staging: How an accelerator's tensors travel: ``direct``, ``pinned`` or ``auto``.
        timeout_s: Seconds after which a silent peer counts as lost.
        constants: Of the cost model; measured at start if omitted and needed.
        device: Where buckets will be; the current accelerator if omitted.

    Attributes:
        transport: To the other ranks.
        rank: This process's rank in the group.
        size: Number of ranks.

    Raises:
        ConfigError: A value is out of range.
        LaunchError: numba is not installed.
        CommError: The transport is missing, a peer was lost, or the ranks' settings differ.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        block: int = 256,
        mode: Mode = "auto",
        average: bool | int = True,
        deterministic: bool = True,
        hierarchical: bool = False,
        compressor: Compressor | CompressorConfig | None = None,
        transport: Choice = "auto",
        staging: Staging = "auto",
        timeout_s: float = 300.0,
        constants: Constants | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        require("numba", "The sparse collective")
        check_number(ConfigError, "block", block, 1, whole=True)
        _check_mode(mode, deterministic)
        if isinstance(compressor, CompressorConfig):
            compressor = make_compressor(compressor, block)
        self.block = block
        self.mode = mode
        self.average = average
        self.deterministic = deterministic
        self.compressor = compressor
        if device is None and torch.cuda.is_available():
            device = f"cuda:{torch.cuda.current_device()}"
        device = torch.device(device or "cpu")
        measures = constants is None and mode == "auto"
        self.transport = open_transport(
            group, choice=transport, staging=staging, timeout_s=timeout_s, device=device
        )
        self.rank, self.size = self.transport.rank, self.transport.size
        nodes: Nodes | None = None
        stages = measures and self.transport.stages(torch.empty(0, device=device))
        settings = digest_of(mode, deterministic, hierarchical, measures, stages)
        try:
            # Before the ranks measure, each in its own way.
            Agreement(self.transport, "SparseComm", block=block, terms=settings).agree()
            nodes = Nodes.find(self.transport) if hierarchical else None
            between = nodes.between if nodes else self.transport
            if measures and between.size > 1:
                constants = calibrate(between, block, device, everyone=self.transport)
        except BaseException:
            for each in (*(nodes or ()), self.transport):
                each.close()
            raise
        self.constants = constants or Constants()
        self._scratch = Scratch()
        allowed = IN_ORDER if deterministic else EXECUTORS
        self._reduction = Reduction(mode, self.constants, allowed, compressor, nodes)
        self._rows = RowReducer(mode, self.constants)
        self._transports = [*(nodes or ()), self.transport]
        self._terms = digest_of(settings, self.constants)
        self._queue = CollectiveQueue(
            f"wavemare-collectives-{self.rank}", in_turn=self.transport.on_stream
        )
        self._num_calls = 0
        self._turns: dict[str, _Turn] = {}
        self._uses: dict[int, End] = {}  # the last collective in flight of each memory
        self.at_close: list[Callable[[], None]] = []  # called by `close`
        self.totals = Totals()

    def plan(
        self, masks: Masks | np.ndarray[Any, Any] | Tensor, itemsize: int = 4
    ) -> ExecutorChoice:
        """Return what ``auto`` would choose for a bucket; a pure function of its masks.

        Args:
            masks: (N, nb), whether each rank's block is not zero.
            itemsize: Bytes of an element.

        Returns:
            The choice; ``str`` of it is a table.
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
        blocks: Tensor | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Sum (or average) a bucket over all ranks, in place.

        Args:
            flat: (E,), contiguous; float32, bfloat16, float16, float64 or int32.
            key: Name of the bucket; its history and residual are kept under it. By default its size
                and type. Required with a compressor.
            blocks: (k,), int64: the blocks that may be non-zero on this rank, in any order; all
                others must hold +0.0. They are not searched for then.
            async_op: Whether to return at once.

        Returns:
            A handle, whose ``wait`` returns ``flat``.

        Raises:
            ConfigError: The tensor's layout or type is not supported; nothing was sent.
            CommError: A peer was lost, or calls another collective.
        """
        call, blocks = self._call(flat, key, blocks)
        if self._repeats(call.key):
            handle = self._repeat(flat, call)
        else:
            look = partial(self._reduction.reduce, blocks)
            handle = self._submit("allreduce_", flat, call, look, inputs=(blocks,))
            if not self.deterministic:
                self._turns[call.key] = _Turn(handle.end)
        return _waited(handle, async_op)

    def reduce_scatter_(
        self,
        flat: Tensor,
        partition: Sequence[OwnedRange] | Sequence[int],
        *,
        key: str | None = None,
        blocks: Tensor | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Sum (or average) a bucket over all ranks; each rank gets the ranges that it owns.

        Args:
            flat: As for `allreduce_`. Afterwards this rank's own ranges hold the result; the others
                are undefined.
            partition: Ranges with their owners, or the N + 1 borders of one range per rank. The
                same on all ranks.
            key: As for `allreduce_`.
            blocks: As for `allreduce_`.
            async_op: Whether to return at once.

        Raises:
            ConfigError: As for `allreduce_`, or the mode has no reduce-scatter.
        """
        if self.mode not in ("auto", *HALVES):
            reason = "it has no reduce_scatter_"
            raise ConfigError("mode", self.mode, reason, f"Choose auto, {' or '.join(HALVES)}")
        call, blocks = self._call(flat, key, blocks, prefix="scatter ")
        call.ranges = ranges_of(partition, flat.numel(), self.size)
        look = partial(self._reduction.reduce, blocks)
        return _waited(
            self._submit("reduce_scatter_", flat, call, look, inputs=(blocks,)), async_op
        )

    def allgather_(
        self,
        flat: Tensor,
        partition: Sequence[OwnedRange] | Sequence[int],
        *,
        before: Tensor | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Copy each range from its owner to all ranks.

        Args:
            flat: As for `allreduce_`; the ranges of other owners are written.
            partition: As for `reduce_scatter_`.
            before: This rank's range as all ranks hold it in ``flat``; given by all ranks or by
                none. Only what differs from it travels, and all ranks then have the bits of a copy
                of everything. The partition must be borders.
            async_op: Whether to return at once.

        Raises:
            ConfigError: As for `allreduce_`, or ``before`` does not fit.
        """
        _check_bucket(flat)
        self._check_device(flat)
        call = CollectiveCall(flat.detach(), self.block, 1.0, self.transport, self._scratch)
        call.ranges = ranges_of(partition, flat.numel(), self.size)
        if before is not None:
            before = before.detach()
            if np.shape(partition) != (self.size + 1,):
                reason = "before is of one range for each rank"
                raise ConfigError("partition", partition, reason, "Give N + 1 borders")
            start, stop, _ = call.ranges[self.rank].tolist()
            _check_before(flat, stop - start, before)

        def look(call: CollectiveCall, agreement: Agreement) -> Finish:
            agreement.agree()
            return gather_changes(call, before)

        handle = self._submit("allgather_", flat, call, look, before is not None, inputs=(before,))
        return _waited(handle, async_op)

    def allreduce_rows_(
        self, ids: Tensor, rows: Tensor, num_rows: int | None = None, *, async_op: bool = False
    ) -> Handle:
        """Sum (or average) some rows of a table over all ranks, such as an embedding's gradient.

        Modes ``pushpull`` and ``allgather`` apply to rows as well. All other modes choose the
        faster of the two.

        Args:
            ids: (k,), int64, row numbers; equal ids are summed first.
            rows: (k, dim), contiguous.
            num_rows: Rows of the table; None if ids can be any number.
            async_op: Whether to return at once.

        Returns:
            A handle, whose ``wait`` returns (ids, rows): the ids of all ranks, ascending, and the
            sums of their rows. They are the same on all ranks.

        Raises:
            ConfigError: Shapes or types do not fit, or an id is not a row; nothing was sent.
        """
        _check_rows(ids, rows, num_rows)
        scale = self._scale(rows.view(-1))
        num_items = -1 if num_rows is None else num_rows
        flat = rows.detach().view(-1)
        call = CollectiveCall(flat, rows.shape[1], scale, self.transport, self._scratch)
        look = partial(self._rows.reduce, ids, num_rows)
        handle = self._submit(
            "allreduce_rows_", rows, call, look, num_items=num_items, inputs=(ids,)
        )
        return _waited(handle, async_op)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must contain: the compressor's residuals."""
        return {"compressor": self.compressor.state_dict()} if self.compressor else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`.

        Raises:
            CheckpointError: Another compressor saved it.
        """
        if self.compressor is not None and "compressor" in state:
            self.compressor.load_state_dict(state["compressor"])

    def close(self) -> None:
        """Finish all collectives, then close the thread and the transport."""
        for call in self.at_close:
            call()
        self._queue.close()
        for transport in self._transports:
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _scale(self, flat: Tensor) -> float:
        """Check a bucket, and return the factor of its sum."""
        _check_bucket(flat, averages=bool(self.average))
        self._check_device(flat)
        return 1.0 / (self.size if self.average is True else self.average or 1)

    def _check_device(self, tensor: Tensor) -> None:
        if self.transport.on_stream and not tensor.is_cuda:
            name = self.transport.name
            reason = f"{name} sends the memory of GPUs alone"
            remedy = "Move it to the GPU, or make another SparseComm with device='cpu'"
            raise ConfigError("device", str(tensor.device), reason, remedy)

    def _call(
        self, flat: Tensor, key: str | None, blocks: Tensor | None, prefix: str = ""
    ) -> tuple[CollectiveCall, Tensor | None]:
        """Check a bucket and its list, and name it; by default by its size and type."""
        scale = self._scale(flat)
        if self.compressor is not None:
            if not key:
                reason = "the compressor keeps the residual of each bucket under its name"
                raise ConfigError("key", key, reason, "Give key=, a different one for each bucket")
            self.compressor.check(prefix + key, flat.detach())
        if blocks is not None:
            if blocks.device != flat.device:
                reason, remedy = f"the bucket is on {flat.device}", "Give a list on the same device"
                raise ConfigError("blocks", str(blocks.device), reason, remedy)
            end = num_blocks(flat.numel(), self.block)
            _check_indices("blocks", blocks, end, f"the bucket has {end} blocks")
            if self.compressor is not None:
                blocks = None  # residuals are non-zero elsewhere
        # It may be a leaf that requires gradients.
        call = CollectiveCall(flat.detach(), self.block, scale, self.transport, self._scratch)
        call.key = prefix + (key or f"{flat.numel()} {flat.dtype}")
        return call, blocks

    def _repeats(self, key: str) -> bool:
        """Whether this call is summed by the library without a look, as the calls before."""
        turn = self._turns.get(key)
        if turn is None or self._queue.has_failed:
            return False
        if turn.looked is not None:
            # So that all ranks decide alike.
            self._queue.wait(turn.looked)
            turn.looked = None
            turn.left = _REPEATS if self._reduction.is_settled(key) else 0
        turn.left -= 1
        return turn.left >= 0

    def _repeat(self, flat: Tensor, call: CollectiveCall) -> Handle:
        """Sum a bucket by the library; on its own thread, if it has one."""
        stats, timer = Statistics("dense", flat.nbytes), Timer(flat.device)
        stats.bytes_up = stats.bytes_down = 2 * (self.size - 1) * flat.nbytes // self.size
        handle = Handle(stats=stats)

        def end(error: CommError | None) -> None:
            if error is None:
                if call.scale != 1:
                    call.flat.mul_(call.scale)
                stats.note(None, timer)
                self.totals.add(stats)
            handle.finish(flat, error)

        self._queue.check_open()
        self._wait_for_use(flat, by_library=True)
        if not self.transport.begin_all_reduce(call.flat, end):
            return self._submit("allreduce_", flat, call, _repeated)
        self._queue.adopt(handle)
        self._uses[flat.untyped_storage().data_ptr()] = handle.end
        return handle

    def _wait_for_use(self, tensor: Tensor, *, by_library: bool) -> None:
        """Wait until no earlier collective uses a memory that would run beside the next one."""
        self._uses = {p: end for p, end in self._uses.items() if not end.for_host.is_set()}
        used = self._uses.get(tensor.untyped_storage().data_ptr())
        if used is not None and (by_library or used.beside):
            self._queue.wait(used)

    def _submit(
        self,
        operation: str,
        tensor: Tensor,
        call: CollectiveCall,
        look: Callable[[CollectiveCall, Agreement], Finish],
        *terms: object,
        num_items: int = 0,
        inputs: Iterable[Tensor | None] = (),
    ) -> Handle:
        """Run a collective and measure it; its result is the tensor, unless it has one itself.

        ``terms`` are what else must be the same on all ranks, ``inputs`` what else it reads.
        """
        number, self._num_calls = self._num_calls, self._num_calls + 1
        numel = tensor.numel() if tensor.dim() == 1 else tensor.shape[1]
        if call.ranges is not None:
            terms = *terms, zlib.crc32(call.ranges.tobytes())
        stages = self.transport.stages(tensor)
        digest = digest_of(self._terms, call.key, stages, self.average, *terms)

        def begin(stats: Statistics) -> Finish:
            timer, before = Timer(tensor.device), self._traffic()
            stats.payload_bytes = tensor.nbytes
            agreement = Agreement(
                self.transport,
                operation,
                number=number,
                numel=numel,
                dtype=tensor.dtype,
                block=self.block,
                num_items=num_items,
                terms=digest,
            )
            finish = look(replace(call, stats=stats), agreement)

            def end() -> Any:
                result = finish()
                stats.note(None, timer)
                up, down = self._traffic()
                stats.bytes_up, stats.bytes_down = up - before[0], down - before[1]
                self.totals.add(stats)
                return tensor if result is None else result

            return end

        if self._turns:
            self._wait_for_use(tensor, by_library=False)
        handle = self._queue.submit(begin, tensor.device, (tensor, *inputs))
        if self._turns:
            self._uses[tensor.untyped_storage().data_ptr()] = handle.end
        return handle

    def _traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far."""
        ups = sum(transport.bytes_up for transport in self._transports)
        return ups, sum(transport.bytes_down for transport in self._transports)


def _waited(handle: Handle, async_op: bool) -> Handle:
    if not async_op:
        handle.wait()
    return handle


def _repeated(call: CollectiveCall, _: Agreement) -> Finish:
    """Sum a settled bucket: no rank looks at it, nor tells others of its call."""
    call.stats.executor = "dense"
    return partial(EXECUTORS_BY_MODE["dense"].all_reduce, call, None)


def _check_bucket(flat: Tensor, *, averages: bool = False) -> None:
    """Check a bucket that is to be summed or sent.

    Args:
        flat: The bucket.
        averages: Whether its mean is wanted.

    Raises:
        ConfigError: Its layout, shape or type is not supported.
    """
    reason = remedy = None
    if flat.layout is not torch.strided:
        reason, remedy = f"its layout is {flat.layout}", "Use allreduce_rows_ for its rows"
    elif flat.dim() != 1 or not flat.is_contiguous():
        reason = f"it is not flat and contiguous (shape {tuple(flat.shape)}, {flat.stride()})"
        remedy = "Give tensor.contiguous().view(-1), or a bucket made by flattening"
    elif flat.dtype not in DTYPES:
        reason, remedy = (
            f"its type is {flat.dtype}",
            f"Use one of {', '.join(map(str, DTYPES))}",
        )
    elif flat.is_inference():
        reason, remedy = "it was made in inference mode", "Give a clone made outside of it"
    elif averages and not flat.dtype.is_floating_point:
        reason, remedy = "whole numbers have no mean", "Use SparseComm(average=False)"
    if reason is not None and remedy is not None:
        raise ConfigError("bucket", tuple(flat.shape), reason, remedy)


def _check_before(flat: Tensor, numel: int, before: Tensor) -> None:
    wanted = torch.Size([numel]), flat.dtype, flat.device
    if wanted != (before.shape, before.dtype, before.device) or not before.is_contiguous():
        found = (tuple(before.shape), before.dtype, str(before.device))
        reason = "it is no copy of this rank's range"
        raise ConfigError("before", found, reason, "Give flat[start:stop].clone()")


def _check_mode(mode: str, deterministic: bool) -> None:
    if mode not in MODES:
        raise ConfigError("mode", mode, "there is no such mode", did_you_mean(mode, MODES))
    if deterministic and mode != "auto" and not EXECUTORS_BY_MODE[mode].deterministic:
        raise ConfigError(
            "mode",
            mode,
            "it does not sum in the order of the ranks, which deterministic asks for",
            "Set deterministic to false, or choose auto, ordered, pushpull or allgather",
        )


def _check_rows(ids: Tensor, rows: Tensor, num_rows: int | None) -> None:
    """Check the arguments of `SparseComm.allreduce_rows_`; on an accelerator not the ids' values.

    To look at them would stall the caller.

    Raises:
        ConfigError: Shapes or types do not fit, or an id is not a row.
    """
    if num_rows is not None and num_rows < 0:
        raise ConfigError("num_rows", num_rows, "it is negative", "Give 0 or more, or None")
    if ids.device != rows.device:
        reason, remedy = f"the rows are on {rows.device}", "Give ids and rows on one device"
        raise ConfigError("ids", str(ids.device), reason, remedy)
    _check_indices("ids", ids, num_rows, f"the table has {num_rows} rows")
    if rows.layout is not torch.strided or not rows.is_contiguous() or rows.dim() != 2:  # noqa: PLR2004
        remedy = "Give contiguous rows, (k, dim)"
        reason = "they are no matrix whose rows stand one after the other"
        raise ConfigError("rows", tuple(rows.shape), reason, remedy)
    if rows.shape[0] != ids.numel() or rows.shape[1] == 0:
        reason = f"there are {ids.numel()} ids, and a row has at least one column"
        raise ConfigError("rows", tuple(rows.shape), reason, "Give (k, dim) for k ids")
    if not rows.dtype.is_floating_point:
        reason = f"they are {rows.dtype}"
        raise ConfigError("rows", tuple(rows.shape), reason, "Give floats of 16 to 64 bits")


def _check_indices(key: str, indices: Tensor, end: int | None, reason: str) -> None:
    """Refuse what is no list of numbers from 0, below an end; an accelerator's are not read.

    Args:
        key: Name of the list.
        indices: The list.
        end: None for any numbers.
        reason: Why there is an end.

    Raises:
        ConfigError: Its shape or type does not fit, or a number is out of range.
    """
    if indices.dtype != torch.int64 or indices.dim() != 1:
        shape = tuple(indices.shape)
        raise ConfigError(key, shape, f"it is {indices.dtype} of shape {shape}", "Give (k,), int64")
    if end is not None and indices.numel() and indices.device.type == "cpu":
        least, most = (int(bound) for bound in indices.aminmax())
        if least < 0 or most >= end:
            value = least if least < 0 else most
            raise ConfigError(key, value, reason, "Give numbers from 0, below that number")
