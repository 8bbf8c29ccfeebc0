# SPDX-License-Identifier: Apache-2.0
"""Communication hook for torch's DistributedDataParallel: only non-zero blocks of buckets travel.

DDP rebuilds its buckets after the first backward pass, and a resumed process starts with the first
ones again. The compressor's state must not depend on that, so it compresses each parameter by
itself, under the parameter's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from wavemare.comm.collective_queue import Handle
from wavemare.comm.compressor import Compressor, make_compressor
from wavemare.comm.config import CompressorConfig
from wavemare.comm.gradient_rows import GradientRows, Slot
from wavemare.comm.sparse import SparseComm
from wavemare.errors import ConfigError


def register_ddp_hook(model: DistributedDataParallel, **options: Any) -> SparseComm:
    """Average a model's gradients by a sparse collective; collective over all ranks.

    Buckets are reduced in the background during the backward pass. Sparse gradients
    (``Embedding(sparse=True)``, ``EmbeddingBag(sparse=True)``) travel as rows. If a peer is lost,
    ``backward`` raises the collective's error.

    Args:
        model: Must have no communication hook yet.
        options: For `SparseComm`; ``compressor`` compresses each parameter by itself.

    Returns:
        The collectives. ``state_dict`` has the compressor's residuals by parameter name; ``close``
        ends them.

    Raises:
        ConfigError: An option is out of range.
        CommError: The transport or a rank is missing.
    """
    options = {"block": 256, "device": model.device, **options}
    inner = options.pop("compressor", None)
    if isinstance(inner, CompressorConfig):
        inner = make_compressor(inner, options["block"])
    compressor: Any = _ByParameter(inner) if inner is not None else None
    comm = SparseComm(model.process_group, compressor=compressor, **options)
    hook = _Hook(model, comm, compressor)
    # A lambda: DDP compares annotations with types, and ours are strings.
    model.register_comm_hook(None, lambda state, bucket: hook.reduce(bucket))
    return comm


class _ByParameter:
    """Compresses each parameter of a bucket by itself; used as a `Compressor`."""

    def __init__(self, inner: Compressor) -> None:
        self.inner = inner
        self.layouts: dict[str, Sequence[Slot]] = {}
        self.state_dict = inner.state_dict
        self.load_state_dict = inner.load_state_dict

    def step(self, key: str, gradient: Tensor) -> None:
        """Split each parameter of the bucket; see `Compressor.step`.

        Blocks of parameters are none of the bucket, whose blocks are searched for then.
        """
        for slot in self.layouts[key]:
            self.inner.step(slot.name, gradient[slot.start : slot.stop])

    def check(self, key: str, gradient: Tensor) -> None:
        """Check each parameter of the bucket; see `Compressor.check`."""
        for slot in self.layouts[key]:
            self.inner.check(slot.name, gradient[slot.start : slot.stop])


class _Hook:
    """Reduces DDP's buckets."""

    def __init__(
        self, model: DistributedDataParallel, comm: SparseComm, compressor: _ByParameter | None
    ) -> None:
        named = dict(model.module.named_parameters())
        self._names = {id(p): name for name, p in named.items()}
        # A compressor's residuals are non-zero in other rows, too.
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self._rows = GradientRows(model.module, trained) if compressor is None else None
        if self._rows is not None:
            comm.at_close.append(self._rows.close)
        self._comm = comm
        self._compressor = compressor
        self._handles: list[Handle] = []
        self._streams: dict[torch.device, Any] = {}

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Start to reduce a ``GradBucket``; DDP calls this when the gradients are complete."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        waits = bool(self._handles) or self._waits_at_the_end()
        if buffer.layout is torch.strided:
            handle = self._reduce_dense(buffer, parameters)
        else:
            handle = self._reduce_rows(buffer, self._names[id(parameters[0])])
        if waits:
            self._handles.append(handle)
        return self._future(handle, buffer)

    def _reduce_dense(self, buffer: Tensor, parameters: Sequence[Tensor]) -> Handle:
        ends = list(accumulate(p.numel() for p in parameters))
        assert ends[-1] == buffer.numel()
        slots = [
            Slot(self._names[id(p)], end - p.numel(), end)
            for p, end in zip(parameters, ends, strict=True)
        ]
        key = f"{slots[0].name} to {slots[-1].name}"
        if self._compressor is not None:
            self._compressor.layouts[key] = slots
        blocks = self._rows.take(slots, self._comm.block) if self._rows else None
        return self._comm.allreduce_(buffer, key=key, blocks=blocks, async_op=True)

    def _reduce_rows(self, gradient: Tensor, name: str) -> Handle:
        if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            what = str(gradient.layout)
            if gradient.layout is torch.sparse_coo:
                what += f" with {gradient.sparse_dim()} sparse dimensions"
            reason = "of sparse gradients only rows, with one sparse dimension, can be reduced"
            raise ConfigError(name, what, reason, "Use Embedding(sparse=True), or a dense gradient")
        rows = gradient._values().reshape(gradient._nnz(), -1).contiguous()
        ids = gradient._indices()[0].contiguous()
        return self._comm.allreduce_rows_(ids, rows, gradient.shape[0], async_op=True)

    def _future(self, handle: Handle, buffer: Tensor) -> Future[Tensor]:
        device = buffer.device
        on_device = device.type == "cuda"
        future: Future[Tensor] = Future(devices=[device] if on_device else None)

        def finish(handle: Handle) -> None:
            try:
                result = handle.wait()
                if isinstance(result, tuple):
                    ids, rows = result
                    shape = (ids.numel(), *buffer.shape[1:])
                    result = torch.sparse_coo_tensor(
                        ids[None],
                        rows.view(shape),
                        buffer.shape,
                        is_coalesced=True,
                        check_invariants=False,
                    )
                future.set_result(result)
            except BaseException as error:  # `_wait` raises it; DDP must not wait for ever
                future.set_exception(error)  # type: ignore[arg-type]

        def on_side_stream(handle: Handle) -> None:
            # The future records the current stream; the backward pass's stream must not wait.
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            with torch.cuda.stream(stream):
                finish(handle)

        handle.then(on_side_stream if on_device else finish)
        return future

    def _waits_at_the_end(self) -> bool:
        """Check all handles at the end of the backward pass; False if none is running."""
        try:
            # Runs before DDP's own callback, which hides the type of errors.
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        except RuntimeError:  # no backward pass: a rank without data, within DDP's join()
            return False
        return True

    def _wait(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
