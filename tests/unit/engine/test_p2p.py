# SPDX-License-Identifier: Apache-2.0
"""Flat messages: a layout described and read back, aligned views, and bits that arrive as sent."""

import math
from collections import deque
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.comm import comm as deepspeed_comm
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from wavemare.engine.launch.group import leave_out_shared_memory
from wavemare.engine.pipe.message import DESCRIPTION, MessageLayout
from wavemare.engine.pipe.p2p import PeerLink, RecvQueue
from wavemare.errors import CommError, ModelError
from wavemare.pipeline.plan.plan import Action, Kind

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
    found = MessageLayout.described(layout.describe())
    assert found == layout.with_header(0)
    assert found.with_header(numbers) == layout


@given(sendable, headers)
def test_header_and_tensors_arrive_bit_for_bit(outputs, header):
    layout = MessageLayout.of(len(header), outputs)
    message = layout.pack(header, listed(outputs), CPU)
    assert message.nbytes == layout.size
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
    message = layout.empty(CPU)
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
    assert MessageLayout.described(DESCRIPTION.header(message)).with_header(3) == layout


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
    assert MessageLayout.described(DESCRIPTION.header(message)) == layout
    with pytest.raises(ModelError) as caught:
        MessageLayout(0, ((1,),) * (most + 1), (torch.float32,) * (most + 1)).describe()
    assert "fewer tensors" in caught.value.remedy
    assert str(DESCRIPTION.numbers) in caught.value.remedy


def test_a_layout_behind_another_header_has_the_same_tensors():
    layout = MessageLayout.of(2, (torch.zeros(3), torch.zeros(1, 2, dtype=torch.int32)))
    other = layout.with_header(5)
    assert (other.numbers, other.single) == (5, layout.single)
    assert (other.shapes, other.dtypes) == (layout.shapes, layout.dtypes)
    assert other == MessageLayout(5, layout.shapes, layout.dtypes)
    assert other.with_header(2) == layout


@pytest.fixture
def first_of_two(monkeypatch):
    """Be the first of two ranks, whose messages arrive with any content."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    leave_out_shared_memory()
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    yield
    distributed.destroy_process_group()
    deepspeed_comm.cdb = None


def link(**options):
    grid = SimpleNamespace(pipe_groups=[[0, 1]], get_pipe_parallel_group=lambda: None)
    return PeerLink(grid, CPU, (0, 1), **options)


def send(number):
    return Action(Kind.SEND_ACTIVATION, 0, number)


UNLIKE = {
    "shape": torch.zeros(2, 3),
    "type": torch.zeros(2, 4, dtype=torch.float64),
    "number": (torch.zeros(2, 4), torch.zeros(2, 4)),
    "tuple": (torch.zeros(2, 4),),
}


@pytest.mark.parametrize("other", UNLIKE.values(), ids=UNLIKE)
def test_outputs_unlike_those_before_are_refused_unless_they_may_be(first_of_two, other):
    ours = link()
    for number in range(2):
        ours.send_activation(send(number), torch.zeros(2, 4))
    with pytest.raises(ModelError) as caught:
        ours.send_activation(send(2), other)
    assert caught.value.key == "activations"
    for key in ('"dynamic_shape": true', '"dataloader_drop_last": true'):
        assert key in caught.value.remedy
    ours.reset_shapes()
    ours.send_activation(send(2), other)
    ours.close()
    dynamic = link(dynamic=True)
    for number, outputs in enumerate((torch.zeros(2, 4), other)):
        dynamic.send_activation(send(number), outputs)
    dynamic.close()


def test_the_end_of_the_data_has_no_shape_of_its_own(first_of_two):
    ours = link(activation_numbers=1)
    ours.send_activation(send(0), torch.zeros(2, 4), [0.0])
    ours.send_activation(send(1), (), [1.0])
    ours.send_activation(send(2), torch.zeros(2, 4), [0.0])
    ours.close()


RECEIVES = [(Kind.RECV_ACTIVATION, 1, number) for number in range(4)]


@pytest.fixture
def queue(monkeypatch):
    """A queue whose messages have a header of one number, which the test says."""
    ours, ours.sent = RecvQueue(1, None, CPU), deque()

    def arrive(message, rank, group):
        number = ours.sent.popleft() if ours.sent else 0.0
        message.copy_(torch.tensor([number], dtype=torch.float64).view(torch.uint8))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(distributed, "irecv", arrive)
    return ours


def posted(queue, slots):
    """Return how many receives are posted anew."""
    before = len(queue.expected)
    queue.post_expected(lambda _: MessageLayout(1), slots)
    return before - len(queue.expected)


def test_receives_are_posted_up_to_the_slots_and_arrive_in_order(queue):
    queue.sent += [5.0, 6.0]
    queue.expect(RECEIVES)
    assert posted(queue, 3) == 3
    assert posted(queue, 3) == 0
    assert queue.wait() == [5.0]
    assert list(queue.arrived) == RECEIVES[:1]
    assert posted(queue, 3) == 1
    assert queue.wait() == [6.0]
    assert list(queue.arrived) == RECEIVES[:2]


def test_receives_of_unknown_layout_are_not_posted(queue):
    queue.expect(RECEIVES)
    assert not queue.post_expected(lambda _: None, 3)
    assert len(queue.expected) == len(RECEIVES)


def test_what_is_posted_already_is_not_posted_again_in_a_plan_that_begins_alike(queue):
    queue.expect(RECEIVES)
    assert posted(queue, 2) == 2
    queue.expect(RECEIVES)
    assert list(queue.expected) == RECEIVES[2:]
    with pytest.raises(CommError):
        queue.expect(RECEIVES[1:])


def test_nothing_is_posted_behind_a_gate_before_it_says_that_more_follows(queue):
    queue.expect(RECEIVES, gates=frozenset(RECEIVES[1:2]))
    assert posted(queue, 4) == 2
    queue.wait()
    assert posted(queue, 4) == 0
    queue.wait()
    assert posted(queue, 4) == 2


def test_a_gate_that_says_that_nothing_follows_holds_for_the_step_and_not_for_the_next(queue):
    queue.sent.append(1.0)
    gates = frozenset(RECEIVES[:1])
    queue.expect(RECEIVES, gates)
    assert posted(queue, 4) == 1
    assert queue.wait() == [1.0]
    assert posted(queue, 4) == 0
    queue.expect(RECEIVES, gates)
    assert posted(queue, 4) == 1
    queue.expect(RECEIVES, gates)  # it is posted already, and a gate still
    assert posted(queue, 4) == 0
    assert queue.wait() == [0.0]
    assert posted(queue, 4) == 3
