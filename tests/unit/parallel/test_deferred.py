# SPDX-License-Identifier: Apache-2.0
"""Weights that are read late: what each rank gets equals what it gets of a whole model, and no more
than its share is read."""

import copy
from functools import partial

import deepspeed
import peft
import pytest
import torch
from deepspeed.comm import comm as deepspeed_comm
from tensor_models import KINDS, build
from torch import distributed as dist

from support.refusals import refuses
from wavemare.engine.launch.group import leave_out_shared_memory
from wavemare.errors import ModelError
from wavemare.models import from_folder, to_pipeline
from wavemare.models.adapters import begin_adapters
from wavemare.models.deferred import is_deferred, read_weights, unread_model, zero_model
from wavemare.models.source import MemorySource
from wavemare.parallel.experts import split_experts
from wavemare.parallel.tensor.split import split_model


class Counting(MemorySource):
    """Weights in memory that count what is read of them."""

    elements = largest = 0

    def read(self, name, index=()):
        part = super().read(name, index)
        self.elements += part.numel()
        self.largest = max(self.largest, part.numel())
        return part


def unread(whole):
    source = Counting(whole.state_dict())
    return unread_model(whole.config, source, kind=type(whole)), source


def check_equal(late, early):
    own, expected = late.state_dict(keep_vars=True), early.state_dict(keep_vars=True)
    assert list(own) == list(expected)
    for name, value in own.items():
        assert torch.equal(value, expected[name]), name
        assert value.requires_grad == expected[name].requires_grad
        assert vars(value).keys() == vars(expected[name]).keys()  # the marks of a part
    for (name, value), (_, other) in zip(late.named_buffers(), early.named_buffers(), strict=True):
        assert torch.equal(value, other), name
    for one in own:
        for other in own:
            assert (own[one] is own[other]) == (expected[one] is expected[other])


def test_hooks_of_weights_that_are_read_late_run(tmp_path):
    """Those of the base, and of adapters that have no values yet."""
    build("llama").save_pretrained(tmp_path)
    model = peft.get_peft_model(from_folder(tmp_path), peft.LoraConfig(target_modules=["q_proj"]))
    model.base_model.model.lm_head.weight.requires_grad_(True)
    seen = []
    trained = [p for p in model.parameters() if p.requires_grad]
    for number, parameter in enumerate(trained):
        parameter.register_hook(partial(lambda n, grad: seen.append(n), number))
        parameter.register_post_accumulate_grad_hook(partial(lambda n, p: seen.append(-n), number))
    begin_adapters(model)
    read_weights(model)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    numbers = range(len(trained))
    assert sorted(seen) == sorted([*numbers, *(-n for n in numbers)])


@pytest.mark.parametrize("use", ["read", "split"])
@torch.no_grad()
def test_a_change_in_place_that_reading_would_undo_is_refused(use, as_rank):
    late, _ = unread(build("gpt2"))
    late.half().float().requires_grad_(False)  # none is a change of values
    late.transformer.wte.weight[3:5] = 1.0
    with as_rank(0, 2) as group, refuses(ModelError, "weight", "transformer.wte.weight"):
        if use == "split":
            split_model(late, group)
        else:
            read_weights(late)


def check_share(model, source):
    held = sum(parameter.numel() for parameter in model.parameters())
    padding = 8 * 32 * 3  # rows of a vocabulary that no token has, of embedding, head and bias
    assert held - padding <= source.elements <= held
    assert source.largest <= max(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", [*KINDS, "llama-tied", "mixtral"])
def test_a_model_of_zeros_is_the_new_one_once_a_checkpoint_is_loaded(name):
    """Buffers, which no checkpoint may have, have their values before."""
    whole = build(name)
    state = torch.get_rng_state()
    zeros = zero_model(partial(type(whole), whole.config))
    read_weights(zeros)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(parameter.any() for parameter in zeros.parameters())
    zeros.load_state_dict(whole.state_dict())
    check_equal(zeros, whole)


@pytest.mark.parametrize("name", [*KINDS, "llama-tied", "qwen3", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_parts_of_split_layers(name, rank, as_rank):
    whole = build(name)
    late, source = unread(whole)
    with as_rank(rank, 2) as group:
        split_model(late, group)
        assert is_deferred(late)
        read_weights(late)
        early = split_model(copy.deepcopy(whole), group, verify=False)
    assert not is_deferred(late)
    check_equal(late, early)
    check_share(late, source)


def divided(model, *, ranks, rank, tensor=1, experts=1, stages=1, untie=False):
    """Divide a model as `wavemare.initialize` does."""

    def group_of(size):
        starts = range(0, ranks, size)
        return [dist.new_group(list(range(start, start + size))) for start in starts][rank // size]

    if tensor > 1:
        model = split_model(model, group_of(tensor), verify=False, experts=experts == 1)
    if experts > 1:
        model = split_experts(model, group_of(experts))
    if stages > 1:
        options = {"inputs": ["input_ids"], "verify": False, "untie": untie}
        model = to_pipeline(model, num_stages=stages, **options)
    read_weights(model)
    return model


@pytest.mark.parametrize(
    ("name", "ranks", "sizes"),
    [
        ("gpt2-101", 2, {"stages": 2}),
        ("bert-mlm-101", 2, {"stages": 2}),
        ("gpt2-untied", 2, {"stages": 2}),
        ("llama-tied", 2, {"stages": 2, "untie": True}),
        ("llama-tied", 4, {"stages": 2, "tensor": 2}),
        ("bert-mlm-101", 4, {"stages": 2, "tensor": 2, "untie": True}),
        ("mixtral", 2, {"experts": 2}),
        ("qwen3_moe", 4, {"experts": 2, "stages": 2}),
        ("qwen2_moe", 4, {"experts": 2, "tensor": 2, "stages": 2}),
    ],
)
def test_a_rank_reads_its_own_stage_and_experts(name, ranks, sizes, as_rank, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    leave_out_shared_memory()
    whole = build(name)
    for rank in (0, ranks - 1):
        late, source = unread(whole)
        with as_rank(rank, ranks):
            deepspeed_comm.cdb = None
            deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
            late = divided(late, ranks=ranks, rank=rank, **sizes)
            early = divided(copy.deepcopy(whole), ranks=ranks, rank=rank, **sizes)
        deepspeed_comm.cdb = None
        check_equal(late, early)
        check_share(late, source)
        assert source.elements < 0.8 * sum(parameter.numel() for parameter in whole.parameters())


def test_frozen_parameters_stay_frozen_and_types_are_chosen():
    whole = build("gpt2-101")
    late, _ = unread(whole)
    late.transformer.h[0].requires_grad_(False)
    read_weights(late)
    assert not any(parameter.requires_grad for parameter in late.transformer.h[0].parameters())
    assert late.lm_head.weight.requires_grad
    assert late.lm_head.weight is late.transformer.wte.weight
    half = unread_model(whole.config, MemorySource(whole.state_dict()), torch.bfloat16)
    read_weights(half)
    for name, value in whole.state_dict().items():
        assert torch.equal(half.state_dict()[name], value.bfloat16())


def test_a_folder_is_read_late(tmp_path):
    whole = build("mixtral")
    whole.generation_config.max_new_tokens = 7
    whole.save_pretrained(tmp_path)
    late = from_folder(tmp_path)
    assert is_deferred(late)
    assert late.generation_config.max_new_tokens == 7
    read_weights(late)
    check_equal(late, whole)


@pytest.mark.parametrize("change", ["lacks", "shape"])
def test_weights_of_another_model_are_refused_by_name(change):
    whole = build("gpt2-101")
    state, name = whole.state_dict(), "transformer.h.1.mlp.c_fc.weight"
    if change == "lacks":
        del state[name]
    else:
        state[name] = state[name][:, 1:]
    with pytest.raises(ModelError) as caught:
        unread_model(whole.config, MemorySource(state))
    assert caught.value.value == name


def test_a_model_that_has_no_weights_at_all_is_still_refused(alone):
    with torch.device("meta"):
        model = build("gpt2")
    with refuses(ModelError, "model", "GPT2LMHeadModel"):
        split_model(model, alone)
