# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints and models: ours, Megatron's, DeepSpeed's, transformers'."""

import io
import json
import pickle

import pytest
import torch

from wavemare.engine.checkpoint.manifest import read_manifest, resolve_tag
from wavemare.errors import CheckpointError, ModelError
from wavemare.megatron.convert import convert
from wavemare.megatron.files import read_checkpoint
from wavemare.training.models import check_model_folder
from wavemare.training.setup import needs_conversion


def saved(content):
    """The bytes of a file of torch."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.fixture
def folder(write, tmp_path):
    def make(files):
        (tmp_path / "given").mkdir()
        for name, content in files.items():
            write(f"given/{name}", content)
        return tmp_path / "given"

    return make


LATEST = "latest_checkpointed_iteration.txt"
FILE = "mp_rank_00/model_optim_rng.pt"
WEIGHTS = {"language_model": {"embedding": {"word_embeddings": {"weight": torch.zeros(2, 2)}}}}


def whole(**changes):
    """A checkpoint of one rank, with changes."""
    return {FILE: saved({"model": WEIGHTS, "checkpoint_version": 3.0, **changes})}


WHOLE = whole()[FILE]


class Hostile:
    def __reduce__(self):
        return print, ("this must never run",)


MEGATRON = [
    ({}, "no file latest_checkpointed"),
    ({LATEST: "soon"}, "says 'soon' where a number"),
    pytest.param({LATEST: "9" * 5000}, "where a number", id="latest of 5,000 digits"),
    ({LATEST: "5"}, "no mp_rank_*"),
    pytest.param({"mp_rank_00/other.pt": b""}, "no mp_rank_*", id="a rank without its file"),
    pytest.param({LATEST: "5", "iter_0000005/.metadata": b""}, "torch_dist", id="distributed"),
    ({FILE: WHOLE, "mp_rank_02/model_optim_rng.pt": WHOLE}, "tensor rank 1 and stage 0 is missing"),
    pytest.param({FILE: b""}, "cannot be read safely", id="an empty file"),
    ({FILE: saved({"model": Hostile()})}, "cannot be read safely"),
    ({FILE: pickle.dumps(Hostile())}, "cannot be read safely"),
    ({FILE: saved([1])}, "it holds no model"),
    ({FILE: saved({"model": {}})}, "no language_model"),
    ({FILE: saved({"model0": {}, "model1": {}})}, "interleaved stages"),
    (whole(checkpoint_version=9.0), "checkpoint_version is 9.0 where 0"),
    (whole(checkpoint_version="x"), "checkpoint_version is 'x' where 0 to 3"),
]


@pytest.mark.parametrize(("files", "said"), MEGATRON)
def test_a_checkpoint_of_megatron(refused, capsys, folder, files, said):
    given = folder(files)
    refused(lambda: read_checkpoint(given), CheckpointError, "checkpoint", str(given), said)
    assert capsys.readouterr().out == ""  # nothing of it has run


def model(**changes):
    """The configuration of a model, with changes."""
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9}
    return {"config.json": json.dumps({**gpt2, **changes})}


SOURCES = [
    ({"config.json": "{"}, ModelError, "model", "no model of transformers"),
    (model(n_embd="8"), ModelError, "model", "expected int, got str"),
    (model(model_type="t5"), ModelError, "model", "t5"),
    (model(), ModelError, "model", "weights cannot be read"),
    ({**model(), "model.safetensors": b"\xff" * 64}, ModelError, "model", "Copy its files again"),
    ({"latest": "here"}, ModelError, "SOURCE", "wavemare.save_pretrained"),
]


@pytest.mark.parametrize(("files", "kind", "key", "said"), SOURCES)
def test_a_folder_to_convert(refused, folder, tmp_path, files, kind, key, said):
    given = folder(files)
    refused(lambda: convert(given, tmp_path / "target", "hf"), kind, key, said)
    assert [path.name for path in tmp_path.iterdir()] == ["given"]  # nothing is left behind


TOPOLOGY = {"world_size": 2, "data": 1, "pipe": 2, "model": 1, "zero_stage": 1}


def listed(**changed):
    """The list of a checkpoint with one file of one byte."""
    return json.dumps({"topology": {**TOPOLOGY, **changed}, "files": {"x.pt": 1}})


OURS = [
    {"wavemare.json": ""},
    {"wavemare.json": "[]"},
    {"wavemare.json": '{"format": 99, "files": {}}'},
    {"wavemare.json": '{"files": {"x.pt": "1"}}'},
    {"wavemare.json": listed()},
    {"wavemare.json": listed(), "x.pt": b"12"},
    pytest.param({"wavemare.json": b"\xff\xfe"}, id="no text"),
    pytest.param({"wavemare.json": '{"files": {"x.pt": 1}}', "x.pt": b"1"}, id="no topology"),
    {"wavemare.json": listed(pipe="2"), "x.pt": b"1"},
    {"wavemare.json": listed(zero_stage=True), "x.pt": b"1"},
]


@pytest.mark.parametrize("files", OURS)
def test_a_list_of_files(refused, folder, files):
    given = folder(files)
    refused(lambda: read_manifest(given), CheckpointError, "checkpoint", str(given))


def test_a_list_that_is_whole(folder):
    given = folder({"wavemare.json": listed(), "x.pt": b"1"})
    assert read_manifest(given)["topology"] == TOPOLOGY


@pytest.mark.parametrize("topology", [None, [], {}, {**TOPOLOGY, "data": None}])
def test_a_topology_that_a_restart_cannot_use(refused, folder, topology):
    content = json.dumps({"topology": topology, "files": {}})
    given = folder({"latest": "one", "one/wavemare.json": content})
    refused(lambda: needs_conversion(given, 2, 1), CheckpointError, "checkpoint", "topology")


@pytest.mark.parametrize(("replicas", "tag"), [({}, "one"), ({"replicas": 2}, None)])
def test_local_steps_resume_as_they_were_saved(folder, replicas, tag):
    topology = {**TOPOLOGY, "zero_stage": 1, **replicas}
    content = json.dumps({"topology": topology, "files": {}})
    given = folder({"latest": "one", "one/wavemare.json": content})
    assert needs_conversion(given, 4, 2) == tag


TAGS = [
    pytest.param(b"step-9", id="a tag that there is not"),
    pytest.param(b"", id="an empty file"),
    pytest.param(b"\xff\xfe", id="no text"),
]


@pytest.mark.parametrize("latest", TAGS)
def test_a_latest_that_points_nowhere(refused, folder, latest):
    given = folder({"latest": latest, "step-000001/x": b""})
    refused(lambda: resolve_tag(given, None), CheckpointError, "checkpoint", "no such folder")


def test_a_bert_that_is_to_continue_text(refused, folder):
    config = json.dumps({"model_type": "bert", "vocab_size": 9})
    where = str(folder({"config.json": config, "model.safetensors": ""}))
    check_model_folder(where, 4)
    act = lambda: check_model_folder(where, 4, causal=True)  # noqa: E731
    refused(act, ModelError, "--model", where, "fills gaps", "wavemare train bert/finetune")
