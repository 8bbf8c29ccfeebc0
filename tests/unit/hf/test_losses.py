# SPDX-License-Identifier: Apache-2.0
"""What stands for the model on a pipeline's last stage: as the model itself, or a typed error."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers.trainer_pt_utils import LabelSmoother

from wavemare.errors import ModelError
from wavemare.hf.losses import StageModel
from wavemare.models.families import family_of

ROWS, LENGTH, TOKENS = 3, 8, 50


@pytest.fixture(scope="module")
def model():
    transformers.set_seed(7)
    sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=TOKENS, **sizes)).eval()


@pytest.fixture
def batch():
    torch.manual_seed(3)
    ids = torch.randint(0, TOKENS, (ROWS, LENGTH))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def stage(model, batch, filled=0):
    """What stands for a model whose stages have seen a batch, and copies of its first row."""
    ids = torch.cat([batch["input_ids"], batch["input_ids"][:1].repeat(filled, 1)])
    module = SimpleNamespace(
        inputs=("input_ids", "attention_mask"), training=False, parameters=model.parameters
    )
    engine = SimpleNamespace(module=module, device=torch.device("cpu"))
    head = family_of(model).loss(model)
    return StageModel(model, engine, head, model(input_ids=ids).logits, batch)


def focal(model, inputs):
    labels = inputs["labels"][:, 1:].flatten()
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    losses = cross_entropy(logits, labels, reduction="none")
    return ((1 - (-losses).exp()) * losses).mean()


def smoothed(model, inputs):
    labels = inputs.pop("labels")
    return LabelSmoother(0.1)(model(**inputs), labels, shift_labels=True)


def by_place(model, inputs):
    ids, mask, labels = (inputs[n] for n in ("input_ids", "attention_mask", "labels"))
    return model(ids, attention_mask=mask, labels=labels)[0] * model(ids).logits.shape[-1]


POSSIBLE = {
    "logits": focal,
    "smoothed": smoothed,
    "loss": lambda model, inputs: model(**inputs).loss,
    "entry": lambda model, inputs: model(**inputs)["loss"],
    "counted": lambda model, inputs: model(**inputs, num_items_in_batch=5).loss,
    "tuple": lambda model, inputs: model(**inputs)[1].square().mean(),
    "equal copy": lambda model, inputs: model(**{k: v.clone() for k, v in inputs.items()}).loss,
    "harmless": lambda model, inputs: model(**inputs, use_cache=False, return_dict=True).loss,
    "configuration": lambda model, inputs: model(**inputs).loss * model.config.vocab_size,
    "mode": lambda model, inputs: model(**inputs).loss * (2 if model.training else 3),
    "place": lambda model, inputs: model(**inputs).logits.to(model.device, model.dtype).mean(),
}
IMPOSSIBLE = {
    "twice": by_place,
    "hidden states": lambda model, inputs: model(**inputs, output_hidden_states=True),
    "unasked": lambda model, inputs: model(**inputs).hidden_states,
    "attentions": lambda model, inputs: model(**inputs).attentions,
    "cache": lambda model, inputs: model(**inputs).past_key_values,
    "weight": lambda model, inputs: model.lm_head.weight.norm(),
    "parameters": lambda model, inputs: sum(p.norm() for p in model.parameters()),
    "method": lambda model, inputs: model.get_input_embeddings(),
    "other ids": lambda model, inputs: model(**{**inputs, "input_ids": inputs["labels"].abs()}),
    "no mask": lambda model, inputs: model(input_ids=inputs["input_ids"]),
    "embeddings": lambda model, inputs: model(**inputs, inputs_embeds=torch.ones(ROWS, LENGTH, 16)),
    "by place": lambda model, inputs: model(**inputs, return_dict=False),
    "some logits": lambda model, inputs: model(**inputs, logits_to_keep=2),
}


@pytest.mark.parametrize("filled", [0, 2])
@pytest.mark.parametrize("name", POSSIBLE)
def test_a_loss_is_that_of_the_whole_model(name, filled, model, batch):
    expected = POSSIBLE[name](model, dict(batch))
    found = POSSIBLE[name](stage(model, batch, filled), dict(batch))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_is_not_on_the_last_stage_is_refused(name, model, batch):
    with pytest.raises(ModelError):
        IMPOSSIBLE[name](stage(model, batch), dict(batch))


def test_what_is_not_there_is_no_attribute(model, batch):
    stands = stage(model, batch)
    assert not hasattr(stands, "module")
    assert not hasattr(stands(**batch), "hidden_states")
    assert getattr(stands, "lm_head", None) is None
