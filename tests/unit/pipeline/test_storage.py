"""Which parameters share memory, and exchanging contents in place."""

import pytest
import torch
from torch.nn import Parameter

from wavemare.errors import ModelError
from wavemare.pipeline import storage
from wavemare.pipeline.storage import distinct, size_bytes, swap


def parameter(tensor):
    """Return a parameter in the memory of a tensor."""
    result = Parameter(torch.empty(0))
    result.data = tensor
    return result


def same(found, expected):
    return [id(p) for p in found] == [id(p) for p in expected]


def test_views_side_by_side_in_a_flat_buffer_are_all_kept_in_their_order():
    flat = torch.zeros(12)
    views = [parameter(flat[6:12].view(2, 3)), parameter(flat[0:2]), parameter(flat[2:6])]
    assert same(distinct(views), views)


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


def test_frozen_and_empty_parameters_are_left_out():
    trained = Parameter(torch.zeros(2))
    frozen = Parameter(torch.zeros(2), requires_grad=False)
    assert same(distinct([frozen, Parameter(torch.zeros(0)), trained]), [trained])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (slice(0, 4), slice(2, 6)),
        # Strided views that interleave.
        (slice(0, 6, 2), slice(1, 6, 2)),
        (slice(0, 6, 2), slice(1, 4, 2)),
    ],
)
def test_partly_shared_memory_is_refused(left, right):
    flat = torch.zeros(6)
    with pytest.raises(ModelError, match="memory"):
        distinct([parameter(flat[left]), parameter(flat[right])])


@pytest.mark.parametrize("piece_bytes", [1 << 20, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_contents_are_exchanged_in_place(monkeypatch, piece_bytes, dtype):
    monkeypatch.setattr(storage, "_HOST_BYTES", piece_bytes)
    shapes = [(7, 5), (3,), (), (4, 4)]
    left = [torch.randn(shape).to(dtype) for shape in shapes]
    left[3] = left[3].t()
    right = [torch.randn(shape).to(dtype) for shape in shapes]
    expected = [t.clone() for t in right], [t.clone() for t in left]
    addresses = [t.data_ptr() for t in (*left, *right)]
    swap(left, right)
    for found, wanted in zip((left, right), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert [t.data_ptr() for t in (*left, *right)] == addresses


def test_size_counts_elements():
    assert size_bytes([torch.zeros(3), torch.zeros(2, 2, dtype=torch.bfloat16)]) == 20
