# SPDX-License-Identifier: Apache-2.0
"""What a conversion takes apart, proves and refuses; the batches that it splits."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import prune

from support.refusals import refuses
from wavemare.errors import ConfigError, LaunchError, ModelError
from wavemare.models import to_pipeline
from wavemare.models.activations import split_batch
from wavemare.models.layers import name_weights


def count_rows(module, inputs, output):
    """Count as layers with running statistics do, in place and anew."""
    module.calls += 1
    module.rows += len(output)
    module.rows = module.rows + 1


@pytest.mark.parametrize("name", ["gpt2", "bert-cls", "qwen3"])
def test_construction_is_silent_and_leaves_no_trace(name, make_model, capfd):
    model = make_model(name)
    model.train()
    words = model.get_input_embeddings().eval()
    words.register_buffer("rows", torch.zeros(()))
    words.calls = 0
    words.register_forward_hook(count_rows)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    capfd.readouterr()
    to_pipeline(model, num_stages=1, partition="time")
    assert capfd.readouterr().out == ""
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert not model.get_input_embeddings().training
    assert model.config.to_dict() == config
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert words.calls == 0


def test_tables_made_under_inference_mode_are_not_used_for_training(make_model, make_batch):
    model = make_model("llama")
    module = to_pipeline(model, num_stages=1, inputs=["input_ids"])
    inputs, labels = module.split_batch(make_batch(model, padded=False))
    with torch.inference_mode():
        module(inputs)
    module.loss_fn(module(inputs), labels).backward()


class SpecialForCausalLM(transformers.LlamaForCausalLM):
    """A decoder that does more than its layers show."""

    drops, scale, added = 0.0, 1.0, 0.0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = nn.functional.dropout(output.logits, self.drops, self.training) * self.scale
        output.loss = output.loss + self.added if output.loss is not None else None
        return output


@pytest.mark.parametrize(
    ("what", "value", "mode"),
    [("scale", 1.00001, "evaluation"), ("drops", 0.1, "training"), ("added", 0.001, "evaluation")],
)
def test_a_forward_that_does_more_is_refused(what, value, mode, make_model):
    model = SpecialForCausalLM(make_model("llama").config)
    setattr(model, what, value)
    with refuses(ModelError, "model", "SpecialForCausalLM") as info:
        to_pipeline(model, num_stages=1)
    assert "SpecialForCausalLM" in str(info.value)
    assert "Train it with one stage" in str(info.value)
    to_pipeline(model, num_stages=1, verify=False)


def test_zeros_hide_nothing_and_are_no_fault(make_model):
    for scale, holds in ((1.00001, False), (1.0, True)):
        model = SpecialForCausalLM(make_model("llama").config)
        model.scale = scale
        for weight in (model.lm_head.weight, model.model.layers[0].mlp.down_proj.weight):
            nn.init.zeros_(weight)
        state = {name: weight.clone() for name, weight in model.state_dict().items()}
        with nullcontext() if holds else refuses(ModelError, "model", "SpecialForCausalLM"):
            to_pipeline(model, num_stages=1)
        assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())


class SometimesForCausalLM(transformers.LlamaForCausalLM):
    """A decoder that does more for some batches only."""

    when = ""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        output = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        is_so = {
            "padded on the left": not attention_mask[:, 0].all(),
            "long": input_ids.shape[1] > 8,
            "of large logits": output.logits.abs().max() > 9,
        }
        if is_so.get(self.when):
            output.logits = output.logits.clamp(-1e-3, 1e-3)
        return output


@pytest.mark.parametrize("when", ["padded on the left", "long", "of large logits"])
def test_what_a_forward_does_for_some_batches_only_is_refused(when, make_model):
    model = SometimesForCausalLM(make_model("llama").config)
    to_pipeline(model, num_stages=1)
    model.when = when
    with refuses(ModelError, "model", "SometimesForCausalLM"):
        to_pipeline(model, num_stages=1)


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_weights(family, **changes):
    """Build a decoder with weights so small that its layers change the embedding little."""
    config = getattr(transformers, f"{family}Config")(**SMALL, initializer_range=0.0005, **changes)
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("Gemma2", "final_logit_softcapping", 30.0),
        ("Gemma3Text", "final_logit_softcapping", 30.0),
        ("Cohere", "logit_scale", 0.0625),
        ("Granite", "embedding_multiplier", 12.0),
        ("Granite", "logits_scaling", 8.0),
        ("Afmoe", "mup_enabled", True),
    ],
)
def test_what_a_configuration_does_outside_the_layers_is_refused(family, key, value):
    with refuses(ModelError, "model"):
        to_pipeline(small_weights(family, **{key: value}), num_stages=1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Gemma3Text", {}),
        # What a layer does itself, the pipeline does as well.
        ("Granite", {"residual_multiplier": 0.22, "attention_multiplier": 0.02}),
        ("Cohere", {"logit_scale": 1.0}),
        ("Llama", {"final_logit_softcapping": 30.0}),  # of another family: it does nothing
    ],
)
def test_families_whose_layers_do_everything_are_taken(family, changes):
    to_pipeline(small_weights(family, **changes), num_stages=1)


def test_hooks_that_stages_would_not_run_are_refused_or_told(make_model, caplog):
    scaled = lambda module, grads, _: tuple(g if g is None else g / 2 for g in grads)  # noqa: E731
    for name in ("lm_head", "transformer", ""):
        model = make_model("gpt2")
        model.get_submodule(name).register_full_backward_hook(scaled)
        with refuses(ModelError, name or type(model).__name__, "a backward hook"):
            to_pipeline(model, num_stages=1)
    model = make_model("gpt2")
    model.transformer.h[1].register_full_backward_hook(scaled)
    model.transformer.wte.register_forward_hook(lambda *_: None)
    to_pipeline(model, num_stages=1)
    assert "forward hook" not in caplog.text
    model.lm_head.register_forward_hook(lambda *_: None)
    to_pipeline(model, num_stages=1)
    assert "a forward hook of lm_head does not run" in caplog.text


def test_weights_that_pruning_computes_from_others_are_cut(make_model):
    """In each forward pass, torch computes them from a weight and a mask."""
    model = make_model("gpt2")
    for block in model.transformer.h:
        prune.random_unstructured(block.mlp.c_fc, "weight", amount=0.5)
    model(input_ids=torch.ones(1, 4, dtype=torch.long))  # a tensor with a gradient function
    names = {name for name, _ in to_pipeline(model, num_stages=1).named_parameters()}
    assert any(name.endswith("weight_orig") for name in names)


def test_forward_passes_of_the_callers_own_that_stages_do_not_call_are_told(make_model, caplog):
    class Own(transformers.GPT2LMHeadModel):
        def forward(self, *values, **options):
            return super().forward(*values, **options)

    model = make_model("gpt2")
    to_pipeline(model, num_stages=1)
    block = model.transformer.h[0].mlp
    block.forward = lambda hidden, inner=block.forward: 2 * inner(hidden)  # stages call it
    to_pipeline(model, num_stages=1)
    assert "is not called" not in caplog.text
    to_pipeline(Own(model.config), num_stages=1)
    assert "Own.forward is not called" in caplog.text


def test_unsupported_classes_are_refused_by_name(make_model):
    model = transformers.GPT2ForSequenceClassification(make_model("gpt2").config)
    with refuses(ModelError, "model", "GPT2ForSequenceClassification"):
        to_pipeline(model, num_stages=1)
    with refuses(ModelError, "model", "Linear"):
        to_pipeline(nn.Linear(2, 2), num_stages=1)


def test_a_compiled_wrapper_is_refused_and_the_model_with_compiled_blocks_taken(make_model):
    model = make_model("llama")
    with refuses(ModelError, "model", "OptimizedModule") as caught:
        to_pipeline(torch.compile(model, backend="eager"), num_stages=1)
    assert "torch.compile" in caught.value.reason
    for block in model.model.layers:
        block.compile(backend="eager")
    to_pipeline(model, num_stages=1)


def test_unknown_kinds_of_attention_are_refused(make_model):
    model = make_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with refuses(ModelError, "model", "Qwen3ForCausalLM"):
        to_pipeline(model, num_stages=1)


def test_a_model_without_weights_is_refused(make_model):
    with refuses(ModelError, "model", "LlamaForCausalLM"):
        to_pipeline(make_model("llama").to("meta"), num_stages=1)


def test_bert_as_a_decoder_is_refused(make_model):
    with refuses(ModelError, "model", "BertForMaskedLM"):
        to_pipeline(make_model("bert-mlm", is_decoder=True), num_stages=1)


def test_weights_in_no_layer_are_refused(make_model):
    model = make_model("llama")
    model.extra = nn.Linear(2, 2)
    with refuses(ModelError, "model", "LlamaForCausalLM"):
        to_pipeline(model, num_stages=1)
    with refuses(ModelError, "model", "LlamaForCausalLM"):
        name_weights(model, [])


INPUTS = "wavemare.pipeline.inputs"
STAGES = "wavemare.pipeline.stages"
PARTITION = "wavemare.pipeline.partition"


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("inputs", ["attention_mask"], INPUTS),
        ("inputs", ["input_ids", "labels", "labels"], INPUTS),
        ("inputs", ["input_ids", "token_type_ids"], INPUTS),
        ("inputs", ["input_ids", "atention_mask"], INPUTS),
        ("num_stages", 2, STAGES),
        ("num_stages", 0, STAGES),
        ("partition", "parameter", PARTITION),
        ("partition", [1], PARTITION),
    ],
)
def test_wrong_arguments_are_refused(name, value, key, make_model):
    with refuses(ConfigError, key, value):
        to_pipeline(make_model("gpt2"), **{"num_stages": 1, name: value})


def test_a_process_without_a_launcher_is_told(make_model, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK")
    with refuses(LaunchError, "torch.distributed", None):
        to_pipeline(make_model("gpt2"), num_stages=1)


IDS = torch.tensor([[5, 6, 7], [8, 9, 4]])
ALL = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def test_missing_entries_are_not_invented():
    inputs, labels = split_batch({"input_ids": IDS, "labels": IDS}, ALL)
    assert torch.equal(inputs[0], IDS)
    assert [tensor.numel() for tensor in inputs[1:]] == [0, 0, 0]
    assert labels is IDS
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int64 for tensor in inputs)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rows_of_a_packed_sample_do_not_see_each_other(name, make_model):
    model = make_model(name).eval()
    ids = torch.arange(1, 17).view(2, 8)
    packed = {"input_ids": ids, "position_ids": torch.arange(4).repeat(2).expand(2, 8)}
    expected = model(**packed, use_cache=False).logits
    masked = {**packed, "attention_mask": torch.ones_like(ids)}
    seeing = model(**masked, use_cache=False).logits
    assert not torch.allclose(expected, seeing)
    whole = to_pipeline(model, num_stages=1, inputs=("input_ids", "attention_mask", "position_ids"))
    torch.testing.assert_close(whole(whole.split_batch(packed, labels_required=False)[0]), expected)
    torch.testing.assert_close(whole(whole.split_batch(masked, labels_required=False)[0]), seeing)
    bare = to_pipeline(model, num_stages=1, inputs=("input_ids", "position_ids"))
    torch.testing.assert_close(bare(bare.split_batch(packed, labels_required=False)[0]), expected)
    with refuses(ModelError, "attention_mask", (2, 8)):
        bare.split_batch(masked, labels_required=False)


def test_an_undeclared_mask_of_ones_is_dropped():
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    inputs, _ = split_batch(batch, ["input_ids"])
    assert torch.equal(inputs, IDS)


@pytest.mark.parametrize(
    ("name", "value"), [("use_cache", False), ("logits_to_keep", 0), ("position_ids", None)]
)
def test_options_that_ask_for_nothing_are_dropped(name, value):
    inputs, labels = split_batch({"input_ids": IDS, "labels": IDS, name: value}, ALL)
    assert torch.equal(inputs[0], IDS)
    assert [tensor.numel() for tensor in inputs[1:]] == [0, 0, 0]
    assert labels is IDS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits_to_keep", 1),
        ("output_hidden_states", True),
        ("max_length_q", 3),
        ("names", ["a", "b"]),
        ("more", {"weights": IDS}),
        ("attention_mask", [[1, 1, 1], [1, 1, 1]]),
        ("position_ids", [[0, 1, 2], [0, 1, 2]]),
    ],
)
def test_entries_that_are_no_tensors_are_refused(name, value):
    with refuses(ModelError, name, type(value).__name__):
        split_batch({"input_ids": IDS, "labels": IDS, name: value}, ("input_ids", "position_ids"))


def test_undeclared_entries_are_refused(make_model):
    module = to_pipeline(make_model("gpt2"), num_stages=1, inputs=["input_ids"])
    padded = torch.ones_like(IDS)
    padded[0, -1] = 0
    for name, value in [("attention_mask", padded), ("position_ids", IDS)]:
        with refuses(ModelError, name, (2, 3)):
            module.split_batch({"input_ids": IDS, "labels": IDS, name: value})


@pytest.mark.parametrize("model", ["gpt2", "bert-mlm"])
@pytest.mark.parametrize("name", ["token_type_ids", "position_ids", "cu_seq_lens_q"])
def test_the_remedy_of_an_undeclared_entry_works_when_followed(make_model, model, name):
    batch = {"input_ids": IDS, "labels": IDS}
    module = to_pipeline(make_model(model), num_stages=1, inputs=["input_ids"])
    with pytest.raises(ModelError) as info:
        module.split_batch({**batch, name: IDS})
    told = re.search(r"inputs to (\[.*?\])", info.value.remedy)
    if told:
        module = to_pipeline(make_model(model), num_stages=1, inputs=json.loads(told[1]))
        module.split_batch({**batch, name: IDS})
    else:
        assert info.value.remedy.startswith("Drop it from the batch")
        with pytest.raises(ConfigError):
            to_pipeline(make_model(model), num_stages=1, inputs=["input_ids", name])
    module.split_batch(batch)


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_missing_required_entries_are_refused(name):
    batch = {"input_ids": IDS, "labels": IDS}
    del batch[name]
    with refuses(ModelError, name, None):
        split_batch(batch, ["input_ids"])


def test_labels_may_be_left_out_for_prediction():
    assert split_batch({"input_ids": IDS}, ["input_ids"], labels_required=False)[1] == ()


def test_other_shapes_are_refused():
    mask = torch.ones(2, 1, 3, 3)
    with refuses(ModelError, "attention_mask", (2, 1, 3, 3)):
        split_batch({"input_ids": IDS, "labels": IDS, "attention_mask": mask}, ALL[:2])
    with refuses(ModelError, "input_ids", (3,)):
        split_batch({"input_ids": IDS[0], "labels": IDS}, ["input_ids"])
