# SPDX-License-Identifier: Apache-2.0
"""Which parameters share memory, and references to parts of them."""

import pytest
import torch
from torch.nn import Parameter

from support.refusals import refuses
from wavemare.errors import ModelError
from wavemare.pipeline.staleness.storage import (
    References,
    distinct,
    resolve,
)


def parameter(tensor):
    """Return a parameter in the memory of a tensor."""
    result = Parameter(torch.empty(0))
    result.data = tensor
    return result


def same(kept, expected):
    return [id(p) for p in kept] == [id(p) for p in expected]


def test_tied_parameters_and_views_of_the_same_memory_are_kept_once():
    first, other = Parameter(torch.zeros(2, 3)), Parameter(torch.zeros(4))
    tied = parameter(first.data)
    transposed = parameter(first.data.t())
    assert same(distinct([first, other, first, tied, transposed]), [first, other])


def test_a_flat_buffer_stands_for_its_views():
    flat = Parameter(torch.zeros(6))
    views = [parameter(flat.data[0:2]), parameter(flat.data[2:6])]
    other = Parameter(torch.zeros(3))
    assert same(distinct([*views, other, flat]), [other, flat])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (slice(0, 4), slice(2, 6)),
        (slice(0, 6, 2), slice(1, 6, 2)),  # interleaved views have gaps
    ],
)
def test_partly_shared_memory_is_refused(left, right):
    flat = torch.zeros(6)
    with refuses(ModelError, "parameters"):
        distinct([parameter(flat[left]), parameter(flat[right])])


VIEWS = {
    "t": lambda w: w.t(),
    "rest": lambda w: w[1:],
    "every other": lambda w: w[:, ::2],
    "row": lambda w: w[-1],
    "column": lambda w: w[:, -2:][:, 0],
    "diagonal": lambda w: w.diagonal(),
    "chunk": lambda w: w.chunk(2, -1)[1],
    "unsqueezed": lambda w: w.unsqueeze(1),
    "expanded": lambda w: w.unsqueeze(0).expand(50, *w.shape),
    "flat": lambda w: w.flatten(),
    "unfolded": lambda w: w.unfold(-1, 2, 1),
}


def found(parameters):
    references = References(parameters)
    references.find()
    return references


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_reference_is_the_same_view_of_whatever_the_parameter_is_then(view, offset, dtype):
    flat = torch.randn(40).to(dtype)
    first, second = parameter(flat[offset : offset + 12].view(3, 4)), parameter(flat[20:36])
    second.data = second.data.view(4, 4)
    references = found([second, first])
    kept = [(p, references.of(view(p))) for p in (first, second)]
    for other_offset in (0, 2):
        for p, reference in kept:
            other = torch.randn(30).to(dtype)[other_offset : other_offset + p.numel()].view(p.shape)
            p.data = other
            seen = resolve(reference)
            assert torch.equal(seen, view(other))
            assert (seen.stride(), seen.dtype) == (view(other).stride(), dtype)
            assert seen.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_other_tensors_stand_for_their_contents_alone():
    flat = torch.randn(30)
    trained, behind = parameter(flat[10:20]), parameter(flat[22:26])
    elsewhere = torch.randn(10, requires_grad=True)
    others = [
        flat[:10],
        flat[20:22],
        flat[26:],
        # More elements than there is memory up to the next parameter.
        flat[9:10].expand(7, 100),
        torch.randn(10) * elsewhere,
        elsewhere,
        torch.tensor(2),
        torch.zeros(0),
        torch.eye(3).to_sparse(),
    ]
    references = found([trained, behind])
    for tensor in others:
        kept = references.of(tensor)
        trained.data = torch.zeros(10)
        assert resolve(kept) is kept
        assert torch.equal(kept.to_dense(), tensor.to_dense())
        assert kept.grad_fn is None
        if tensor.layout is torch.strided:
            assert kept.data_ptr() == tensor.data_ptr()
        trained.data = flat[10:20]


@pytest.mark.parametrize(
    "tensor",
    [
        lambda flat: flat,
        lambda flat: flat[3:5],
        lambda flat: flat[5:13],
        lambda flat: flat[5:15],
        lambda flat: flat[11:15],
        lambda flat: flat[4:8].view(torch.int32),
        lambda flat: flat[4:8].view(torch.complex64),
    ],
)
def test_what_is_more_than_a_part_of_one_parameter_is_refused(tensor):
    flat = torch.randn(16)
    references = found([parameter(flat[4:10]), parameter(flat[10:14])])
    with refuses(ModelError, "parameters"):
        references.of(tensor(flat))


def test_a_layer_that_keeps_two_parameters_at_once_is_named_in_its_forward_pass():
    flat = torch.randn(8)
    left, right = parameter(flat[:4]), parameter(flat[4:])
    x = torch.randn(8, requires_grad=True)
    with References([left, right]).kept(), refuses(ModelError, "parameters", (8,)):
        x * flat
