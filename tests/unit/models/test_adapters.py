# SPDX-License-Identifier: Apache-2.0
"""LoRA models of peft as pipelines of one stage, their folders, and what is refused."""

from functools import partial

import peft
import pytest
import torch
import transformers

from support.refusals import refuses
from wavemare.errors import ModelError
from wavemare.models import (
    from_folder,
    save_pretrained,
    tied_weights,
    to_pipeline,
    whole_state_dict,
)
from wavemare.models.adapters import make_ready
from wavemare.models.convert import cut_chain, take_apart
from wavemare.pipeline.plan.partition import balanced_cuts

TARGETS = {"gpt2": ["c_attn", "c_fc"], "bert-mlm": ["query", "value"], "gpt_neox": "all-linear"}


@pytest.fixture
def adapt(make_model):
    def make(name, **changes):
        model = make_model(name)
        options = {"r": 4, "target_modules": TARGETS.get(name, ["q_proj", "v_proj"])}
        config = peft.LoraConfig(**{**options, "init_lora_weights": False, **changes})
        return peft.get_peft_model(model, config).eval()

    return make


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm", "qwen3", "gpt_neox"])
def test_folders_of_adapter_and_whole_model_give_equal_logits(name, adapt, make_model, tmp_path):
    model = adapt(name, lora_dropout=0.1)
    ids = torch.arange(3, 25).view(2, 11)
    expected, module = model(ids).logits, to_pipeline(model, num_stages=1)
    save_pretrained(module, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(make_model(name), tmp_path / "adapter").eval()
    assert torch.equal(loaded(ids).logits, expected)
    save_pretrained(module, tmp_path / "whole", merge=True)
    assert torch.equal(model(ids).logits, expected)
    whole = type(model.get_base_model()).from_pretrained(tmp_path / "whole").eval()
    merged = model.merge_and_unload()
    assert torch.equal(whole(ids).logits, merged(ids).logits)
    assert list(whole_state_dict(to_pipeline(merged, num_stages=1))) == list(whole.state_dict())


def test_a_classifier_that_peft_trains_is_in_the_adapters_folder(adapt, make_model, tmp_path):
    model = adapt("bert-cls", task_type="SEQ_CLS", target_modules=["query"])
    save_pretrained(to_pipeline(model, num_stages=1), tmp_path)
    loaded = peft.PeftModel.from_pretrained(make_model("bert-cls"), tmp_path)
    ours, theirs = (peft.get_peft_model_state_dict(each) for each in (loaded, model))
    assert "base_model.model.classifier.weight" in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_adapter_may_lie_beside_its_base_and_goes_when_a_whole_model_comes(adapt, tmp_path):
    model = adapt("qwen3")
    base = adapt("qwen3").unload()
    base.save_pretrained(tmp_path)
    save_pretrained(to_pipeline(model, num_stages=1), tmp_path)
    assert {"model.safetensors", "adapter_config.json"} <= {f.name for f in tmp_path.iterdir()}
    save_pretrained(to_pipeline(base, num_stages=1), tmp_path)
    assert not list(tmp_path.glob("adapter_*"))


def test_the_card_of_an_adapter_keeps_what_its_author_wrote(adapt, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nTrained on letters.\n")
    save_pretrained(to_pipeline(adapt("llama"), num_stages=1), tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert all(words in card for words in ("license: mit", "library_name: peft", "on letters."))


def two(model):
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"modules_to_save": ["embed_tokens"]}, None),
        ({"modules_to_save": ["lm_head"]}, None),
        ({"target_modules": ["lm_head"]}, None),
        ({}, two),
    ],
)
def test_adapters_that_a_pipeline_cannot_train_are_refused(options, change, adapt):
    model = adapt("llama", **options)
    if change is not None:
        change(model)
    with refuses(ModelError, "model", "PeftModel"):
        to_pipeline(model, num_stages=1)


def test_a_base_that_is_quantized_in_another_form_than_4_bits_is_refused(adapt):
    model = adapt("llama")
    model.get_base_model().is_quantized = True
    with refuses(ModelError, "model", "LlamaForCausalLM"):
        to_pipeline(model, num_stages=1)


class Int8Tensor(torch.Tensor):
    """A weight that holds other tensors, as torchao's do."""

    def __tensor_flatten__(self):
        return [], None


@pytest.mark.parametrize("use", [make_ready, partial(to_pipeline, num_stages=1)])
def test_weights_that_hold_other_tensors_are_refused_with_their_class(use, make_model):
    model = make_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    held = layer.weight.detach().as_subclass(Int8Tensor)
    layer.weight = torch.nn.Parameter(held, requires_grad=False)
    with refuses(ModelError, "model", "LlamaForCausalLM") as caught:
        use(model)
    assert "Int8Tensor" in caught.value.reason


def test_adapters_of_a_model_that_is_read_late_begin_as_peft_begins_them(make_model, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    made = []
    for load in (from_folder, type(make_model("llama")).from_pretrained):
        model = peft.get_peft_model(load(tmp_path), peft.LoraConfig(**options))
        held = [p for p in model.parameters() if p.requires_grad]  # an optimizer may
        made.append(to_pipeline(model, num_stages=1))
        assert all(one is other for one, other in zip(held, trained(made[-1]), strict=True))
    late, early = (dict(module.local_weights()) for module in made)
    assert list(late) == list(early)
    for name, weight in late.items():
        if "lora_A" in name:  # Kaiming's uniform numbers: 1 / sqrt(inputs) bounds them
            bound = weight.shape[1] ** -0.5
            assert 0.8 * bound < float(weight.detach().abs().max()) <= bound
        else:
            assert torch.equal(weight, early[name]), name


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_adapters_that_begin_with_the_weights_are_refused_where_these_are_read_late(
    options, make_model, tmp_path
):
    make_model("llama").save_pretrained(tmp_path)
    model = from_folder(tmp_path)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    adapted = peft.get_peft_model(model, config)
    for name, value in options.items():
        setattr(adapted.peft_config["default"], name, value)
    with refuses(ModelError, "model", "PeftModel"):
        to_pipeline(adapted, num_stages=1)


def test_other_kinds_of_peft_are_refused(make_model):
    model = peft.get_peft_model(make_model("llama"), peft.IA3Config(task_type="CAUSAL_LM"))
    with refuses(ModelError, "model", "PeftModel"):
        to_pipeline(model, num_stages=1)


def test_a_frozen_weight_is_tied_to_nothing_and_stays_one_in_the_folder(adapt, tmp_path):
    model = adapt("qwen3")
    assert tied_weights(model) == ()
    module = to_pipeline(model, num_stages=1, untie=True)
    assert not module.untied
    assert not module.tied_modules
    save_pretrained(module, tmp_path, merge=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_frozen_weights_cost_two_of_three_passes_and_their_embedding_nothing(adapt):
    model = adapt("qwen3", r=8, target_modules="all-linear")
    taken = take_apart(model, None)
    weights = []
    for layer in taken.chain:
        trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
        weights.append(2 * sum(p.numel() for p in layer.parameters()) + trained)
    assert weights[-1] == 2 * model.lm_head.weight.numel()
    weights[0] = 0
    for stages in (2, 3, 4):
        cuts = cut_chain(model, taken.chain, taken.inputs, "parameters", range(stages))
        assert cuts == balanced_cuts(weights, stages)
