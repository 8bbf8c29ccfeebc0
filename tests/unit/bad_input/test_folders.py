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
from wavemare.megatron.store import open_store
from wavemare.training.models import check_model_folder


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
    {},
    {LATEST: "soon"},
    pytest.param({LATEST: "9" * 5000}, id="latest of 5,000 digits"),
    {LATEST: "5"},
    pytest.param({"mp_rank_00/other.pt": b""}, id="a rank without its file"),
    pytest.param({LATEST: "5", "iter_0000005/.metadata": b""}, id="distributed"),
    {FILE: WHOLE, "mp_rank_02/model_optim_rng.pt": WHOLE},
    pytest.param({FILE: b""}, id="an empty file"),
    {FILE: saved({"model": Hostile()})},
    {FILE: pickle.dumps(Hostile())},
    {FILE: saved([1])},
    {FILE: saved({"model": {}})},
    {FILE: saved({"model0": {}, "model1": {}})},
    whole(checkpoint_version=9.0),
    whole(checkpoint_version="x"),
]


@pytest.mark.parametrize("files", MEGATRON)
def test_a_checkpoint_of_megatron(refused, capsys, folder, files):
    given = folder(files)
    refused(lambda: open_store(given), CheckpointError, "checkpoint")
    assert capsys.readouterr().out == ""  # nothing of it has run


def model(**changes):
    """The configuration of a model, with changes."""
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9}
    return {"config.json": json.dumps({**gpt2, **changes})}


SOURCES = [
    ({"config.json": "{"}, ModelError, "folder"),
    (model(n_embd="8"), ModelError, "folder"),
    (model(model_type="t5"), ModelError, "model"),
    (model(), ModelError, "folder"),
    ({**model(), "model.safetensors": b"\xff" * 64}, CheckpointError, "weights"),
    ({"latest": "here"}, ModelError, "SOURCE"),
]


@pytest.mark.parametrize(("files", "kind", "key"), SOURCES)
def test_a_folder_to_convert(refused, folder, tmp_path, files, kind, key):
    given = folder(files)
    refused(lambda: convert(given, tmp_path / "target", "hf"), kind, key)
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
    refused(lambda: read_manifest(given), CheckpointError, "checkpoint")


def test_a_list_that_is_whole(folder):
    given = folder({"wavemare.json": listed(), "x.pt": b"1"})
    assert read_manifest(given)["topology"] == TOPOLOGY


@pytest.mark.parametrize("topology", [None, [], {}, {**TOPOLOGY, "data": None}])
def test_a_topology_that_a_restart_cannot_use(refused, folder, topology):
    given = folder({"wavemare.json": json.dumps({"topology": topology, "files": {}})})
    refused(lambda: read_manifest(given), CheckpointError, "checkpoint")


TAGS = [
    pytest.param(b"step-9", id="a tag that there is not"),
    pytest.param(b"", id="an empty file"),
    pytest.param(b"\xff\xfe", id="no text"),
]


@pytest.mark.parametrize("latest", TAGS)
def test_a_latest_that_points_nowhere(refused, folder, latest):
    given = folder({"latest": latest, "step-000001/x": b""})
    refused(lambda: resolve_tag(given, None), CheckpointError, "checkpoint")


def test_a_bert_that_is_to_continue_text(refused, folder):
    config = json.dumps({"model_type": "bert", "vocab_size": 9})
    where = str(folder({"config.json": config, "model.safetensors": ""}))
    check_model_folder(where, 4)
    act = lambda: check_model_folder(where, 4, causal=True)  # noqa: E731
    refused(act, ModelError, "--model")
