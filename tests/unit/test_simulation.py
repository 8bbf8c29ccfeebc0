# SPDX-License-Identifier: Apache-2.0
"""The simulated pipeline against plain training, and how it reads the configuration."""

from io import BytesIO

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from support.refusals import refuses
from wavemare.engine.optim.policy import advise
from wavemare.errors import ConfigError, ModelError
from wavemare.pipeline.optim.soap_muon import SOAP, Muon
from wavemare.simulation import SimulatedPipeline

WORDS, LENGTH, SIZE = 50, 8, 4
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def gpt(layers=4):
    transformers.set_seed(3)
    config = GPT2Config(
        vocab_size=WORDS,
        n_layer=layers,
        n_embd=16,
        n_head=2,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def bert():
    config = BertConfig(
        vocab_size=WORDS,
        num_hidden_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
    return BertForMaskedLM(config)


def large():
    """A model with gradients of a norm above 1."""
    model = gpt()
    for weight in model.parameters():
        weight.data.mul_(10)
    return model


def batches():
    generator = torch.Generator().manual_seed(5)
    while True:
        tokens = torch.randint(WORDS, (SIZE, LENGTH), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


def config(stages=4, micro_batches=2, pipemare=None, schedule="pipemare", **others):
    pipeline = {"schedule": schedule, "stages": stages}
    if schedule == "pipemare":
        pipeline["pipemare"] = pipemare or {}
    return {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "wavemare": {"pipeline": pipeline},
        **others,
    }


def trained(values, steps=5, model=None, **options):
    pipeline = SimulatedPipeline(model or gpt(), values, **options)
    data = batches()
    return pipeline, [pipeline.train_batch(data) for _ in range(steps)]


def test_gradients_are_clipped_to_1_where_nothing_is_said_as_by_any_engine():
    for stages in (1, 4):
        losses = []
        for clipping in ({}, {"gradient_clipping": 1.0}, {"gradient_clipping": 0.0}):
            values = config(stages=stages, schedule="1f1b", optimizer=SGD, **clipping)
            losses.append(trained(values, steps=2, model=large())[1])
        assert losses[0] == losses[1] != losses[2]


def test_a_model_that_does_more_than_its_layers_is_refused():
    heads = {"num_hidden_layers": 4, "num_attention_heads": 2}
    cohere = CohereConfig(vocab_size=WORDS, hidden_size=16, intermediate_size=32, **heads)
    with refuses(ModelError, "model", "CohereForCausalLM"):
        SimulatedPipeline(CohereForCausalLM(cohere), config())


def test_a_synchronous_one_is_the_whole_model_trained_plainly():
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01}}
    pipeline, losses = trained(
        config(schedule="1f1b", gradient_clipping=0.5, scheduler=scheduler), steps=6
    )
    model = gpt()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    from deepspeed.runtime.lr_schedules import WarmupLR

    rates = WarmupLR(optimizer, **scheduler["params"])
    data = batches()
    for seen in losses:
        total = 0.0
        for _ in range(2):
            loss = model(**next(data)).loss
            (loss / 2).backward()
            total += float(loss.detach()) / 2
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        assert seen == pytest.approx(total, abs=2e-5)
    held_out = next(data)
    with torch.no_grad():
        expected = float(model(**held_out).loss)
    assert pipeline.evaluate(iter([held_out])) == pytest.approx(expected, abs=2e-5)
    assert pipeline.global_steps == 6


@pytest.mark.parametrize(
    ("values", "options", "ages"),
    [
        (config(schedule="1f1b"), {}, [0, 0, 0, 0]),
        (config(), {}, [2, 1, 1, 0]),
        (config(pipemare={"slack": 1}), {}, [3, 2, 1, 0]),
        (config(pipemare={"warmup_steps": 9}), {}, [0, 0, 0, 0]),
        (config(pipemare={"drain_interval": 1}), {}, [0, 0, 0, 0]),
        (config(), {"delays": "one-step"}, [1, 1, 1, 1]),
        (config(), {"delays": "dataflow"}, [4, 3, 2, 1]),
    ],
)
def test_delays_are_those_of_the_schedule(values, options, ages):
    pipeline, _ = trained(values, steps=6, **options)
    assert [max(stage) for stage in pipeline.replay.records[-1].staleness] == ages


def test_each_setting_changes_what_is_learnt():
    base = trained(config())[1]
    for settings in (
        {"discrepancy_correction": {"mode": "off"}},
        {"discrepancy_correction": {"mode": "predict"}},
        {"lr_rescheduling": {"enabled": True, "anneal_steps": 100}},
        {"error_feedback": True},
        {"warmup_steps": 2},
        {"optimizer_policy": "auto"},
    ):
        assert trained(config(pipemare=settings))[1] != base, settings
    assert trained(config())[1] == base


@pytest.mark.parametrize(
    ("optimizer", "pipemare"),
    [
        ({"type": "AdamW", "params": {"lr": 0.01}}, {"optimizer_policy": "auto"}),
        ({"type": "SOAP", "params": {"lr": 0.01, "refresh": 2}}, {"error_feedback": True}),
        (SGD, {"discrepancy_correction": {"mode": "predict"}, "warmup_steps": 2}),
        (SGD, {"discrepancy_correction": {"mode": "ema"}, "drain_interval": 3}),
    ],
)
def test_a_simulation_goes_on_from_its_state_to_the_same_bits(optimizer, pipemare):
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.05}}
    values = config(pipemare=pipemare, optimizer=optimizer, scheduler=scheduler)
    data = batches()
    first = SimulatedPipeline(gpt(), values)
    for _ in range(4):
        first.train_batch(data)
    file = BytesIO()
    torch.save(first.replay.state_dict(), file)
    second = SimulatedPipeline(gpt(), values)
    second.replay.load_state_dict(torch.load(BytesIO(file.getvalue()), weights_only=True))
    assert second.global_steps == 4
    for given in [[next(data), next(data)] for _ in range(4)]:
        losses = [each.train_batch(iter(given)) for each in (first, second)]
        assert losses[0] == losses[1]
    ages = [each.replay.records[-1].staleness for each in (first, second)]
    assert ages[0] == ages[1]


STALE = "2 micro-batches per optimizer step on 4 stages"
CHOSEN = "optimizer_policy auto: Muon in place of AdamW"
KEPT = "optimizer_policy keep: AdamW stays"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (config(), [STALE, KEPT]),
        (config(pipemare={"optimizer_policy": "auto"}), [STALE, CHOSEN]),
        (config(micro_batches=3, pipemare={"optimizer_policy": "auto"}), [CHOSEN]),
        (config(micro_batches=3, pipemare={"slack": 1}), ["3 micro-batches per", KEPT]),
        (config(micro_batches=3), [KEPT]),
        (config(micro_batches=3, optimizer=SGD), []),
        (config(schedule="1f1b"), []),
    ],
)
def test_it_tells_what_the_engine_tells_at_its_start(values, said):
    advice = SimulatedPipeline(gpt(), values).advice
    lines = advice.splitlines() if advice is not None else []
    micro_batches = values["gradient_accumulation_steps"]
    assert lines == list(advise(values, stages=4, micro_batches=micro_batches)[1].lines)
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line


@pytest.mark.parametrize(
    ("kind", "params", "made"),
    [
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW),
        ("Adam", {}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("SGD", {"momentum": 0.9}, torch.optim.SGD),
        ("NAdam", {"betas": [0.99, 0.999]}, torch.optim.NAdam),
        ("soap", {}, SOAP),
        ("Muon", {"momentum": 0.9}, Muon),
        ("Muon", {"muon_lr": 0.02, "adam_lr": 0.001}, Muon),
        ("AdamW", {"bias_correction": True}, torch.optim.AdamW),
    ],
)
def test_optimizers_by_their_names(kind, params, made):
    values = config(optimizer={"type": kind, "params": {"lr": 0.01, **params}})
    pipeline, _ = trained(values, steps=1)
    assert {type(optimizer) for optimizer in pipeline.optimizers} == {made}


def test_muon_leaves_embeddings_and_head_to_adamw():
    params = {"muon_lr": 0.02, "adam_lr": 0.001}
    pipeline, _ = trained(config(optimizer={"type": "Muon", "params": params}), steps=1)
    for optimizer in (pipeline.optimizers[0], pipeline.optimizers[-1]):
        shapes = {True: set(), False: set()}
        for group in optimizer.param_groups:
            assert group["lr"] == (0.02 if group["use_muon"] else 0.001)
            shapes[group["use_muon"]] |= {tuple(p.shape) for p in group["params"]}
        assert (WORDS, 16) in shapes[False]
        assert (WORDS, 16) not in shapes[True]
        assert any(len(shape) == 2 for shape in shapes[True])


def test_bert_and_its_side_inputs():
    tokens = torch.randint(5, WORDS, (SIZE, LENGTH))
    labels = torch.where(tokens % 3 == 0, tokens, -100)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    transformers.set_seed(1)
    pipeline = SimulatedPipeline(bert(), config())
    losses = [pipeline.train_batch(iter([batch] * 2)) for _ in range(8)]
    assert losses[-1] < losses[0]
    with pytest.raises(StopIteration):
        pipeline.train_batch(iter([batch]))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type"),
        ({"scheduler": {"type": "WarmupCosinLR"}}, "scheduler.type"),
        ({"optimizer": {"type": "SOAP", "params": {"refrsh": 3}}}, "optimizer.params.refrsh"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": 3}}}, "optimizer.params.beta"),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": -1}}}, "optimizer.params.muon_lr"),
    ],
)
def test_what_does_not_exist_is_named(changes, key):
    with pytest.raises(ConfigError) as caught:
        SimulatedPipeline(gpt(), config(**changes))
    assert caught.value.key == key


def test_delays_that_do_not_exist_are_named():
    with refuses(ConfigError, "delays", "one_step"):
        SimulatedPipeline(gpt(), config(), delays="one_step")
