# SPDX-License-Identifier: Apache-2.0
"""Segments run as waves: gradients of plain accumulation, memory of one wave."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from torch import nn

from wavemare.engine.waves.executor import Hooks, WaveExecutor
from wavemare.engine.waves.segments import Segment, Segments, profile_segments
from wavemare.engine.waves.wavelet import WaveProbe
from wavemare.errors import ModelError
from wavemare.models.segments import segments_of
from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.wave.gain import peak_bytes
from wavemare.pipeline.wave.schedule import (
    accumulation_step,
    in_phase_step,
    tick_tock,
    tick_tock_step,
)

VOCABULARY, LENGTH = 50, 16


def build_gpt2(**changes):
    transformers.set_seed(7)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **changes,
    )
    return transformers.GPT2LMHeadModel(config)


def build_bert():
    transformers.set_seed(7)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    return transformers.BertForMaskedLM(config)


def build_classifier():
    config = build_bert().config
    config.num_labels = 3
    transformers.set_seed(7)
    return transformers.BertForSequenceClassification(config)


def batches_of(model, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, LENGTH // 2 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        if isinstance(model, transformers.BertForSequenceClassification):
            labels = torch.arange(3)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("build", "micro_batches", "dtype", "checkpointing"),
    [
        (build_gpt2, 4, torch.float32, False),
        (build_gpt2, 2, torch.bfloat16, True),
        (build_bert, 2, torch.float32, True),
        (build_bert, 4, torch.bfloat16, False),
        (build_classifier, 3, torch.float32, False),
    ],
)
def test_gradients_are_those_of_accumulation_bit_for_bit(
    build, micro_batches, dtype, checkpointing
):
    """With dropout: backward passes draw no random numbers, and forward passes stay in order."""
    stock = build().to(dtype).train()
    if checkpointing:
        stock.activation_checkpointing_enable()
    ours = copy.deepcopy(stock)
    segments = segments_of(ours)
    batches = list(batches_of(stock, micro_batches))
    torch.manual_seed(3)
    losses = []
    for batch in batches:
        loss = stock(**batch).loss
        (loss / micro_batches).backward()
        losses.append(loss.detach())
    torch.manual_seed(3)
    found = profile_segments(segments, ours, batches[0])
    executor = WaveExecutor(segments, ours, found, Hooks(scale=lambda x: x / micro_batches))
    actions = tick_tock_step(len(segments.names), micro_batches)
    assert torch.equal(
        torch.stack(executor.run(actions, iter(batches))).float(), torch.stack(losses).float()
    )
    for (name, expected), got in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(expected.grad, got.grad), name


class LiveBytes:
    """Counts what autograd keeps at any time, each storage once, weights left aside."""

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # an output itself would hold what holds this

    def __init__(self, module):
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.counts = {}
        self.now = self.most = 0

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.tensor)

    def pack(self, tensor):
        kept = self.Kept(tensor)
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self.weights:
            self.counts[key] = self.counts.get(key, 0) + 1
            if self.counts[key] == 1:
                self.now += size
                self.most = max(self.most, self.now)
            weakref.finalize(kept, self.free, key, size)
        return kept

    def free(self, key, size):
        self.counts[key] -= 1
        if not self.counts[key]:
            del self.counts[key]
            self.now -= size


class Stack(nn.Module):
    """MLP blocks; a block keeps ``widths`` times the bytes of a boundary, and more."""

    def __init__(self, widths, size=16):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(size, size * w), nn.Tanh(), nn.Linear(size * w, size))
            for w in widths
        )

    def wave_segments(self):
        return Segments(
            split=lambda batch: ((batch,), None),
            body=tuple(
                Segment(f"block {n}", lambda carry, block=block: (block(carry[0]),))
                for n, block in enumerate(self.blocks)
            ),
            head=lambda carry, labels: carry[0].square().mean(),
        )


def peak_of(model, actions, micro_batches):
    segments = model.wave_segments()
    batches = [torch.randn(64, 16) for _ in range(micro_batches)]
    found = profile_segments(segments, model, batches[0])
    executor = WaveExecutor(segments, model, found)
    live = LiveBytes(model)
    with live.hooks():
        executor.run(actions, iter(batches))
    gc.collect()
    assert live.now == 0
    return live.most, found.saved_bytes


@pytest.mark.parametrize(
    "layers", [2, 12, *(pytest.param(n, marks=pytest.mark.nightly) for n in (4, 8, 24))]
)
def test_the_peak_is_that_of_one_wave(layers):
    model = Stack([64] * layers)
    one, saved = peak_of(model, accumulation_step(layers + 1, 2), 2)
    tick_tock, _ = peak_of(model, tick_tock_step(layers + 1, 4), 4)
    together, _ = peak_of(model, in_phase_step(layers + 1, 2), 2)
    assert 0.99 <= tick_tock / one <= 1.02
    assert together / one == pytest.approx(2, abs=0.03)
    if layers == 12:
        assert tick_tock / together <= 0.52
    assert sum(saved) == pytest.approx(one, rel=0.02)


PROFILES = {
    "uniform": [4] * 12,
    "front": [16, 16, 8, 8, 4, 4, 2, 2, 1, 1, 1, 1],
    "back": [1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16],
}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_predicted_peak_is_within_two_percent(profile):
    model = Stack(PROFILES[profile])
    measured, saved = peak_of(model, tick_tock_step(13, 3), 3)
    plan = tick_tock(13, 3)
    assert measured == pytest.approx(peak_bytes(plan, saved), rel=0.02)


def test_a_tensor_that_is_not_handed_on_is_refused_by_name():
    class Leaky(Stack):
        def wave_segments(self):
            segments = super().wave_segments()

            def keeping(carry):
                self.hidden = self.blocks[0](carry[0])
                return (self.hidden,)

            def using(carry):
                return (self.blocks[2](carry[0]) + self.hidden,)

            body = (Segment("first", keeping), segments.body[1], Segment("third", using))
            return Segments(segments.split, body, segments.head)

    model = Leaky([2, 2, 2])
    with pytest.raises(ModelError, match=r"segment third.*segment first has computed"):
        profile_segments(model.wave_segments(), model, torch.randn(4, 16))


def test_a_survey_leaves_no_trace():
    model = build_gpt2().train()
    batch = next(batches_of(model, 1))
    segments = segments_of(model)
    state = torch.get_rng_state()
    gc.collect()
    before = sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())
    outputs = []
    block = model.transformer.h[1].mlp.register_forward_hook(
        lambda module, inputs, output: outputs.append(weakref.ref(output))
    )
    found = profile_segments(segments, model, batch)
    block.remove()
    assert min(found.saved_bytes) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    gc.collect()
    assert [output() for output in outputs] == [None]
    # Masks and positions of the last micro-batches stay.
    assert sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects()) - before <= 4


def test_a_weight_of_many_segments_is_summed_as_autograd_does():
    """The same block three times: in which order its gradients are added decides the last bits."""

    class Repeated(Stack):
        def wave_segments(self):
            first = super().wave_segments()
            return Segments(first.split, (first.body[0],) * 3, first.head)

    ours = Repeated([2])
    stock = copy.deepcopy(ours)
    batches = [torch.randn(64, 16) for _ in range(3)]
    for batch in batches:
        carry = batch
        for _ in range(3):
            carry = stock.blocks[0](carry)
        carry.square().mean().backward()
    segments = ours.wave_segments()
    found = profile_segments(segments, ours, batches[0])
    WaveExecutor(segments, ours, found).run(tick_tock_step(4, 3), iter(batches))
    for expected, got in zip(stock.parameters(), ours.parameters(), strict=True):
        assert torch.equal(expected.grad, got.grad)


def test_an_error_drops_what_is_under_way():
    model = Stack([2, 2])
    segments = model.wave_segments()
    found = profile_segments(segments, model, torch.randn(4, 16))
    executor = WaveExecutor(segments, model, found)
    batches = iter([torch.randn(4, 16), torch.randn(4, 5)])
    live = LiveBytes(model)
    message = ""
    with live.hooks():
        try:
            executor.run(tick_tock_step(3, 2), batches)
        except RuntimeError as error:  # by hand: what pytest keeps of it would keep the tensors
            message = str(error)
    assert "shapes" in message
    gc.collect()
    assert live.now == 0
    fine = iter([torch.randn(4, 16), torch.randn(4, 16)])
    assert len(executor.run(tick_tock_step(3, 2), fine)) == 2


def test_shapes_may_differ_between_micro_batches():
    model = Stack([2, 2])
    segments = model.wave_segments()
    found = profile_segments(segments, model, torch.randn(4, 16))
    batches = [torch.randn(rows, 16) for rows in (4, 7, 2)]
    losses = WaveExecutor(segments, model, found).run(tick_tock_step(3, 3), iter(batches))
    for loss, batch in zip(losses, batches, strict=True):
        carry = batch
        for block in model.blocks:
            carry = block(carry)
        assert torch.equal(loss, carry.square().mean())


SEGMENTS = 5
COSTS = Costs(
    forward_s=(1.0,) * SEGMENTS,
    backward_s=(2.0,) * SEGMENTS,
    sum_output_s=(*(0.4,) * 4, 0.0),
    sum_gradient_s=(*(0.8,) * 4, 0.0),
)


def test_the_decision_is_about_the_plan_that_would_run(monkeypatch):
    probe = WaveProbe(torch.device("cpu"), SEGMENTS)
    monkeypatch.setattr(probe, "costs", lambda: COSTS)
    assert probe.decide(8).on
