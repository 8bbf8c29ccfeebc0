# SPDX-License-Identifier: Apache-2.0
"""No file of data, of a tokenizer or of a model can run code; other tests open checkpoints."""

import json
import os
import pickle
import runpy
import sys

import datasets
import pytest
import torch
import transformers

from wavemare.data.text import load_text
from wavemare.data.tokenizer import load_tokenizer
from wavemare.errors import CheckpointError, DataError, ModelError
from wavemare.models.folder import HfFolder


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def evil(tmp_path):
    """Bytes of a pickle that makes a file; the test fails if that file is there at its end."""
    marker = tmp_path / "marker"
    content = pickle.dumps(Evil(marker))
    pickle.loads(content)
    assert marker.exists()  # it would
    marker.unlink()
    yield content
    assert not marker.exists()


def tiny():
    transformers.set_seed(3)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 11}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, "one": 1, "two": 2, "[UNK]": 3}
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|endoftext|>", unk_token="[UNK]"
    )


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "json", "jsonl", "csv", "tsv", "txt"])
def test_tables_and_texts(evil, tmp_path, suffix):
    file = tmp_path / f"data.{suffix}"
    file.write_bytes(evil)
    with pytest.raises(DataError):
        load_text(str(file))


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "py", "pt", "npy"])
def test_formats_that_run_code_are_none_of_ours(evil, tmp_path, suffix):
    (tmp_path / f"data.{suffix}").write_bytes(evil)
    with pytest.raises(DataError):
        load_text(str(tmp_path / f"data.{suffix}"))
    with pytest.raises(DataError):
        load_text(str(tmp_path))


def test_a_saved_dataset(evil, tmp_path):
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(str(tmp_path / "saved"))
    for file in (tmp_path / "saved").iterdir():
        kept = file.read_bytes()
        file.write_bytes(evil)
        with pytest.raises(DataError):
            load_text(str(tmp_path / "saved"))
        file.write_bytes(kept)
    datasets.load_from_disk(str(tmp_path / "saved"))  # whole again


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer(evil, tmp_path, tokenizer, name):
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / name).write_bytes(evil)
    with pytest.raises(DataError):
        load_tokenizer(tmp_path / "saved")


def test_a_tokenizer_with_code_of_its_own(tmp_path, tokenizer):
    marker = tmp_path / "marker"
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        load_tokenizer(tmp_path / "saved")
    except DataError:
        pass
    assert not marker.exists()


def spoilers(evil, tmp_path):
    """Return what puts the pickle into a file: as it is, and as torch would have."""
    as_object = Evil(tmp_path / "marker")
    return [lambda file: file.write_bytes(evil), lambda file: torch.save(as_object, file)]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_model_of_transformers(evil, tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    assert sorted(p.suffix for p in (tmp_path / "model").iterdir()) == [".json"] * 2 + [
        ".safetensors"
    ]
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    weights.write_bytes(evil)
    with pytest.raises(CheckpointError):
        HfFolder(tmp_path / "model")
    weights.unlink()
    for spoil in spoilers(evil, tmp_path):
        spoil(tmp_path / "model" / "pytorch_model.bin")
        with pytest.raises(ModelError):
            HfFolder(tmp_path / "model")


UNIVERSAL = "wavemare.universal"
SHARDS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
# The parent process reads the first shard and the model, its workers the second shard.
READ_BY_UNIVERSAL = [*SHARDS, "mp_rank_00_model_states.pt"]


@pytest.fixture
def shards(tmp_path):
    """What DeepSpeed's conversion looks at in a checkpoint of two ranks with ZeRO 1."""
    folder = tmp_path / "step-1"
    folder.mkdir()
    model = {
        "module": {},
        "iteration": 1,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        "param_shapes": [{"weight": torch.Size([4])}],
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for shard in SHARDS:
        states = {"base_optimizer_state": {"state": {}}, "zero_stage": 1, "partition_count": [2]}
        mappings = {"param_slice_mappings": [], "single_partition_of_fp32_groups": []}
        torch.save({"optimizer_state_dict": {**states, **mappings}}, folder / shard)
    return folder


def convert(monkeypatch, folder):
    """Run ``python -m wavemare.universal`` in this process; return how it ends."""
    words = ["--input_folder", str(folder), "--output_folder", str(folder.parent / "universal")]
    monkeypatch.setattr(sys, "argv", [UNIVERSAL, *words])
    monkeypatch.delitem(sys.modules, UNIVERSAL, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(UNIVERSAL, run_name="__main__")
    return end.value.code


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", READ_BY_UNIVERSAL)
def test_a_checkpoint_to_convert(evil, tmp_path, monkeypatch, capsys, shards, name):
    for spoil in spoilers(evil, tmp_path):
        spoil(shards / name)
        assert convert(monkeypatch, shards) == 2
        said = capsys.readouterr().err
        assert f"error: checkpoint = '{shards / name}': the file cannot be read safely" in said
        assert "Traceback" not in said
        assert not (tmp_path / "marker").exists()


def test_a_checkpoint_of_replicas_is_not_converted(monkeypatch, capsys, shards):
    (shards / "replicas").mkdir()
    assert convert(monkeypatch, shards) == 2
    assert "DeepSpeed would join its replicas into one model" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["missing", "file", "parent", "empty"])
def test_a_checkpoint_to_convert_that_is_none(tmp_path, monkeypatch, capsys, shards, kind):
    """The folder above the tags is a likely mistake."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    given = shards.parent if kind == "parent" else tmp_path / kind
    assert convert(monkeypatch, given) == 2
    said = capsys.readouterr().err
    reason = "it has no optimizer states" if given.is_dir() else "there is no such folder"
    assert f"error: --input_folder = '{given}': {reason}" in said
    assert "Traceback" not in said
