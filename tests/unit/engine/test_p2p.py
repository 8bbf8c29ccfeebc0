# SPDX-License-Identifier: Apache-2.0
"""Flat messages: a layout described and read back, aligned views, and bits that arrive as sent."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.engine.pipe.p2p import DESCRIPTION, MessageLayout
from wavemare.errors import ModelError

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SPECIAL = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324, 1e308]


def random_bits(shape, dtype, seed):
    """A tensor of every bit pattern that there is, nan and inf among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
tensors = st.builds(random_bits, shapes, st.sampled_from(DTYPES), st.integers(0, 2**31))
sendable = st.one_of(tensors, st.lists(tensors, max_size=5).map(tuple))
headers = st.lists(st.sampled_from(SPECIAL) | st.floats(), max_size=9)


def bits_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def listed(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


@given(sendable, st.integers(0, 20))
def test_a_layout_is_read_back_from_its_description(outputs, numbers):
    layout = MessageLayout.of(numbers, outputs)
    assert layout.single == isinstance(outputs, torch.Tensor)
    assert [(tuple(t.shape), t.dtype) for t in listed(outputs)] == list(
        zip(layout.shapes, layout.dtypes, strict=True)
    )
    assert MessageLayout.described(layout.describe(), numbers) == layout


@given(sendable, headers)
def test_header_and_tensors_arrive_bit_for_bit(outputs, header):
    layout = MessageLayout.of(len(header), outputs)
    message = layout.pack(header, listed(outputs), CPU)
    assert message.dtype == torch.uint8
    assert message.shape == (layout.size,)
    arrived = message.clone()  # as it is received: in other memory
    packed = torch.tensor(header, dtype=torch.float64)
    assert bits_of(torch.tensor(layout.header(arrived), dtype=torch.float64)) == bits_of(packed)
    for sent, got in zip(listed(outputs), layout.tensors(arrived), strict=True):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert bits_of(got) == bits_of(sent)


@given(sendable, st.integers(0, 9))
def test_tensors_are_aligned_views_that_do_not_overlap(outputs, numbers):
    layout = MessageLayout.of(numbers, outputs)
    message = torch.zeros(layout.size, dtype=torch.uint8)
    end = numbers * 8
    for view, start in zip(layout.tensors(message), layout.offsets, strict=False):
        assert start % 64 == 0
        assert start >= end
        if view.numel():
            assert view.data_ptr() == message.data_ptr() + start
        end = start + view.nbytes
    assert end <= layout.size == layout.offsets[-1]


def test_a_description_travels_in_a_message_of_its_own():
    layout = MessageLayout.of(3, (torch.zeros(2, 5), torch.zeros((), dtype=torch.bool)))
    message = DESCRIPTION.pack(layout.describe(), [], CPU)
    assert message.numel() == DESCRIPTION.size
    assert MessageLayout.described(DESCRIPTION.header(message), 3) == layout


def test_a_tensor_that_is_not_contiguous_arrives_in_its_order():
    sent = torch.arange(12.0).view(3, 4).t()
    layout = MessageLayout.of(0, sent)
    assert torch.equal(layout.tensors(layout.pack([], [sent], CPU))[0], sent)


def test_a_message_keeps_no_graph_alive():
    weight = torch.ones(3, requires_grad=True)
    outputs = weight * 2
    layout = MessageLayout.of(0, outputs)
    message = layout.pack([], [outputs], CPU)
    assert not message.requires_grad
    assert not layout.tensors(message)[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_a_type_that_no_stage_can_send_is_refused_by_name(dtype):
    with pytest.raises(ModelError) as caught:
        MessageLayout(0, ((2,),), (dtype,)).describe()
    assert caught.value.key == "activations"
    assert caught.value.value == dtype
    assert caught.value.remedy


def test_as_many_tensors_as_a_description_holds_and_no_more():
    most = (DESCRIPTION.numbers - 2) // 3  # type, number of dimensions, one dimension
    layout = MessageLayout(0, ((1,),) * most, (torch.float32,) * most)
    message = DESCRIPTION.pack(layout.describe(), [], CPU)
    assert MessageLayout.described(DESCRIPTION.header(message), 0) == layout
    with pytest.raises(ModelError) as caught:
        MessageLayout(0, ((1,),) * (most + 1), (torch.float32,) * (most + 1)).describe()
    assert "fewer tensors" in caught.value.remedy
    assert str(DESCRIPTION.numbers) in caught.value.remedy
