# SPDX-License-Identifier: Apache-2.0
"""What becomes of a model's modules and parameters, and which models are refused."""

import copy
import gc
import weakref
from itertools import cycle

import peft
import pytest
import torch
import transformers
from tensor_models import (
    BERT,
    GPT2,
    KINDS,
    SHARED,
    Widths,
    batch,
    build,
    distance,
    gradients,
    of_family,
    own_part,
)
from torch import distributed as dist
from transformers.loss.loss_utils import ForCausalLMLoss

from support.refusals import refuses
from wavemare.errors import ModelError
from wavemare.models import save_pretrained, whole_state_dict
from wavemare.parallel.tensor.layers import (
    align_generators,
    gather_from_group,
    reduce_from_group,
)
from wavemare.parallel.tensor.load import load_split
from wavemare.parallel.tensor.output import loss_alone
from wavemare.parallel.tensor.partition import gather_parts, is_copied
from wavemare.parallel.tensor.split import split_model


@pytest.mark.parametrize("name", [*KINDS, *SHARED])
@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_are_a_ranks_part_and_marked_for_megatron_and_deepspeed(name, rank, as_rank):
    whole = build(name)
    state = whole.state_dict(keep_vars=True)
    with as_rank(rank, 2) as group:
        model = split_model(copy.deepcopy(whole), group, verify=False)
    expected = own_part(state, model, rank, 2)
    own = model.state_dict(keep_vars=True)
    assert list(own) == list(state)
    names = dict(model.named_parameters(remove_duplicate=False))
    assert set(names) == set(dict(whole.named_parameters(remove_duplicate=False)))
    marked = 0
    for key, value in own.items():
        part = expected[key]
        split = part.shape != state[key].shape
        assert torch.equal(value, part)
        assert value.requires_grad == state[key].requires_grad
        if is_copied(value):  # on all ranks; it counts on the first one
            assert not split
            assert value.tensor_model_parallel is value.model_parallel is (rank == 0)
            continue
        assert getattr(value, "tensor_model_parallel", False) is split
        assert getattr(value, "model_parallel", False) is split
        if split:
            marked += 1
            (dim,) = [d for d, n in enumerate(part.shape) if n != state[key].shape[d]]
            assert value.partition_dim == dim
    assert marked >= 2 * 6
    for key in own:
        for other in own:
            assert (own[key] is own[other]) == (state[key] is state[other])


@pytest.mark.parametrize("name", ["gpt2-101", "bert-mlm-101", "bert-mlm-untied", "bert-cls"])
def test_a_group_of_one_computes_what_the_model_did(name, alone):
    whole = build(name)
    given = batch(whole)
    output = whole(**given)
    output.loss.backward()
    model = split_model(copy.deepcopy(whole), alone)
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    assert loss.item() == pytest.approx(output.loss.item(), abs=1e-6)
    assert distance(gradients(model), own_part(gradients(whole), model, 0, 1)) < 1e-6
    merged = whole_state_dict(model)
    assert all(torch.equal(merged[key], value) for key, value in whole.state_dict().items())


def test_cpu_tensors_need_no_cpu_backend_of_the_group(alone):
    """NCCL has none, and a model is split and exported on the CPU."""
    group = dist.new_group([0], backend="cuda:gloo")
    value = torch.ones(2, 3, requires_grad=True)
    total = gather_from_group(reduce_from_group(value, group), group)
    total.sum().backward()
    assert torch.equal(total, value)
    assert torch.equal(value.grad, value)
    assert torch.equal(gather_parts(value.detach(), group)[0], value)
    align_generators(torch.device("cpu"), group)


def test_a_language_model_returns_its_loss_and_its_logits(alone):
    whole = build("gpt2-101")
    model = split_model(copy.deepcopy(whole), alone)
    given = batch(whole)
    output = model(**given)
    assert output["loss"] is output[0] is output.loss
    assert "logits" in output
    assert output["logits"] is output.logits is output.get("logits")
    torch.testing.assert_close(output.logits, whole(**given).logits)
    with torch.no_grad():
        assert [*model(**given)][:2] == ["loss", "logits"]
        assert {**model(**given)}.keys() == {**whole(**given)}.keys()
        torch.testing.assert_close(model(**given).to_tuple()[1], whole(**given).logits)
        torch.testing.assert_close([*model(**given).values()][1], whole(**given).logits)
        torch.testing.assert_close(dict(model(**given).items())["logits"], whole(**given).logits)
        with loss_alone():
            assert "logits" not in [*model(**given)]
    output.logits.square().mean().backward()  # a loss of one's own, beside labels
    whole(**given).logits.square().mean().backward()
    assert distance(gradients(model), own_part(gradients(whole), model, 0, 1)) < 1e-5
    model.zero_grad()
    whole.zero_grad()
    labels = given.pop("labels")
    output = model(**given)
    assert output["logits"] is output[0] is output.logits
    assert output.logits.shape == (3, 9, 101)
    assert output.loss is None
    # In the order of forward's parameters, as a tuple, and divided by a number of labels.
    (loss, *_) = model(given["input_ids"], None, given["attention_mask"], None, None, None, None,
                       None, labels, return_dict=False)  # fmt: skip
    torch.testing.assert_close(loss, whole(**given, labels=labels).loss)
    torch.testing.assert_close(
        model(**given, labels=labels, num_items_in_batch=7).loss,
        whole(**given, labels=labels, num_items_in_batch=7).loss,
    )
    # A loss of one's own goes through the gathered logits.
    model(**given).logits.square().mean().backward()
    whole(**given).logits.square().mean().backward()
    assert distance(gradients(model), own_part(gradients(whole), model, 0, 1)) < 1e-5


READS = {
    "by name": lambda output: output.loss,
    "as an entry": lambda output: output["loss"],
    "by place": lambda output: output[0],
    "in a range": lambda output: output[:1],
    "if there": lambda output: output.get("loss"),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("read", READS)
def test_no_logits_of_the_whole_vocabulary_are_made_for_the_loss(read, grad, as_rank):
    model = build("gpt2-101")
    given = batch(model)
    with as_rank(0, 2) as group:
        model = split_model(model, group, verify=False)
        with Widths() as widths, torch.set_grad_enabled(grad):
            output = model(**given)
            READS[read](output)
        assert 101 / 2 < max(widths.seen) < 101  # a rank's own
        with widths:
            assert output.logits.shape[-1] == 101
        assert max(widths.seen) >= 101


def test_generation_and_positions_of_a_batch_work(alone):
    whole = build("gpt2-101").eval()
    model = split_model(copy.deepcopy(whole), alone)
    ids = batch(whole)["input_ids"][1:]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2}
    assert torch.equal(model.generate(ids, **options), whole.generate(ids, **options))
    given = {"input_ids": ids, "position_ids": torch.arange(9).repeat(2, 1) + 2, "labels": ids}
    torch.testing.assert_close(model(**given).loss, whole(**given).loss)


def test_a_split_model_saves_what_the_whole_one_saves(alone, tmp_path):
    for name in ("gpt2-101", "bert-mlm-101", "bert-cls"):
        whole = build(name)
        model = split_model(copy.deepcopy(whole), alone)
        whole.save_pretrained(tmp_path / "whole")
        whole.save_pretrained(tmp_path / "split", state_dict=whole_state_dict(model))
        for file in (tmp_path / "whole").iterdir():
            assert (tmp_path / "split" / file.name).read_bytes() == file.read_bytes()


def gpt2(kind=transformers.GPT2LMHeadModel, **changes):
    return kind(transformers.GPT2Config(**{**GPT2, "vocab_size": 50, **changes}))


def bert(**changes):
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**{**BERT, "vocab_size": 50, **changes})
    )


class LowRank(torch.nn.Module):
    """An adapter around a layer whose weight it shows, as peft injects it."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.low = layer, torch.nn.Linear(2, 2)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, inputs):
        return self.base_layer(inputs)


class LowRankRows(LowRank):
    num_embeddings = property(lambda self: self.base_layer.num_embeddings)
    padding_idx = None


def with_option(name, value):
    model = gpt2()
    setattr(model.transformer.wte, name, value)
    return model


def with_style(style):
    model = of_family("llama", {})
    plan = {**model.config.base_model_tp_plan, "layers.*.mlp.up_proj": style}
    model.config.base_model_tp_plan = plan
    return model


def adapted(model, name, layer=LowRank):
    model.set_submodule(name, layer(model.get_submodule(name)))
    return model


@pytest.mark.parametrize(
    ("make", "ranks", "refusal"),
    [
        (lambda: gpt2(n_head=2), 4, ("config.num_attention_heads", 2)),
        (lambda: gpt2(n_inner=33), 2, ("h.0.mlp.c_fc", 33)),
        (lambda: bert(intermediate_size=33), 2, ("encoder.layer.0.intermediate.dense", 33)),
        (lambda: bert(num_attention_heads=1), 2, ("config.num_attention_heads", 1)),
        (
            lambda: adapted(gpt2(), "transformer.h.0.attn.c_attn"),
            2,
            ("h.0.attn.c_attn",),
        ),
        (
            lambda: adapted(bert(), "bert.encoder.layer.1.attention.self.query"),
            1,  # one rank, where no width would fail
            ("encoder.layer.1.attention.self.query",),
        ),
        (lambda: adapted(gpt2(tie_word_embeddings=False), "lm_head"), 2, ("lm_head", "LowRank")),
        (
            lambda: adapted(of_family("llama", {}), "model.embed_tokens", LowRankRows),
            2,
            ("model.embed_tokens", "LowRankRows"),
        ),
        (lambda: with_option("max_norm", 1.0), 2, ("transformer.wte", "Embedding")),
        (lambda: with_option("scale_grad_by_freq", True), 2, ("transformer.wte", "Embedding")),
        (lambda: gpt2(add_cross_attention=True), 2, ("model",)),
        (lambda: bert(is_decoder=True), 2, ("model",)),
        (lambda: gpt2().transformer, 2, ("model", "GPT2Model")),
        (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), 2, ("model", "Sequential")),
        (
            lambda: of_family(
                "llama", {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
            ),
            6,
            ("config.num_key_value_heads", 4),
        ),
        (lambda: of_family("llama", {"intermediate_size": 33}), 2, ("layers.0.mlp.gate_proj", 33)),
        (lambda: with_style("mla_kv_a_proj"), 2, ("model", "LlamaForCausalLM")),
        (lambda: gpt2().to("meta"), 2, ("model", "GPT2LMHeadModel")),
        (
            lambda: transformers.BertForPreTraining(transformers.BertConfig(**BERT)),
            2,
            ("model", "BertForPreTraining"),
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_and_left_as_it_was(make, ranks, refusal, as_rank):
    model = make()
    before = {name: (type(own), set(vars(own))) for name, own in model.named_modules()}
    with as_rank(0, ranks) as group, refuses(ModelError, *refusal):
        split_model(model, group)
    assert {name: (type(own), set(vars(own))) for name, own in model.named_modules()} == before


def files(folder):
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


NEEDING_MORE = ("corda", "loftq")
"""Initializations by packages that are not there."""
STARTS = (False, True, "gaussian", "pissa", "orthogonal", "olora", "eva", *NEEDING_MORE)


@pytest.mark.parametrize(
    ("start", "name"),
    [
        pytest.param(start, name, marks=[pytest.mark.nightly] if number > 3 else [])
        for number, (start, name) in enumerate(zip(STARTS, cycle(["mine", "default"])))
    ],
)
def test_an_adapter_of_any_initialization_is_saved_as_peft_does(start, name, alone, tmp_path):
    begins = True if start in NEEDING_MORE else start
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=begins)
    base = build("llama")
    whole = peft.get_peft_model(base, config, adapter_name=name)
    whole.peft_config[name].init_lora_weights = start
    whole.save_pretrained(tmp_path / "theirs")
    model = split_model(copy.deepcopy(whole), alone)
    save_pretrained(model, tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours", merge=True)
    merged = type(base).from_pretrained(tmp_path / "ours").state_dict()
    theirs = whole.merge_and_unload(safe_merge=True).state_dict()
    assert all(torch.equal(merged[key], value) for key, value in theirs.items())


def test_a_model_is_split_once(as_rank):
    model = gpt2()
    with as_rank(0, 2) as group:
        split_model(model, group, verify=False)
        with refuses(ModelError, "model", "GPT2LMHeadModel"):
            split_model(model, group)


def test_hooks_of_layers_stay_and_can_be_removed(as_rank):
    model, shapes = gpt2(), []
    for part in (model.transformer.h[0].mlp.c_fc, model.transformer.wte, model.lm_head):
        handle = part.register_forward_hook(lambda *a: shapes.append(a[-1].shape[-1]))
    with as_rank(0, 2) as group:
        split_model(model, group, verify=False)
        model(torch.tensor([[1, 2, 3]]))
        handle.remove()
        model(torch.tensor([[1, 2, 3]]))
    assert shapes == [32, 64, 32, 32, 64]  # of the feed-forward layer and the head a rank's half


def test_hooks_find_the_attributes_of_their_layers(alone):
    model, ids = gpt2().eval(), torch.tensor([[1, 2, 3]])
    parts = [model.transformer.wte, model.transformer.h[0].mlp.c_fc, model.lm_head]
    parts.append(model.transformer.h[0].mlp.c_proj)
    for factor, part in enumerate(parts, start=2):
        part.factor = factor
        part.register_forward_hook(lambda module, _, output: output * module.factor)
    expected = model(ids).logits
    split = split_model(model, alone)
    torch.testing.assert_close(split(ids).logits, expected)
    del split.get_input_embeddings().factor  # as NEFTune does after training


class Passing(transformers.GPT2LMHeadModel):
    """Passes on what it is given, and what the loss of a step is divided by."""

    def forward(self, input_ids=None, labels=None, **options):
        return super().forward(input_ids, labels=labels, **options)


class Positional(transformers.GPT2LMHeadModel):
    """Has no names for its arguments."""

    def forward(self, *values, **options):
        return super().forward(*values, **options)


class InTraining(Passing):
    """Adds to the loss where the model is trained."""

    def forward(self, input_ids=None, labels=None, **options):
        output = super().forward(input_ids, labels=labels, **options)
        if self.training and labels is not None:
            output.loss = output.loss + output.logits.logsumexp(-1).square().mean()
        return output


class Weighing(Passing):
    """Weighs a label that few batches have."""

    def forward(self, input_ids=None, labels=None, **options):
        output = super().forward(input_ids, **options)
        if labels is None:
            return output
        weight = torch.ones(self.config.vocab_size)
        weight[RARE] = 0.1
        logits = output.logits[:, :-1].flatten(0, 1)
        output.loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), weight)
        return output


RARE = 5


def without_a_rare_label(logits, labels, vocab_size, **options):
    return ForCausalLMLoss(logits, labels.masked_fill(labels == RARE, -100), vocab_size, **options)


@pytest.mark.parametrize(
    "kind", [Passing, Positional, InTraining, Weighing, "function", "late function"]
)
def test_a_loss_of_the_callers_own_stays(kind, alone):
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

    def own():
        torch.manual_seed(3)
        if not isinstance(kind, str):
            return gpt2(kind, **still).train()
        model = gpt2(**still).train()
        if kind == "function":
            model.loss_function = without_a_rare_label
        return model

    ids = torch.tensor([[RARE, RARE, 3, 7, RARE, 9]])
    whole, split = own(), split_model(own(), alone)
    if kind == "late function":
        whole.loss_function = split.loss_function = without_a_rare_label
    options = {"labels": ids, "num_items_in_batch": torch.tensor(40.0)}
    outputs = [model(input_ids=ids, **options) for model in (split, whole)]
    for output in outputs:
        output.loss.backward()
    torch.testing.assert_close(*(output.loss for output in outputs))
    torch.testing.assert_close(*(output.logits for output in outputs))
    expected = own_part(gradients(whole), split, 0, 1)
    assert distance(gradients(split), expected) < 1e-5


def test_a_copy_is_refused(alone):
    with refuses(ModelError, "model", "a split model"):
        copy.deepcopy(split_model(gpt2(), alone))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_whole_weights_are_given_up(name, as_rank):
    model = build(name)
    wholes = [weakref.ref(value) for value in model.parameters() if value.ndim > 1]
    with as_rank(0, 2) as group:
        split_model(model, group, verify=False)
    gc.collect()
    own = {id(value) for value in model.parameters()}  # the routers' stay whole
    assert not [whole for whole in wholes if whole() is not None and id(whole()) not in own]


def test_a_folders_buffers_and_generation_settings_are_read(alone, tmp_path):
    whole = build("glm4_moe")
    biases = {name: value for name, value in whole.named_buffers() if "correction" in name}
    for value in biases.values():
        value.normal_()
    whole.generation_config.max_new_tokens = 7
    for original in (True, False):  # experts one by one, or fused as in memory
        folder = tmp_path / str(original)
        whole.save_pretrained(folder, save_original_format=original)
        model = load_split(folder, alone)
        assert biases
        assert all(torch.equal(model.get_buffer(name), value) for name, value in biases.items())
        assert model.generation_config.max_new_tokens == 7


def test_a_folder_without_weights_is_refused(alone, tmp_path):
    whole = gpt2()
    whole.config.save_pretrained(tmp_path)
    with refuses(ModelError, "folder", str(tmp_path)):
        load_split(tmp_path, alone)
