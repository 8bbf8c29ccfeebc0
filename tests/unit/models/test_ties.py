# SPDX-License-Identifier: Apache-2.0
"""Untied weights: exact copies that are trained, counted and saved as weights of their own."""

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file

from wavemare.models import (
    TiedWeight,
    save_pretrained,
    tied_weights,
    to_pipeline,
    whole_state_dict,
)

TIED = {
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
    "bert-mlm": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "qwen3": ("lm_head.weight", "model.embed_tokens.weight"),
    "llama-tied": ("lm_head.weight", "model.embed_tokens.weight"),
}
FREE = ["gpt2-untied", "bert-cls", "llama", "gpt_neox", "olmo3"]
AUTO = {"bert-mlm": transformers.AutoModelForMaskedLM}


@pytest.fixture(params=list(TIED))
def tied_name(request):
    return request.param


@pytest.fixture
def make_tied(make_model):
    """Build a tiny model; with changes of its configuration where its name asks for them."""

    def make(name):
        if name == "llama-tied":
            return make_model("llama", tie_word_embeddings=True)
        return make_model(name)

    return make


def gradients(parameters, loss):
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def disturb(module):
    """Give all weights other values, as training would."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)


def logits_of(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model.eval()(**inputs).logits


def test_tied_weights_are_told(tied_name, make_tied):
    name, source = TIED[tied_name]
    assert tied_weights(make_tied(tied_name)) == (TiedWeight(name, source, 96 * 32, 96 * 32 * 4),)


@pytest.mark.parametrize("name", FREE)
def test_models_without_ties_stay_as_they_are(name, make_model, caplog):
    model = make_model(name)
    assert tied_weights(model) == ()
    plain = to_pipeline(model, num_stages=1)
    caplog.clear()
    module = to_pipeline(model, num_stages=1, untie=True)
    assert caplog.records == []
    assert module.untied == module.untied_parameters() == {}
    assert module.weight_names() == plain.weight_names()
    assert [id(p) for p in module.parameters()] == [id(p) for p in plain.parameters()]
    assert module.config is model.config
    expected = sum(p.numel() for p in model.parameters())
    assert module.num_parameters == plain.num_parameters == expected


def test_the_copy_is_exact_and_no_tie_remains(tied_name, make_tied):
    model = make_tied(tied_name)
    name, source = TIED[tied_name]
    before = model.config.to_dict()
    module = to_pipeline(model, num_stages=1, untie=True)
    assert module.untied == {name: source}
    assert not module.tied_comms
    assert not module.tied_modules
    weights = whole_state_dict(module)
    assert torch.equal(weights[name], weights[source])
    assert weights[name].data_ptr() != weights[source].data_ptr()
    ((tied_to, copy),) = module.untied_parameters().items()
    assert tied_to == source
    assert any(copy is parameter for parameter in module.parameters())
    assert not any(copy is parameter for parameter in model.parameters())
    # The model stays tied, and so does its configuration.
    assert tied_weights(model)
    assert model.config.to_dict() == before
    assert model.config.tie_word_embeddings
    assert not module.config.tie_word_embeddings
    # Parameters are counted with the copy.
    assert to_pipeline(model, num_stages=1).num_parameters == model.num_parameters()
    assert module.num_parameters == model.num_parameters() + 96 * 32
    assert sum(p.numel() for p in module.parameters()) == module.num_parameters


@pytest.mark.parametrize("training", [False, True])
def test_results_are_equal_and_the_copies_gradients_add_up(
    tied_name, training, make_tied, make_batch
):
    model = make_tied(tied_name).train(training)
    # A cache lays keys and values out otherwise, and some processors' products then differ.
    model.config.use_cache = False
    name, source = TIED[tied_name]
    module = to_pipeline(model, num_stages=1, untie=True).train(training)
    batch = make_batch(model)
    torch.manual_seed(11)
    expected = model(**batch)
    inputs, labels = module.split_batch(batch)
    torch.manual_seed(11)
    logits = module(inputs)
    loss = module.loss_fn(logits, labels)
    assert torch.equal(logits, expected.logits)
    assert torch.equal(loss, expected.loss)
    theirs = gradients(dict(model.named_parameters()), expected.loss)
    own = {p: n for n, p in model.named_parameters()}
    (copy,) = module.untied_parameters().values()
    ours = gradients({own.get(p, name): p for p in module.parameters()}, loss)
    assert copy not in own
    # Autograd adds the two parts of a tied weight's gradient, which are ours one by one.
    head = ours.pop(name)
    assert torch.equal(head + ours[source], theirs[source])
    assert head.abs().max() > 0
    assert ours[source].abs().max() > 0
    assert not torch.equal(head, ours[source])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs if n != source)


@pytest.mark.parametrize("auto", [False, True])
def test_an_exported_folder_loads_as_what_was_trained(
    tied_name, auto, make_tied, make_batch, tmp_path
):
    model = make_tied(tied_name)
    name, source = TIED[tied_name]
    module = to_pipeline(model, num_stages=1, untie=True)
    disturb(module)
    save_pretrained(module, tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    file = load_file(tmp_path / "ours" / "model.safetensors")
    assert not torch.equal(file[name], file[source])
    kind = AUTO.get(tied_name, transformers.AutoModelForCausalLM) if auto else type(model)
    loaded, report = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(report.values())
    assert tied_weights(loaded) == ()
    batch = make_batch(model)
    inputs, _ = module.eval().split_batch(batch)
    assert torch.equal(module(inputs), logits_of(loaded, batch))
    state = whole_state_dict(module)
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())


def test_the_bias_of_berts_head_is_saved_under_both_names(make_model, make_batch, tmp_path):
    module = to_pipeline(make_model("bert-mlm"), num_stages=1, untie=True)
    disturb(module)
    save_pretrained(module, tmp_path / "once")
    model = transformers.BertForMaskedLM.from_pretrained(tmp_path / "once")
    decoder, spare = model.cls.predictions.decoder.bias, model.cls.predictions.bias
    assert torch.equal(decoder, spare)
    assert decoder is not spare
    # Trained again, the name that the forward pass does not use follows the one that it does.
    again = to_pipeline(model, num_stages=1)
    disturb(again)
    save_pretrained(again, tmp_path / "twice")
    file = load_file(tmp_path / "twice" / "model.safetensors")
    assert torch.equal(file["cls.predictions.bias"], file["cls.predictions.decoder.bias"])
    assert torch.equal(file["cls.predictions.bias"], decoder.detach())
    assert not torch.equal(decoder, spare)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "twice")
    batch = make_batch(model)
    inputs, _ = again.eval().split_batch(batch)
    assert torch.equal(again(inputs), logits_of(loaded, batch))


def test_one_warning_names_weights_reason_cost_and_remedy(make_model, caplog):
    with caplog.at_level(logging.WARNING, logger="wavemare"):
        to_pipeline(make_model("gpt2"), num_stages=1)
        assert caplog.records == []
        to_pipeline(make_model("gpt2").to(torch.bfloat16), num_stages=1, untie=True)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("wavemare", "WARNING")
    message = record.getMessage()
    assert message.startswith("lm_head.weight is no longer tied to transformer.wte.weight:")
    assert "asynchronously would have to wait" in message
    assert "3072 more parameters (0.01 MB" in message
    assert '"schedule": "1f1b"' in message
