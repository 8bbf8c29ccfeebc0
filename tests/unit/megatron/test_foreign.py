# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that others wrote: objects of Megatron's classes, other models, damaged files."""

from __future__ import annotations

import argparse
import enum
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from wavemare.errors import CheckpointError, ModelError
from wavemare.megatron.convert import Options, convert
from wavemare.megatron.files import read_checkpoint

Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model twice: as transformers' ``hf``, and on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    transformers.set_seed(7)
    config = transformers.GPT2Config(vocab_size=37, n_positions=20, n_embd=16, n_layer=2, n_head=4)
    config.bos_token_id = config.eos_token_id = 0
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "hf")
    convert(folder / "hf", folder / "megatron", "megatron", Options(tensor_parallel=2))
    return folder


@pytest.fixture
def changed(checkpoints: Path, tmp_path: Path) -> Callable[[Change, str], Path]:
    def make(change: Change, rank: str = "*") -> Path:
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (type(self), self.name)


@pytest.mark.parametrize("kind", [ModelType, ModelTypeByName])
def test_arguments_that_are_objects_of_megatron(
    kind: Any, changed: Any, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's training sets ``args.model_type``, an enumeration, before it saves."""
    module = types.ModuleType("megatron.core.enums")
    monkeypatch.setattr(module, kind.__name__, kind, raising=False)
    monkeypatch.setattr(kind, "__module__", module.__name__)
    with monkeypatch.context() as there:
        for name in ("megatron", "megatron.core"):
            there.setitem(sys.modules, name, types.ModuleType(name))
        there.setitem(sys.modules, module.__name__, module)

        def change(content: Any) -> None:
            content["args"].model_type = kind.encoder_or_decoder
            content["args"].params_dtype = torch.bfloat16

        folder = changed(change)
    read = read_checkpoint(folder).arguments
    assert read["params_dtype"] is torch.bfloat16
    assert not isinstance(read["model_type"], enum.Enum)
    convert(folder, tmp_path / "again", "hf")
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (checkpoints / "hf" / name).read_bytes()


class Evil:
    """A name of Megatron's beside one that runs: the first does not excuse the second."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


@pytest.mark.parametrize("save", [torch.save, lambda it, path: path.write_bytes(pickle.dumps(it))])
def test_no_code_of_a_file_is_run(
    changed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Any
) -> None:
    folder = changed(lambda content: None)
    save({"model": {}, "args": Evil()}, folder / "release" / "mp_rank_01" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="cannot be read safely"):
        convert(folder, tmp_path / "no", "hf")
    assert "unpickled" not in capsys.readouterr().out
    assert not (tmp_path / "no").exists()


def argument(name: str, value: Any) -> Change:
    return lambda content: setattr(content["args"], name, value)


def without(*path: str) -> Change:
    def change(content: Any) -> None:
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
def test_what_computes_something_else_is_refused(
    changed: Any, tmp_path: Path, name: str, value: Any
) -> None:
    """The weights alone would fit, and both sides of the comparison would be equally wrong."""
    with pytest.raises(ModelError, match=rf"args\.{name} = {value!r}"):
        convert(changed(argument(name, value)), tmp_path / "no", "hf")
    assert not (tmp_path / "no").exists()


WEIGHT = "layers.1.mlp.dense_h_to_4h.weight"


def narrow(content: Any) -> None:
    content["model"]["language_model"]["encoder"][WEIGHT] = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("change", "rank", "match"),
    [
        (without("encoder", WEIGHT), "01", "ranks do not all hold it"),
        (without("encoder", WEIGHT), "00", "ranks do not all hold it"),
        (narrow, "01", "not in one shape"),
        (without("embedding", "position_embeddings"), "*", "learned positions"),
        (without("embedding", "word_embeddings"), "*", "learned positions"),
        (argument("num_attention_heads", 5), "*", "16 on 2 tensor-parallel ranks"),
        (argument("num_attention_heads", 1), "*", "16 on 2 tensor-parallel ranks"),
        (lambda content: content.update(checkpoint_version="x"), "*", "'x', no number"),
        (lambda content: content.update(checkpoint_version=4.0), "*", "4 where 0 to 3 are known"),
        (lambda content: content.update(model=3), "*", "holds no model"),
        (lambda content: content.update(args=None), "*", "--num-attention-heads"),
    ],
)
def test_damaged_files(changed: Any, tmp_path: Path, change: Change, rank: str, match: str) -> None:
    with pytest.raises((ModelError, CheckpointError), match=match):
        convert(changed(change, rank), tmp_path / "no", "hf")
    assert not (tmp_path / "no").exists()


def test_damaged_models_of_transformers(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    shutil.copy(checkpoints / "hf" / "config.json", tmp_path / "hf")
    with pytest.raises(ModelError, match="weights cannot be read"):
        convert(tmp_path / "hf", tmp_path / "no", "megatron")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"no weights" * 9)
    with pytest.raises(ModelError, match="weights cannot be read"):
        convert(tmp_path / "hf", tmp_path / "no", "megatron")


def test_a_layer_that_is_no_dictionary(checkpoints: Path, tmp_path: Path) -> None:
    convert(checkpoints / "hf", tmp_path / "pipe", "deepspeed")
    torch.save([1], tmp_path / "pipe" / "converted" / "layer_01-model_states.pt")
    with pytest.raises(CheckpointError, match="it holds a list"):
        convert(tmp_path / "pipe", tmp_path / "no", "hf")


@pytest.mark.parametrize(
    ("source", "to", "options", "name"),
    [
        ("megatron", "hf", Options(tensor_parallel=2), "--tensor-parallel"),
        ("megatron", "deepspeed", Options(version=0), "--checkpoint-version"),
        ("hf", "megatron", Options(vocab_size=30), "--vocab-size"),
        ("hf", "deepspeed", Options(divisible_by=8), "--make-vocab-size-divisible-by"),
        ("hf", "hf", Options(config="hf"), "--config"),
    ],
)
def test_options_without_effect_are_refused(
    checkpoints: Path, tmp_path: Path, source: str, to: str, options: Options, name: str
) -> None:
    with pytest.raises(ModelError, match=rf"^{name} = .*no effect from {source} to {to}"):
        convert(checkpoints / source, tmp_path / "no", to, options)


def test_targets(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    convert(checkpoints / "megatron", ".", "hf")
    assert (tmp_path / "empty" / "config.json").is_file()
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="TARGET"):
        convert(checkpoints / "hf", tmp_path / "file" / "below", "megatron")
