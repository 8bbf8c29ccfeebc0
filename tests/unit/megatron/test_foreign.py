# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that others wrote: objects of Megatron's classes, other models, damaged files."""

import argparse
import enum
import io
import shutil
import sys
import types

import pytest
import torch
import transformers

from support.refusals import refuses
from wavemare.errors import CheckpointError, ModelError
from wavemare.megatron.convert import Options, convert
from wavemare.megatron.files import read_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same model twice: as transformers' ``hf``, and on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    transformers.set_seed(7)
    config = transformers.GPT2Config(vocab_size=37, n_positions=20, n_embd=16, n_layer=2, n_head=4)
    config.bos_token_id = config.eos_token_id = 0
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "hf")
    convert(folder / "hf", folder / "megatron", "megatron", Options(tensor_parallel=2))
    return folder


@pytest.fixture
def changed(checkpoints, tmp_path):
    def make(change, rank="*"):
        shutil.copytree(checkpoints / "megatron", tmp_path / "m", dirs_exist_ok=True)
        for path in (tmp_path / "m").glob(f"*/mp_rank_{rank}/model_optim_rng.pt"):
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(path, weights_only=True)
            change(content)
            torch.save(content, path)
        return tmp_path / "m"

    return make


class ModelType(enum.Enum):
    encoder_or_decoder = 1


class ModelTypeByName(enum.Enum):
    """As Python 3.11.0 to 3.11.3 write it."""

    encoder_or_decoder = 1

    def __reduce_ex__(self, protocol):
        return getattr, (type(self), self.name)


@pytest.mark.parametrize("kind", [ModelType, ModelTypeByName])
def test_arguments_that_are_objects_of_megatron(kind, changed, checkpoints, tmp_path, monkeypatch):
    """Megatron's training sets ``args.model_type``, an enumeration, before it saves."""
    module = types.ModuleType("megatron.core.enums")
    monkeypatch.setattr(module, kind.__name__, kind, raising=False)
    monkeypatch.setattr(kind, "__module__", module.__name__)
    with monkeypatch.context() as there:
        for name in ("megatron", "megatron.core"):
            there.setitem(sys.modules, name, types.ModuleType(name))
        there.setitem(sys.modules, module.__name__, module)

        def change(content):
            content["args"].model_type = kind.encoder_or_decoder
            content["args"].params_dtype = torch.bfloat16

        folder = changed(change)
    read = read_checkpoint(folder).arguments
    assert read["params_dtype"] is torch.bfloat16
    assert not isinstance(read["model_type"], enum.Enum)
    convert(folder, tmp_path / "again", "hf")
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (checkpoints / "hf" / name).read_bytes()


def argument(name, value):
    return lambda content: setattr(content["args"], name, value)


def without(*path):
    def change(content):
        *parents, last = path
        for parent in ("model", "language_model", *parents):
            content = content[parent]
        del content[last]

    return change


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apply_layernorm_1p", True),
        ("apply_residual_connection_post_layernorm", True),
        ("group_query_attention", True),
        ("kv_channels", 8),
        ("normalization", "RMSNorm"),
        ("position_embedding_type", "rope"),
        ("squared_relu", True),
        ("swiglu", True),
    ],
)
def test_what_computes_something_else_is_refused(changed, tmp_path, name, value):
    """The weights alone would fit, and both sides of the comparison would be equally wrong."""
    with refuses(ModelError, f"args.{name}", value):
        convert(changed(argument(name, value)), tmp_path / "no", "hf")
    assert not (tmp_path / "no").exists()


WEIGHT = "layers.1.mlp.dense_h_to_4h.weight"


def encoder(**weights):
    return lambda content: content["model"]["language_model"]["encoder"].update(weights)


@pytest.mark.parametrize(
    ("change", "rank", "refusal"),
    [
        (
            without("encoder", WEIGHT),
            "01",
            ("weights", "encoder.layers.1.mlp.dense_h_to_4h.weight"),
        ),
        (
            encoder(**{WEIGHT: torch.zeros(3, 5)}),
            "01",
            ("weights", "encoder.layers.1.mlp.dense_h_to_4h.weight"),
        ),
        (encoder(x_extra_state=torch.zeros(0)), "*", ("checkpoint",)),
        (
            encoder(x=io.BytesIO(b"0"), **{"x.layernorm_q": torch.ones(1)}),
            "*",
            ("checkpoint",),
        ),
        (without("embedding", "position_embeddings"), "*", ("weights",)),
        (without("embedding", "word_embeddings"), "*", ("weights",)),
        (lambda c: c["model"].update({"decoder.x": torch.ones(1)}), "*", ("checkpoint",)),
        (argument("num_attention_heads", 5), "*", ("num_attention_heads",)),
        (argument("num_attention_heads", 1), "*", ("num_attention_heads",)),
        (lambda content: content.update(args=None), "*", ("num_attention_heads", None)),
    ],
)
def test_damaged_files(changed, tmp_path, change, rank, refusal):
    with refuses((ModelError, CheckpointError), *refusal):
        convert(changed(change, rank), tmp_path / "no", "hf")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("source", "to", "options", "name"),
    [
        ("megatron", "hf", Options(tensor_parallel=2), "--tensor-parallel"),
        ("megatron", "hf", Options(version=0), "--checkpoint-version"),
        ("hf", "megatron", Options(vocab_size=30), "--vocab-size"),
    ],
)
def test_options_without_effect_are_refused(checkpoints, tmp_path, source, to, options, name):
    with refuses(ModelError, name):
        convert(checkpoints / source, tmp_path / "no", to, options)
