# SPDX-License-Identifier: Apache-2.0
"""What a stage holds of a micro-batch: gradients through it, and what is freed after them."""

import torch

from wavemare.engine.pipe.micro_batch import MicroBatch


def leaf(*shape):
    return torch.randn(shape).requires_grad_()


def test_gradients_of_several_outputs_are_those_of_one_sum():
    weight, inputs = leaf(3, 4), leaf(2, 3)
    grads = [torch.randn(2, 4), torch.randn(2, 4)]
    hidden = inputs @ weight
    micro_batch = MicroBatch(inputs=inputs, outputs=(hidden.sin(), hidden.cos()), grads=grads)
    micro_batch.backward()
    got = weight.grad, micro_batch.input_grads()[0]
    hidden = inputs @ weight
    total = (hidden.sin() * grads[0]).sum() + (hidden.cos() * grads[1]).sum()
    for ours, expected in zip(got, torch.autograd.grad(total, (weight, inputs)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_outputs_of_integers_take_no_gradient_and_constants_drop_theirs():
    weight = leaf(3)
    mask, constant = torch.tensor([True, False]), torch.ones(2)
    outputs = (mask, weight * 3, constant)
    micro_batch = MicroBatch(outputs=outputs)
    assert [t is o for t, o in zip(micro_batch.differentiable_outputs, outputs[1:], strict=True)]
    micro_batch.grads = [torch.tensor([1.0, 2.0, 4.0]), torch.full((2,), 7.0)]
    micro_batch.backward()
    assert weight.grad.tolist() == [3.0, 6.0, 12.0]


def test_input_gradients_are_zero_where_none_flowed_and_absent_for_integers():
    used, unused = leaf(2), leaf(3, 2).to(torch.bfloat16).detach().requires_grad_()
    inputs = (used, torch.arange(4), unused)
    micro_batch = MicroBatch(inputs=inputs, outputs=used * 5, grads=[torch.ones(2)])
    micro_batch.backward()
    grads = micro_batch.input_grads()
    assert grads[0].tolist() == [5.0, 5.0]
    assert grads[1].shape == (3, 2)
    assert grads[1].dtype == torch.bfloat16
    assert not grads[1].any()
    assert len(grads) == 2
