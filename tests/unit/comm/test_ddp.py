# SPDX-License-Identifier: Apache-2.0
"""The hook for DistributedDataParallel, with buckets as torch may form them."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from wavemare.comm.config import CompressorConfig
from wavemare.comm.ddp import register_ddp_hook
from wavemare.errors import ConfigError

SIZES = {"a": 70, "b": 33, "c": 128}
KINDS = {
    "block_topk": {"ratio": 0.3},
    "block_randomk": {"ratio": 0.3},
    "block_threshold": {"threshold": 4.5},
}


class Model:
    """What the hook uses of a DistributedDataParallel."""

    device = torch.device("cpu")

    def __init__(self, module, transport):
        self.module = module
        self.process_group = transport

    def register_comm_hook(self, state, hook):
        self.hook = hook

    def reduce(self, gradient, parameters):
        bucket = SimpleNamespace(buffer=lambda: gradient, parameters=lambda: parameters)
        return self.hook(None, bucket).wait()


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def run(transport, kind, orders, steps=4):
    """Compress the parameters in buckets of one or more of them, in some order."""
    weights = {name: torch.nn.Parameter(1 + torch.arange(SIZES[name]).float()) for name in SIZES}
    model = Model(torch.nn.ParameterDict(weights), transport)
    compressor = CompressorConfig(type=kind, **KINDS[kind])
    sent = []
    with register_ddp_hook(model, block=16, compressor=compressor) as comm:
        for step, order in zip(range(steps), orders, strict=False):
            values, out = gradients(step), {}
            for names in order:
                flat = torch.cat([values[name] for name in names])
                summed = model.reduce(flat, [weights[name] for name in names])
                out |= dict(zip(names, summed.split([SIZES[name] for name in names]), strict=True))
            sent.append(out)
        return sent, comm.state_dict()["compressor"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_and_what_waits_does_not_depend_on_the_buckets(alone, kind):
    whole = run(alone, kind, itertools.repeat(["abc"]))
    rebuilt = run(alone, kind, [["ab", "c"], ["c", "ba"], ["c", "b", "a"], ["cba"]])
    for one, other in zip(whole[0], rebuilt[0], strict=True):
        assert all(one[name].equal(other[name]) for name in SIZES)
    assert whole[1]["settings"]["type"] == kind
    assert whole[1]["steps"] == rebuilt[1]["steps"] == dict.fromkeys(SIZES, 4)
    for name in SIZES:
        assert whole[1]["residuals"][name].equal(rebuilt[1]["residuals"][name])
        assert whole[1]["residuals"][name].any()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["two sparse dimensions", "csr"])
def test_a_gradient_that_is_no_rows_is_refused_by_its_parameters_name(alone, layout):
    dense = torch.eye(3)
    model = Model(torch.nn.Linear(3, 3), alone)
    gradient = dense.to_sparse(2) if layout == "two sparse dimensions" else dense.to_sparse_csr()
    with register_ddp_hook(model), pytest.raises(ConfigError) as caught:
        model.reduce(gradient, [model.module.weight])
    assert caught.value.key == "weight"
