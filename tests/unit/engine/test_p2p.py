# SPDX-License-Identifier: Apache-2.0
"""Flat messages: a layout described and read back, aligned views, and bits that arrive as sent."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.engine.pipe.p2p import DESCRIPTION, MessageLayout, RecvQueue, SendQueue
from wavemare.errors import CommError, ModelError
from wavemare.pipeline.plan.plan import Kind

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


def test_the_place_of_missing_tensors_is_kept():
    layout = MessageLayout.of(2, (torch.zeros(5), torch.zeros(7)))
    message = layout.pack([1.0, 2.0], [], CPU)
    assert message.numel() == layout.size
    assert layout.header(message) == [1.0, 2.0]


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


class Wire:
    """Stands in for ``torch.distributed``: notes what is posted, sent and waited for, in order."""

    def __init__(self):
        self.log = []
        self.messages = {}

    def work(self, name, on_wait=lambda: None):
        def wait():
            self.log.append(f"wait {name}")
            on_wait()

        return SimpleNamespace(wait=wait)

    def isend(self, message, rank, group):
        self.log.append(f"send {message.tolist()} to {rank} in {group}")
        return self.work(f"send {message.tolist()}")

    def irecv(self, message, rank, group):
        self.log.append(f"post {message.numel()} from {rank} in {group}")
        return self.work(f"recv {message.numel()}", lambda: message.fill_(message.numel()))


@pytest.fixture
def wire(monkeypatch):
    wire = Wire()
    monkeypatch.setattr("torch.distributed.isend", wire.isend)
    monkeypatch.setattr("torch.distributed.irecv", wire.irecv)
    return wire


def of_bytes(length):
    return MessageLayout(0, ((length,),), (torch.uint8,))


def message(*values):
    return torch.tensor(values, dtype=torch.uint8)


def test_a_send_queue_waits_for_the_oldest_only_when_all_slots_are_taken(wire):
    queue = SendQueue(3, "down", slots=2)
    for number in range(4):
        queue.send(message(number))
    queue.flush()
    queue.flush()
    assert wire.log == [
        "send [0] to 3 in down",
        "send [1] to 3 in down",
        "wait send [0]",
        "send [2] to 3 in down",
        "wait send [1]",
        "send [3] to 3 in down",
        "wait send [2]",
        "wait send [3]",
    ]


def test_a_receive_queue_posts_ahead_and_gives_in_the_order_of_posting(wire):
    queue, layouts = RecvQueue(5, "up", CPU), {0: of_bytes(2), 1: of_bytes(3), 2: of_bytes(1)}
    receives = [(Kind.RECV_GRAD, 0, number) for number in layouts]
    queue.expect(receives)
    for _ in receives:
        assert queue.post_expected(lambda receive: layouts[receive[2]], slots=2)
        queue.wait()
    assert not queue.post_expected(lambda receive: layouts[receive[2]], slots=2)
    arrived = {receive: message.tolist() for receive, (*_, message) in queue.arrived.items()}
    assert arrived == dict(zip(receives, [[2, 2], [3, 3, 3], [1]], strict=True))
    assert wire.log == [
        "post 2 from 5 in up",
        "post 3 from 5 in up",
        "wait recv 2",
        "post 1 from 5 in up",
        "wait recv 3",
        "wait recv 1",
    ]


def test_what_is_posted_since_a_step_without_data_has_to_come_in_the_next_one(wire):
    queue, receive = RecvQueue(5, "up", CPU), (Kind.RECV_GRAD, 0, 1)
    for _ in range(2):
        queue.expect([receive, (Kind.RECV_GRAD, 0, 2)])
        assert queue.post_expected(lambda _: of_bytes(2), slots=1)
    assert wire.log == ["post 2 from 5 in up"]
    with pytest.raises(CommError) as caught:
        queue.expect([(Kind.RECV_GRAD, 0, 0), receive])
    assert caught.value.value == "0RG1"
