# SPDX-License-Identifier: Apache-2.0
"""The table of docs/models.md: which families become pipelines, and which are not split."""

import pytest
import torch
from tensor_models import build

from families import PIPELINE, SPLIT
from wavemare.errors import ModelError
from wavemare.models import to_pipeline
from wavemare.parallel.tensor.split import split_model


def model_of(family):
    model = build("bert-mlm" if family == "bert" else family)
    model.config.output_router_logits = False
    return model


@pytest.mark.parametrize("family", PIPELINE)
def test_pipelines(family):
    model = model_of(family)
    if PIPELINE[family] != "refused":
        to_pipeline(model, num_stages=1)  # with its proof
        return
    with pytest.raises(ModelError):
        to_pipeline(model, num_stages=1)


@pytest.mark.parametrize("family", [name for name, cell in SPLIT.items() if cell != "yes"])
def test_refused_splits(family):
    reason = SPLIT[family].removeprefix("refused: ").replace(" ", ".*")
    with pytest.raises(ModelError, match=reason):
        split_model(model_of(family), torch.distributed.group.WORLD)
