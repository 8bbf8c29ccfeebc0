# SPDX-License-Identifier: Apache-2.0
"""State and figures of the collectives in an engine, and what they are refused beside."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from support.refusals import refuses
from wavemare.comm.collective_queue import Statistics, Totals
from wavemare.comm.config import HALVES, LOOSE_MODES, SparseCollectiveConfig
from wavemare.comm.executors import EXECUTORS_BY_MODE
from wavemare.engine.sparse.attach import attach_sparse_gradients
from wavemare.engine.sparse.buckets import Bucket
from wavemare.engine.sparse.gradients import SparseGradients
from wavemare.engine.sparse.weights import choose_weights
from wavemare.errors import CheckpointError, ConfigError


class Comm:
    """Keeps a state, and counts."""

    def __init__(self, compressor="block_topk"):
        self.compressor = compressor
        self.totals = Totals()
        self.loaded = None

    def state_dict(self):
        return {"compressor": {"residuals": {"a": 1}}} if self.compressor else {}

    def load_state_dict(self, state):
        self.loaded = state


class Gradients(SparseGradients):
    """Those of one bucket."""

    rounds = None

    def __init__(self, comm, numel=3, boundary=True):
        self.comm, self._metrics, self._told = comm, {}, True
        self._engine = SimpleNamespace(is_gradient_accumulation_boundary=lambda: boundary)
        self.reducer = SimpleNamespace(buckets=[Bucket("a to b", torch.float32, numel, ())])

    def reduce(self):
        raise AssertionError


def test_residuals_of_other_buckets_are_refused():
    state = Gradients(Comm()).extra_state()
    comm = Comm()
    with refuses(CheckpointError, "wavemare.sparse_collective", "1 buckets"):
        Gradients(comm, numel=4).load_extra_state(state)
    assert comm.loaded is None


@pytest.mark.parametrize(("boundary", "calls"), [(True, 2), (False, None)])
def test_figures_are_of_all_calls_of_a_step(boundary, calls):
    gradients = Gradients(Comm(), boundary=boundary)
    for _ in range(2):
        gradients.comm.totals.add(Statistics(executor="pushpull", payload_bytes=10))
    gradients.record_metrics()
    assert gradients.metrics().get("sparse_calls_pushpull") == calls


def test_the_loose_modes_are_those_of_the_executors():
    loose = {name for name, kind in EXECUTORS_BY_MODE.items() if not kind.deterministic}
    assert loose == LOOSE_MODES


def test_the_modes_with_halves_are_those_of_the_executors():
    assert HALVES == tuple(n for n, kind in EXECUTORS_BY_MODE.items() if kind.reduce_scatter)


def engine(module=None, **changes):
    values = {"zero": 0, "fp16": False, "bf16": False, "experts": False, "sequence": 1, **changes}
    return SimpleNamespace(
        module=module or torch.nn.Linear(2, 2),
        has_moe_layers=values["experts"],
        sequence_parallel_size=values["sequence"],
        zero_optimization_stage=lambda: values["zero"],
        fp16_enabled=lambda: values["fp16"],
        bfloat16_enabled=lambda: values["bf16"],
    )


def refusal(engine):
    with pytest.raises(ConfigError) as caught:
        attach_sparse_gradients(engine, SparseCollectiveConfig(mode="pushpull"), 1.0)
    return caught.value


def test_experts_and_shared_samples_are_refused():
    assert "experts" in refusal(engine(experts=True)).reason
    refused = refusal(engine(sequence=2))
    assert "sequence" in refused.reason
    assert (refused.key, refused.value) == ("wavemare.sparse_collective.mode", "pushpull")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero": 1}, "zero_optimization.stage"),
        ({"zero": 2}, "zero_optimization.stage"),
        ({"fp16": True}, "fp16.enabled"),
        ({"bf16": True}, "bf16.enabled"),
    ],
)
def test_sparse_gradients_are_refused_where_the_optimizer_flattens_them(changes, key):
    module = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True))
    refused = refusal(engine(module, **changes))
    assert refused.key == key
    assert "0.weight" in refused.reason


@pytest.mark.parametrize(
    ("make", "tables", "expected"),
    [
        (torch.optim.SGD, 50, "changed"),
        (torch.optim.Adagrad, 50, "changed"),
        (partial(torch.optim.SGD, momentum=0.9), 50, "all"),
        (partial(torch.optim.SGD, weight_decay=0.1), 50, "all"),
        (partial(torch.optim.Adagrad, weight_decay=0.1), 50, "all"),
        (torch.optim.Adam, 50, "all"),
        (type("Own", (torch.optim.SGD,), {}), 50, "all"),
        (torch.optim.SGD, 24, "all"),
    ],
)
def test_changed_weights_are_chosen_where_settings_leave_other_rows(make, tables, expected):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = make([{"params": weights[:1]}, {"params": weights[1:]}], lr=0.1)
    assert choose_weights(optimizer, tables, 100)[0] == expected
    if expected == "changed":  # what the choice relies on
        kept = weights[0].detach().clone()
        for weight in weights:
            weight.grad = torch.zeros(2)
        optimizer.step()
        assert torch.equal(weights[0].view(torch.int32), kept.view(torch.int32))
    # One group with momentum is enough.
    optimizer.param_groups[1]["weight_decay"] = 0.1
    assert choose_weights(optimizer, tables, 100)[0] == "all"
