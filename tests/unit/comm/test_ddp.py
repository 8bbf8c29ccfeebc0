# SPDX-License-Identifier: Apache-2.0
import itertools
from types import SimpleNamespace

import pytest
import torch

from wavemare.comm.compress import make_compressor
from wavemare.comm.config import CompressorConfig
from wavemare.comm.ddp import _ByParameter, _Hook
from wavemare.errors import ConfigError

SIZES = {"a": 70, "b": 33, "c": 128}
KINDS = {
    "block_topk": {"ratio": 0.3},
    "block_randomk": {"ratio": 0.3},
    "block_threshold": {"threshold": 4.5},
    "block_topk_ratio": {"ratio": 0.3},
}


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def run(kind, orders, steps=4):
    """Compress the parameters in buckets of one or more of them, in some order."""
    inner = make_compressor(CompressorConfig(type=kind, **KINDS[kind]), 16)
    compressor = _ByParameter(inner)
    sent = []
    for step, order in zip(range(steps), orders, strict=False):
        values, out = gradients(step), {}
        for number, names in enumerate(order):
            key = f"{step % 2} {number}"  # keys say nothing of what is in a bucket
            compressor.layouts[key] = [(name, SIZES[name]) for name in names]
            flat = torch.cat([values[name] for name in names])
            compressor.step(key, flat, weights=1 + flat.abs())
            out |= dict(zip(names, flat.split([SIZES[name] for name in names]), strict=True))
        sent.append(out)
    return sent, compressor.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_and_what_waits_does_not_depend_on_the_buckets(kind):
    whole = run(kind, itertools.repeat(["abc"]))
    rebuilt = run(kind, [["ab", "c"], ["c", "ba"], ["c", "b", "a"], ["cba"]])
    for one, other in zip(whole[0], rebuilt[0], strict=True):
        assert all(one[name].equal(other[name]) for name in SIZES)
    assert whole[1]["settings"]["type"] == kind
    assert whole[1]["steps"] == rebuilt[1]["steps"] == dict.fromkeys(SIZES, 4)
    for name in SIZES:
        assert whole[1]["residuals"][name].equal(rebuilt[1]["residuals"][name])
        assert whole[1]["residuals"][name].any()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["two sparse dimensions", "csr"])
def test_a_gradient_that_is_no_rows_is_refused_by_its_parameters_name(layout):
    dense = torch.eye(3)
    model = SimpleNamespace(module=torch.nn.Linear(3, 3))
    gradient = dense.to_sparse(2) if layout == "two sparse dimensions" else dense.to_sparse_csr()
    hook = _Hook(model, None, None)
    hook._handles.append(None)  # as within a backward pass
    bucket = SimpleNamespace(buffer=lambda: gradient, parameters=lambda: [model.module.weight])
    with pytest.raises(ConfigError) as caught:
        hook.reduce(bucket)
    assert caught.value.key == "weight"
