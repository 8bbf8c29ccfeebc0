# SPDX-License-Identifier: Apache-2.0
"""From Hugging Face batches to pipeline inputs."""

import pytest
import torch

from wavemare.errors import ModelError
from wavemare.models import to_pipeline
from wavemare.models.batches import split_batch

IDS = torch.tensor([[5, 6, 7], [8, 9, 4]])
ALL = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def test_missing_entries_are_filled():
    inputs, labels = split_batch({"input_ids": IDS, "labels": IDS}, ALL)
    ids, mask, types, positions = inputs
    assert ids is not None
    assert torch.equal(ids, IDS)
    assert mask.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert types.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert labels is IDS
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int64 for tensor in inputs)


def test_given_entries_are_ordered_and_become_integers():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = {"labels": IDS, "attention_mask": mask, "input_ids": IDS.int()}
    inputs, _ = split_batch(batch, ALL[:2])
    assert torch.equal(inputs[0], IDS)
    assert inputs[1].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert inputs[1].dtype == torch.int64


def test_an_undeclared_mask_of_ones_is_dropped():
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    inputs, _ = split_batch(batch, ["input_ids"])
    assert torch.equal(inputs, IDS)


def test_undeclared_entries_are_refused(make_model):
    module = to_pipeline(make_model("gpt2"), num_stages=1, inputs=["input_ids"])
    padded = torch.ones_like(IDS)
    padded[0, -1] = 0
    for name, value in [("attention_mask", padded), ("position_ids", IDS)]:
        with pytest.raises(ModelError, match=rf"inputs=\['input_ids', '{name}'\]") as info:
            module.split_batch({"input_ids": IDS, "labels": IDS, name: value})
        assert info.value.key == name


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_missing_required_entries_are_refused(name):
    batch = {"input_ids": IDS, "labels": IDS}
    del batch[name]
    with pytest.raises(ModelError, match=f"Let the collator return '{name}'"):
        split_batch(batch, ["input_ids"])


def test_labels_may_be_left_out_for_prediction():
    assert split_batch({"input_ids": IDS}, ["input_ids"], labels_required=False)[1] == ()


def test_other_shapes_are_refused():
    mask = torch.ones(2, 1, 3, 3)
    with pytest.raises(ModelError, match=r"not of shape \(batch, sequence\)"):
        split_batch(
            {"input_ids": IDS, "labels": IDS, "attention_mask": mask},
            ["input_ids", "attention_mask"],
        )
    with pytest.raises(ModelError, match="input_ids"):
        split_batch({"input_ids": IDS[0], "labels": IDS}, ["input_ids"])
