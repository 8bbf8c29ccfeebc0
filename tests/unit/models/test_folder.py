# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders read part by part and written weight by weight, against transformers."""

import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_models import CONFIGS, build, files, lies_at
from support.refusals import refuses
from wavemare.errors import CheckpointError, ModelError
from wavemare.models.folder import HfFolder, write_folder
from wavemare.models.source import MemorySource, Span, Stored
from wavemare.models.spans import chunks, equal, within
from wavemare.models.tensor_file import TensorFile, TensorFileWriter

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", ["50GB", "6KB", "1KB"])
def test_the_bytes_of_save_pretrained(tmp_path, name, size):
    model = build(name)
    if size == "6KB":
        model.model.norm.double() if hasattr(model, "model") else None  # types are mixed
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    source = MemorySource(model.state_dict())
    write_folder(tmp_path / "ours", source, config, max_shard_size=size)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    folder = HfFolder(tmp_path / "theirs")
    assert folder.unknown == ()
    assert folder.stored == source.stored
    write_folder(tmp_path / "copied", folder, config, max_shard_size=size)
    assert files(tmp_path / "copied") == files(tmp_path / "theirs")
    generator = torch.Generator().manual_seed(5)
    for key, weight in model.state_dict().items():
        assert torch.equal(folder.read(key), weight), key
        assert lies_at(weight, folder.spans(key)), key
        for count in range(1, weight.dim() + 1):
            cuts = [torch.randint(0, n + 1, (2,), generator=generator) for n in weight.shape]
            index = tuple(slice(*cut.sort().values.tolist()) for cut in cuts[:count])
            assert torch.equal(folder.read(key, index), weight[index]), (key, index)


def test_it_goes_on_where_it_was_stopped(tmp_path):
    model = build("mixtral")
    source = MemorySource(model.state_dict())
    model.save_pretrained(tmp_path / "theirs", max_shard_size="6KB")
    done = []

    class Stop(Exception):
        pass

    def wrote(name, size):
        assert size == source.stored[name].dtype.itemsize * model.state_dict()[name].numel()
        done.append(name)
        if len(done) == 5:
            raise Stop

    options = {"max_shard_size": "6KB", "wrote": wrote}
    with pytest.raises(Stop):
        write_folder(tmp_path / "ours", source, model.config, **options)
    before = list(done)
    write_folder(tmp_path / "ours", source, model.config, **options, finished=before)
    assert sorted(done) == sorted(source.stored)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_names_in_memory_are_found_too(tmp_path):
    model = build("mixtral")
    model.save_pretrained(tmp_path, save_original_format=False)
    folder = HfFolder(tmp_path)
    assert all(torch.equal(folder.read(n), w) for n, w in model.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_names_of_the_base_model(tmp_path, name):
    """Files of a base model, for the model with a head; and the other way round."""
    model = build(name)
    base = getattr(model, model.base_model_prefix)
    base.save_pretrained(tmp_path / "base")
    folder = HfFolder(tmp_path / "base", type(model))
    assert all(torch.equal(folder.read(n), w) for n, w in model.state_dict().items())
    model.save_pretrained(tmp_path / "whole")
    folder = HfFolder(tmp_path / "whole", type(base))
    assert all(torch.equal(folder.read(n), w) for n, w in base.state_dict().items())


DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "float16", "bfloat16", "int32", "uint32"]
DTYPES += ["float32", "int64", "uint64", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"]


def test_a_file_of_every_type(tmp_path):
    """As the library of that name writes it."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for number, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        for key, shape in ((f"z{number}", (3, 5)), (f'a"é{number}', ()), (f"m{number}", (0, 4))):
            length = dtype.itemsize * torch.Size(shape).numel()
            data = torch.randint(0, 2, (length,), dtype=torch.uint8, generator=generator)
            state[key] = data.view(dtype).view(shape)
    save_file(state, tmp_path / "theirs", metadata={"format": "pt"})
    stored = {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    writer = TensorFileWriter(tmp_path / "ours", stored)
    for name, tensor in state.items():
        if tensor.numel():
            writer.write(name, tensor)
    writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    file = TensorFile(tmp_path / "theirs")
    assert file.stored == stored
    for name, tensor in state.items():
        found = file.read(name)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        bits = [each.reshape(-1).view(torch.uint8).tolist() for each in (found, tensor)]
        assert bits[0] == bits[1]


def test_what_is_read_belongs_to_the_caller(tmp_path):
    build("llama").save_pretrained(tmp_path)
    before = files(tmp_path)
    folder = HfFolder(tmp_path)
    weight = folder.read("model.norm.weight")
    weight.zero_()
    assert folder.read("model.norm.weight").abs().min() > 0
    assert files(tmp_path) == before


@pytest.mark.parametrize("index", ["of another model", "damaged", "of files that are gone"])
def test_one_file_and_an_index(tmp_path, index):
    """Of both, the file is taken, as transformers does."""
    model = build("llama")
    other = build("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    other.save_pretrained(tmp_path, max_shard_size="6KB")
    model.save_pretrained(tmp_path / "one")
    shutil.copy(tmp_path / "one" / WHOLE, tmp_path / WHOLE)
    if index == "damaged":
        (tmp_path / INDEX).write_text("{")
    elif index == "of files that are gone":
        for path in tmp_path.glob("model-*"):
            path.unlink()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    folder = HfFolder(tmp_path)
    assert all(torch.equal(folder.read(n), w) for n, w in theirs.items())
    assert torch.equal(theirs["model.norm.weight"], model.model.norm.weight)


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    build("llama").save_pretrained(folder, max_shard_size="6KB")
    return folder


def rename(folder, old, new):
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop(old)
    index["weight_map"][new] = file
    (folder / INDEX).write_text(json.dumps(index))
    state = load_file(folder / file)
    state[new] = state.pop(old)
    save_file(state, folder / file)


def test_a_missing_weight_is_named(llama):
    rename(llama, "model.norm.weight", "model.norm.other")
    with refuses(ModelError, "weight", "model.norm.weight"):
        HfFolder(llama)


def test_an_unknown_weight_is_told(tmp_path):
    model = build("llama")
    state = model.state_dict() | {"model.extra": torch.zeros(2)}
    model.save_pretrained(tmp_path, state_dict=state)
    assert HfFolder(tmp_path).unknown == ("model.extra",)


def test_ties_that_the_files_break(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with refuses(ModelError, "weight", "lm_head.weight"):
        HfFolder(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert torch.equal(HfFolder(tmp_path).read("lm_head.weight"), model.lm_head.weight)


def test_bytes_of_several_files(tmp_path):
    """Parts of spans, against the same parts of all the bytes in memory."""
    content = {name: os.urandom(size) for name, size in (("a", 700_000), ("b", 5), ("c", 700_001))}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    spans = [Span(tmp_path / n, 1, len(data) - 2) for n, data in content.items()]
    whole = b"".join(data[1:-1] for data in content.values())
    for first, length in ((0, len(whole)), (699_990, 20), (5, 0), (524_288, 524_288), (3, 10**7)):
        part = within(spans, first, length)
        assert b"".join(map(bytes, chunks(part))) == whole[first : first + length]
    (tmp_path / "whole").write_bytes(whole)
    other = [Span(tmp_path / "whole", 0, len(whole))]
    assert equal(spans, other)
    assert not equal(spans, within(other, 0, len(whole) - 1))
    for place in (0, 524_288, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        (tmp_path / "whole").write_bytes(changed)
        assert not equal(spans, other), place


def only(*names):
    def change(folder):
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()

    return change


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def cut(folder):
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])


def swapped(folder):
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    shutil.copy(first, second)


def header(content):
    def change(folder):
        only("config.json")(folder)
        data = json.dumps(content).encode()
        (folder / WHOLE).write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))

    return change


def entry(**changes):
    base = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
    return header({"model.norm.weight": base | changes})


BAD = [
    (only("config.json"), ModelError, "folder"),
    (only(WHOLE), ModelError, "folder"),
    (text("config.json", "{"), ModelError, "folder"),
    (text("config.json", '{"model_type": "llama", "hidden_size": "x"}'), ModelError, "folder"),
    (text(INDEX, "{"), CheckpointError, "folder"),
    (text(INDEX, "[]"), CheckpointError, "folder"),
    (text(INDEX, '{"weight_map": {"model.norm.weight": "../x"}}'), CheckpointError, "folder"),
    (text(INDEX, '{"weight_map": {"model.norm.weight": "absent"}}'), CheckpointError, "weights"),
    (cut, CheckpointError, "weights"),
    (swapped, CheckpointError, "folder"),
    (header([]), CheckpointError, "weights"),
    (header({"model.norm.weight": 5}), CheckpointError, "weights"),
    (entry(dtype="F3"), CheckpointError, "weights"),
    (entry(shape=[17]), CheckpointError, "weights"),
    (entry(shape=[-16]), CheckpointError, "weights"),
    (entry(shape="16"), CheckpointError, "weights"),
    (entry(data_offsets=[8, 72]), CheckpointError, "weights"),
    (entry(data_offsets=[-8, 56]), CheckpointError, "weights"),
    (entry(data_offsets=[0]), CheckpointError, "weights"),
    (entry(shape=[2**62, 4]), CheckpointError, "weights"),
]


@pytest.mark.parametrize(("change", "kind", "key"), BAD)
def test_a_damaged_folder(llama, change, kind, key):
    change(llama)
    with pytest.raises(kind) as caught:
        HfFolder(llama)
    assert caught.value.key == key


def test_a_file_that_changes_under_its_reader(llama):
    folder = HfFolder(llama)
    before = folder.spans("model.norm.weight")
    for path in llama.glob("*.safetensors"):
        path.write_bytes(b"")
    for read in (folder.read, folder.spans, lambda _: list(chunks(before))):
        with refuses(CheckpointError, "weights"):
            read("model.norm.weight")
