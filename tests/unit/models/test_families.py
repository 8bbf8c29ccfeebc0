# SPDX-License-Identifier: Apache-2.0
"""The table of docs/models.md: which families become pipelines, and which are not split."""

import pytest
import torch
from tensor_models import build

from families import PIPELINE, SPLIT
from support.refusals import refuses
from wavemare.errors import ModelError
from wavemare.models import to_pipeline
from wavemare.parallel.tensor.split import split_model


@pytest.mark.parametrize("family", PIPELINE)
def test_pipelines_and_refused_splits(family):
    model = build("bert-mlm" if family == "bert" else family)
    model.config.output_router_logits = False
    if PIPELINE[family] == "refused":
        with pytest.raises(ModelError):
            to_pipeline(model, num_stages=1)
    else:
        to_pipeline(model, num_stages=1)  # with its proof
    if SPLIT[family] != "yes":
        with refuses(ModelError, "model", type(model).__name__) as caught:
            split_model(model, torch.distributed.group.WORLD)
        # The documentation shows this word.
        assert SPLIT[family].removeprefix("refused: ").split()[-1] in caught.value.reason
