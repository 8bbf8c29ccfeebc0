# SPDX-License-Identifier: Apache-2.0
"""Replicas in one process: what they compute, what they exchange, and what a row says."""

import pytest
import torch

from benchmarks.local_steps.loss_request import LossRequest, Variant
from benchmarks.local_steps.replay import Inner, Outer, StackedGpt, evaluate, measure, train
from benchmarks.local_steps.sparse_code import SparseCode
from wavemare.engine.local_steps.codec import Code
from wavemare.errors import ConfigError

TINY = {"hidden": 16, "heads": 2, "sequence": 8, "batch": 2, "layers": 1, "steps": 8}
REQUEST = LossRequest(**TINY)


def stepped(count, optimizer, tokens, *, together=False):
    """Return the weights of models after three steps."""
    model = StackedGpt(REQUEST, count, 3)
    inner = Inner(Variant(optimizer, 1e-2, 0), model, 8)
    for number in (1, 2, 3):
        model.losses(tokens).sum().backward()
        inner.step(number, together=together)
    return model.flat()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stacked_models_step_as_each_alone(optimizer):
    tokens = torch.randint(256, (3, 2, 8), generator=torch.Generator().manual_seed(1))
    found = stepped(3, optimizer, tokens)
    for number, weights in enumerate(found):
        alone = stepped(1, optimizer, tokens[number : number + 1])
        assert torch.allclose(weights, alone[0], atol=2e-3 if optimizer == "muon" else 1e-5)
    assert (found[0] - found[1]).abs().max() > 1e-2
    together = stepped(3, optimizer, tokens, together=True)
    whole = stepped(1, optimizer, tokens.view(1, 6, 8))
    assert torch.equal(together[0], together[2])
    assert torch.allclose(together[0], whole[0], atol=2e-3 if optimizer == "muon" else 1e-5)


@pytest.mark.parametrize("code", [Code(32), Code(2), SparseCode(2, 64)], ids=str)
def test_what_messages_leave_out_is_there_in_the_end(code):
    """With momentum 0 and a rate of 1, all that replicas have changed is in their mean."""
    model = StackedGpt(REQUEST, 4, 3)
    outer = Outer(Variant("adamw", 1e-2, 0, 2, code, (1.0, 0.0)), model)
    start = model.flat()[0]
    changes = torch.randn(4, model.numel, generator=torch.Generator().manual_seed(2))
    model.write(model.flat() - changes)
    outer.exchange()
    assert torch.equal(model.flat()[0], model.flat()[3])
    off = (start - model.flat()[0] - changes.mean(0)).norm() / changes.mean(0).norm()
    assert off < 1e-5 if code.is_exact else 0.1 < off < 1.5
    outer.synchronize()
    assert torch.allclose(model.flat(), start - changes.mean(0), atol=1e-5)


def test_a_row_has_the_loss_its_gap_and_its_bytes():
    request = LossRequest(**TINY, optimizers=("adamw",), every=(0, 4), messages=("64of4096x2",))
    result = measure(request)
    synchronous, local = result["rows"]
    assert (synchronous["gap"], synchronous["bytes_share"]) == (0, None)
    assert local["gap"] == pytest.approx(local["loss"] / synchronous["loss"] - 1)
    assert local["bytes_share"] == (64 * 14 + 64) / (32 * 4096) / 4
    assert local["message"] == "64of4096x2"
    warm = train(request.model_copy(update={"warmup": 8}), request.variants()[1])
    assert warm["loss"] == pytest.approx(synchronous["loss"], abs=1e-4)


def test_evaluation_leaves_the_weights():
    model = StackedGpt(REQUEST, 2, 3)
    before = model.flat()
    assert 3 < evaluate(REQUEST, model, 0) < 9
    assert torch.equal(model.flat(), before)
    assert all(weight.requires_grad for weight in model.weights.values())


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"messages": ("3",)}, "--messages"),
        ({"messages": ("64x2",)}, "--messages"),
        ({"messages": ("6of4096x2",)}, "--messages"),
        ({"outer": ("1",)}, "--outer"),
        ({"optimizers": ("sgd",)}, "--optimizers"),
        ({"rounds": 2}, "--rounds"),
    ],
)
def test_wrong_options_are_refused_by_name(options, key):
    with pytest.raises(ConfigError) as caught:
        LossRequest.of(**options)
    assert caught.value.key == key
