# SPDX-License-Identifier: Apache-2.0
"""Gradients that all ranks need, reduced by the sparse collective: ZeRO 0, and bf16 pipelines."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from wavemare.comm.config import SparseCollectiveConfig
from wavemare.comm.gradient_rows import GradientRows
from wavemare.comm.sparse import SparseComm
from wavemare.engine.experts import is_divided
from wavemare.engine.feature import Feature
from wavemare.engine.observe.choices import tell_choice
from wavemare.engine.optim.adapter import adapt
from wavemare.engine.sparse.buckets import (
    LARGEST_BUCKET,
    Bucket,
    BucketReducer,
    Member,
    default_bucket_bytes,
    embedding_weights,
    make_buckets,
    regrouped,
)
from wavemare.errors import CheckpointError, ModelError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


class SparseGradients(Feature, ABC):
    """Reduces an engine's gradients over its data ranks in place of DeepSpeed.

    Args:
        engine: A DeepSpeed engine, complete.
        config: How gradients are summed.
        timeout_s: Seconds after which a silent rank counts as lost.

    Attributes:
        comm: The collectives.
        expert_comm: Those of the ranks that hold the same experts; None if no ranks share any.
        reducer: Reduces the buckets.
    """

    key = "sparse_collective"
    reducer: BucketReducer
    _rows_of_step: GradientRows | None = None
    _arranged = False

    def __init__(
        self, engine: EngineMixin, config: SparseCollectiveConfig, timeout_s: float
    ) -> None:
        assert config.mode != "off"
        self._engine = engine
        self._config = config
        self._told = False
        self._metrics: Mapping[str, float] = {}
        compressor = config.compressor
        if compressor is not None and engine.zero_optimization_partition_gradients():
            # ZeRO 2 reduces after each micro-batch, and the compressor counts reductions.
            calls = engine.gradient_accumulation_steps()
            warmups = ("warmup_steps", "density_warmup_steps")
            update = {name: calls * getattr(compressor, name) for name in warmups}
            compressor = compressor.model_copy(update=update)
        collectives = partial(
            SparseComm,
            block=config.block,
            mode=config.mode,
            deterministic=config.deterministic,
            hierarchical=config.hierarchical,
            compressor=compressor,
            transport=config.transport,
            staging=config.staging,
            timeout_s=timeout_s,
            device=engine.device,
        )
        average = engine.gradient_average
        self.comm: SparseComm = collectives(engine.data_parallel_group, average=average)
        self.expert_comm: SparseComm | None = None
        names = {p.group_name for p in engine.module.parameters() if is_divided(p)}
        for name in names:  # one at most
            # All-to-alls have brought the gradients of all data ranks here.
            group = engine.expert_data_parallel_group[name]
            self.expert_comm = collectives(group, average=average and engine.dp_world_size)
            self.expert_comm.totals = self.comm.totals
        self._known_rows = config.known_rows == "on" and compressor is None

    @abstractmethod
    def reduce(self) -> None:
        """Reduce all remaining buckets and wait for them."""

    def metrics(self) -> Mapping[str, float]:
        """Return this rank's statistics of the last optimizer step's collectives."""
        return self._metrics

    def close(self) -> None:
        """Remove the hooks and close the collectives."""
        if self._rows_of_step is not None:
            self._rows_of_step.close()
        self.comm.close()
        if self.expert_comm is not None:
            self.expert_comm.close()

    def extra_state(self) -> dict[str, Any]:
        """Return the compressor's residuals and the buckets that they belong to."""
        state = self.comm.state_dict()
        return {**state, "buckets": self._bucket_sizes()} if state else {}

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Load a state of `extra_state`.

        Raises:
            CheckpointError: Its buckets or compressor differ.
        """
        if state is None:
            if self.comm.compressor is not None and dist.get_rank() == 0:
                logging.getLogger("wavemare").warning(
                    "sparse_collective: the checkpoint has no residuals of the compressor for "
                    "these ranks; they start at zero"
                )
            return
        if self.comm.compressor is not None and state.get("buckets") != self._bucket_sizes():
            raise CheckpointError(
                "wavemare.sparse_collective",
                f"{len(self.reducer.buckets)} buckets",
                "the checkpoint has the residuals of other buckets",
                "Resume with the section that it was saved with, or without a compressor",
            )
        self.comm.load_state_dict(state)

    def reset(self) -> None:
        """Drop what belongs to the weights before a load: gradients, the compressor's residuals."""
        self.reducer.drop()
        compressor = self.comm.compressor
        if compressor is not None:
            compressor.load_state_dict({**compressor.state_dict(), "residuals": {}})

    def _bucket_sizes(self) -> dict[str, int]:
        return {b.key: b.numel for b in self.reducer.buckets if not b.columns}

    def _gradient_rows(self, parameters: Mapping[str, nn.Parameter]) -> GradientRows | None:
        if self._known_rows:
            self._rows_of_step = GradientRows(self._engine.module, parameters)
        return self._rows_of_step

    def _buckets(
        self, parameters: Mapping[str, nn.Parameter], dtype_of: Any, config: SparseCollectiveConfig
    ) -> list[Bucket]:
        embeddings = embedding_weights(self._engine.module.modules())
        sparse = embedding_weights(self._engine.module.modules(), sparse=True)
        members = [
            Member(
                name,
                p.numel(),
                dtype_of(p),
                id(p) in embeddings,
                is_divided(p),
                p.shape[1] if id(p) in sparse else 0,
            )
            for name, p in parameters.items()
        ]
        default = LARGEST_BUCKET if config.compressor else default_bucket_bytes(members)
        self._bucket_bytes = config.bucket_bytes or default
        return make_buckets(members, config.block, self._bucket_bytes)

    def _arrange(self, names: Sequence[str]) -> None:
        """After the first round of a layout: send its buckets as their gradients have come."""
        if not self._arranged and self._engine.is_gradient_accumulation_boundary():
            self._arranged = True
            self.reducer.arrange(names)
            self.comm.totals.take()  # what this has sent is no gradient

    def record_metrics(self) -> None:
        """Collect the statistics of a completed step; ZeRO 2 reduces after each micro-batch."""
        if self._engine.is_gradient_accumulation_boundary():
            self._metrics = self.comm.totals.take()
            if self._metrics and not self._told:
                self._told = True
                self._tell_choices()

    def _tell_choices(self) -> None:
        """Say what ``auto`` has chosen in the first step."""
        config, transport = self._config, self.comm.transport
        if config.mode == "auto":
            begin, found = "sparse_calls_", self._metrics
            calls = {k.removeprefix(begin): n for k, n in found.items() if k.startswith(begin)}
            chosen = ", ".join(f"{name} for {n:.0f}" for name, n in sorted(calls.items()))
            share = 100 * found.get("sparse_density", 1.0)
            tell_choice(
                "wavemare.sparse_collective.mode",
                f"{chosen} of {sum(calls.values()):.0f} sums of the first step",
                f"predicted to be the fastest; {share:.3g} % of a rank's blocks are not zero",
            )
        if config.transport == "auto" and "transport" in config.model_fields_set:
            by_mpi = "an MPI launcher started all ranks"
            reasons = {"nccl": "torch has NCCL for the device", "mpi": by_mpi}
            reason = reasons.get(transport.name, "no MPI launcher started all ranks")
            tell_choice("wavemare.sparse_collective.transport", transport.name, reason)
        if config.staging == "auto" and "staging" in config.model_fields_set:
            copies = transport.stages(torch.empty(0, device=self._engine.device))
            reason = "not on a GPU, or not every rank's MPI or NCCL takes its memory"
            tell_choice(
                "wavemare.sparse_collective.staging",
                "pinned" if copies else "direct",
                reason if copies else "no copy through the host's memory is needed",
            )


class ReplicatedGradients(SparseGradients):
    """Reduces gradients to all ranks: without ZeRO, and for DeepSpeed's ``BF16_Optimizer``.

    Without a pipeline, buckets are sent during the step's last backward pass. The first step, and
    the first one after layers were frozen or thawed, counts how often each parameter's gradient is
    added to in one pass, and sends at the end.

    Args:
        engine: See `SparseGradients`.
        config: See `SparseGradients`.
        timeout_s: See `SparseGradients`.
        early: Whether buckets may be sent during the backward pass.
    """

    def __init__(
        self,
        engine: EngineMixin,
        config: SparseCollectiveConfig,
        timeout_s: float,
        *,
        early: bool = True,
    ) -> None:
        super().__init__(engine, config, timeout_s)
        self._config, self._dtype = config, engine.communication_data_type
        self._all = {name: p for name, p in engine.module.named_parameters() if p.numel()}
        self._sparse = embedding_weights(engine.module.modules(), sparse=True)
        self._accumulated: dict[str, Any] | None = None
        adapter = adapt(engine)
        if adapter.accumulates_in_fp32:
            held = {id(p): gradient for p, gradient in adapter.gradients_by_parameter()}
            self._all = {name: p for name, p in self._all.items() if id(p) in held}
            self._accumulated = {name: held[id(p)] for name, p in self._all.items()}
        # Accumulated gradients may have been reduced before.
        self._rows = None if self._accumulated else self._gradient_rows(self._all)
        self._early = early and not engine.pipeline_parallelism and self._accumulated is None
        self._hooks: list[Any] = []
        self._begin(self._trained())

    def _trained(self) -> list[str]:
        """Return the parameters whose gradients a step needs now.

        The fp32 masters of an optimizer are stepped whether their weights are trained or not.
        """
        if self._accumulated is not None:
            return list(self._all)
        return [n for n, p in self._all.items() if p.requires_grad or p.grad is not None]

    def _begin(self, trained: list[str]) -> None:
        """Lay out the gradients of these parameters."""
        self._names = trained
        parameters = {name: self._all[name] for name in trained}
        self._parameters = parameters
        self._tables = {name for name, p in parameters.items() if id(p) in self._sparse}
        self.reducer = BucketReducer(
            self.comm,
            self._buckets(self._parameters, lambda parameter: self._dtype, self._config),
            device=self._engine.device,
            write=self._write,
            rows=self._rows,
            expert_comm=self.expert_comm,
        )
        self._fired: Counter[str] = Counter()
        self._usual: Counter[str] = Counter()
        self._arranged = not self._early
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))
            for name, parameter in (self._parameters.items() if self._early else ())
            if parameter.requires_grad
        ]

    def _follow(self) -> None:
        """Lay the gradients out anew if layers have been frozen or thawed since."""
        if self.reducer.begun or (trained := self._trained()) == self._names:
            return
        compressor, before = self.comm.compressor, self.reducer.buckets
        self._begin(trained)
        if compressor is not None:
            state = compressor.state_dict()
            residuals = regrouped(state["residuals"], before, self.reducer.buckets)
            steps = dict.fromkeys(self._bucket_sizes(), max(state["steps"].values(), default=0))
            compressor.load_state_dict({**state, "steps": steps, "residuals": residuals})

    def before_forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """See which parameters are trained, before gradients leave in the backward pass."""
        self._follow()

    def reduce(self) -> None:
        """Reduce the buckets that the backward pass did not send, and wait for all.

        Raises:
            CommError: A peer was lost, or makes another call.
            ModelError: A sparse gradient is not that of an embedding's rows.
        """
        self._follow()
        for name in self._parameters:
            if not self.reducer.has(name):
                self._put(name)
        self.reducer.end()
        self.record_metrics()
        self._arrange(list(self._fired))
        self._usual, self._fired = self._fired, Counter()

    def reset(self) -> None:
        """Drop what belongs to the weights before a load."""
        super().reset()
        self._fired = Counter()

    def close(self) -> None:
        """Remove the hooks and close the collectives."""
        for hook in self._hooks:
            hook.remove()
        super().close()

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        engine = self._engine
        if engine.inside_no_sync_ctxt or not engine.is_gradient_accumulation_boundary():
            return
        # The last of its parts counts for the order.
        self._fired[name] = self._fired.pop(name, 0) + 1
        if self.reducer.sent(name):
            raise ModelError(
                name,
                f"gradient of {self._fired[name]} parts",
                f"in the previous step it had {self._usual[name]}, and it was sent after as many",
                'Set "overlap_comm" to false in zero_optimization: gradients are then sent after '
                "the backward pass. If an earlier backward pass failed, start again",
            )
        if name in self._usual and self._fired[name] >= self._usual[name]:
            self._put(name)
            self.reducer.send_complete()
            self.reducer.take_reduced()

    def _put(self, name: str) -> None:
        if name not in self._tables:
            self.reducer.put(name, self._gradient(name), in_place=True)
        elif (gradient := self._parameters[name].grad) is not None:
            self.reducer.put(name, gradient)

    def _gradient(self, name: str) -> Tensor:
        if self._accumulated is not None:
            return self._accumulated[name]
        parameter = self._parameters[name]
        if parameter.grad is None:  # unused on this rank
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.layout is not torch.strided:
            raise ModelError(
                name,
                str(parameter.grad.layout),
                "only embeddings that say sparse=True may have sparse gradients",
                "Use torch.nn.Embedding(..., sparse=True), or dense gradients",
            )
        return parameter.grad

    def _write(self, name: str, reduced: Tensor, here: bool) -> None:
        if name in self._tables:
            table = self._parameters[name]
            dense = table.grad is not None and not table.grad.is_sparse
            reduced = reduced.to(table.dtype)
            table.grad = reduced.to_dense() if dense else reduced
            return
        gradient = self._gradient(name)
        if gradient.data_ptr() != reduced.data_ptr():
            gradient.copy_(reduced.view(gradient.shape))
