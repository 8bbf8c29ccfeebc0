# SPDX-License-Identifier: Apache-2.0
"""What is refused of preference tuning before anything is trained."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from support.refusals import refuses
from wavemare.errors import ConfigError, ModelError
from wavemare.recipes.llama.dpo import DpoArguments
from wavemare.training.preferences import check_preferences

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def folder(path, **changes):
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).save_pretrained(path)
    return str(path)


def arguments(tmp_path, **options):
    model = tmp_path / "model"
    start = str(model) if model.exists() else folder(model)
    return DpoArguments(model=start, sequence_length=32, **options)


@pytest.mark.parametrize(
    ("name", "size"), [("hidden_size", 64), ("vocab_size", 60), ("num_hidden_layers", 3)]
)
def test_a_reference_has_the_size_of_the_model(tmp_path, name, size):
    alike = folder(tmp_path / "alike")
    check_preferences(arguments(tmp_path, reference=alike))
    other = folder(tmp_path / "other", **{name: size})
    with refuses(ConfigError, "--reference", other) as caught:
        check_preferences(arguments(tmp_path, reference=other))
    assert name in caught.value.reason
    assert str(size) in caught.value.reason


def test_a_reference_is_a_folder_of_a_model(tmp_path):
    with refuses(ModelError, "--reference", str(tmp_path / "none")):
        check_preferences(arguments(tmp_path, reference=str(tmp_path / "none")))


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan"), float("inf")])
def test_beta_is_a_positive_number(tmp_path, beta):
    check_preferences(arguments(tmp_path, beta=0.1))
    with refuses(ConfigError, "--beta"):
        check_preferences(arguments(tmp_path, beta=beta))
