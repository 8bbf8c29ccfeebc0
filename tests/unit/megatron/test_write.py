# SPDX-License-Identifier: Apache-2.0
"""torch_dist folders that we write: torch's reader and our own find the same weights."""

import argparse
import builtins
import errno
import io
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

import megatron_folders as made
from support.refusals import refuses
from wavemare.errors import CheckpointError, ModelError
from wavemare.megatron.store import open_store
from wavemare.megatron.write import write_torch_dist
from wavemare.models.source import MemorySource, spans_of
from wavemare.models.tensor_file import TensorFile


class Counting(MemorySource):
    """Weights that count how often each is read; one may end the process of writing."""

    def __init__(self, state, last=None):
        super().__init__(state)
        self.read_names, self.last = [], last

    def read(self, name, index=()):
        if name == self.last:
            raise KeyboardInterrupt
        self.read_names.append(name)
        return super().read(name, index)


def whole(content):
    """The tensors of a folder's keys, put together from their pieces."""
    found = {}
    for key, pieces in content.items():
        if pieces != [None]:
            ends = [[a + n for a, n in zip(f, p.shape, strict=True)] for f, p in pieces]
            found[key] = torch.empty(
                [max(end) for end in zip(*ends, strict=True)], dtype=pieces[0][1].dtype
            )
            for (first, piece), end in zip(pieces, ends, strict=True):
                found[key][tuple(slice(*cut) for cut in zip(first, end, strict=True))] = piece
    return found


def stored_files(step):
    return {path.name: path.read_bytes() for path in step.glob("*.distcp")}


def test_what_is_copied_from_a_file_has_the_bytes_of_what_is_read(tmp_path, monkeypatch):
    """Also of a tensor that fills the buffer of the copy several times."""
    monkeypatch.setattr("wavemare.megatron.write.FILE_BYTES", 2**20)
    state = made.model("qwen2-moe") | {"output_layer.weight": torch.randn(3, 100_001)}
    save_file(state, tmp_path / "weights")
    sources = MemorySource(state), TensorFile(tmp_path / "weights")
    assert all(spans_of(sources[1], name) is not None for name in state)
    found = []
    for number, source in enumerate(sources):
        source.stored = {name: source.stored[name] for name in state}  # in one order
        step = write_torch_dist(tmp_path / str(number), source, arguments={}, iteration=7)
        found.append(stored_files(step))
    assert len(found[0]) > 1
    assert found[0] == found[1]


@pytest.mark.parametrize("family", made.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_readers_find_what_was_written(tmp_path, family, dtype):
    state, args = made.model(family, dtype=dtype), made.arguments(family)
    done = []
    step = write_torch_dist(
        tmp_path, MemorySource(state), arguments=args, iteration=7, progress=done.append
    )
    assert step == tmp_path / "iter_0000007"
    assert sum(done) == sum(weight.nbytes for weight in state.values())
    expected = whole(made.keys(state, gated=family != "gpt2"))
    norm = "decoder.layers.pre_mlp_layernorm.weight"
    if norm in expected:  # local layers look for the second name
        expected["decoder.layers.mlp.linear_fc1.layer_norm_weight"] = expected[norm]
    found = made.read_dcp(step)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    store = open_store(tmp_path)
    assert (store.format, store.iteration, store.arguments) == ("torch_dist", 7, args)
    assert store.weights.stored.keys() == state.keys()
    for _ in range(2):
        for name, weight in state.items():
            read = store.weights.read(name)
            assert torch.equal(read, weight), name
            read.zero_()  # it belongs to the caller


def test_what_megatron_looks_for_beside_weights(tmp_path):
    state = made.model("qwen2-moe")
    args = {**made.arguments("qwen2-moe"), "save": "any"}
    step = write_torch_dist(
        tmp_path,
        MemorySource(state),
        arguments=args,
        iteration=0,
        common={"num_floating_point_operations_so_far": 3},
    )
    assert step.name == (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(step / "common.pt")
    assert vars(common["args"]) == args
    assert (common["checkpoint_version"], common["iteration"]) == (3.0, 0)
    assert common["num_floating_point_operations_so_far"] == 3
    assert json.loads((step / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    described = made.metadata(step).state_dict_metadata
    extra = {key for key in described if "_extra_state" in key}
    expected = set()
    for layer in range(4):
        for module in ("self_attention.linear_qkv", "self_attention.linear_proj"):
            expected.add(f"decoder.layers.{module}._extra_state/shard_{layer}_4")
        for linear in ("linear_fc1", "linear_fc2"):
            shared = f"decoder.layers.mlp.shared_experts.{linear}._extra_state"
            expected.add(f"{shared}/shard_{layer}_4")
            for expert in range(made.EXPERTS):
                state_of = f"decoder.layers.mlp.experts.experts.{linear}._extra_state"
                expected.add(f"{state_of}/shard_{layer}.{expert}_4.4")
    assert extra == expected
    places = {index.fqn: info for index, info in made.metadata(step).storage_data.items()}
    for key in extra:
        with (step / places[key].relative_path).open("rb") as file:
            file.seek(places[key].offset)
            (value,) = torch.load(io.BytesIO(file.read(places[key].length)))
        assert (value.dtype, value.numel()) == (torch.uint8, 0)


def test_an_interrupted_write_leaves_what_was_there(tmp_path):
    old, new = made.model("llama", seed=1), made.model("llama", seed=2)
    write_torch_dist(tmp_path, MemorySource(old), arguments={}, iteration=7)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        write_torch_dist(tmp_path, Counting(new, "output_layer.weight"), arguments={}, iteration=7)
    assert sorted(tmp_path.rglob("*")) == before
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert torch.equal(open_store(tmp_path).weights.read(name), old[name])
    write_torch_dist(tmp_path, MemorySource(new), arguments={}, iteration=7, durable=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert torch.equal(open_store(tmp_path).weights.read(name), new[name])


@pytest.mark.parametrize("cut", [None, "journal", "data"])
def test_a_killed_write_goes_on(tmp_path, cut):
    """Also if its last line, or the last weight, is not whole on the disk."""
    state = made.model("llama")
    last = "decoder.layers.3.mlp.linear_fc1.weight"
    with pytest.raises(KeyboardInterrupt):
        write_torch_dist(tmp_path, Counting(state, last), arguments={}, iteration=7, resume=True)
    with pytest.raises(CheckpointError):
        open_store(tmp_path / "iter_0000007")
    lost = 0
    (journal,) = (tmp_path / "iter_0000007").glob("*.jsonl")
    (data,) = (tmp_path / "iter_0000007").glob("*.distcp")
    if cut == "journal":
        journal.write_text(journal.read_text()[:-5])
        lost = 1
    elif cut == "data":
        data.write_bytes(data.read_bytes()[:-100])
        lost = 1
    names = list(state)
    again = Counting(state, "output_layer.weight")
    with pytest.raises(KeyboardInterrupt):
        write_torch_dist(tmp_path, again, arguments={}, iteration=7, resume=True)
    source = Counting(state)
    write_torch_dist(tmp_path, source, arguments={}, iteration=7, resume=True)
    assert again.read_names + source.read_names == names[names.index(last) - lost :]
    store = open_store(tmp_path)
    for name, weight in state.items():
        assert torch.equal(store.weights.read(name), weight)
    assert made.read_dcp(tmp_path / "iter_0000007").keys() == store.raw.stored.keys()
    assert not list(store.step_folder.glob("*.jsonl"))


def test_large_sets_have_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("wavemare.megatron.write.FILE_BYTES", 4096)
    state = made.model("llama")
    step = write_torch_dist(tmp_path, MemorySource(state), arguments={}, iteration=7)
    assert len(list(step.glob("*.distcp"))) > 2
    found = made.read_dcp(step)
    assert torch.equal(found["output_layer.weight"], state["output_layer.weight"])


def test_layers_that_differ_are_refused(tmp_path):
    state = made.model("llama")
    del state["decoder.layers.2.mlp.linear_fc1.weight"]
    with refuses(ModelError, "weights", "decoder.layers.2"):
        write_torch_dist(tmp_path / "no", MemorySource(state), arguments={}, iteration=7)
    assert not (tmp_path / "no").exists()


def test_a_full_disk(tmp_path, monkeypatch):
    state = made.model("llama")
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(CheckpointError, match="1,000"):
            write_torch_dist(tmp_path, MemorySource(state), arguments={}, iteration=7)
        with pytest.raises(CheckpointError, match="1,000"):
            write_torch_dist(tmp_path / "a" / "b", MemorySource(state), arguments={}, iteration=7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("iteration", [-3, 1.5, True, None])
def test_an_iteration_that_is_none(tmp_path, iteration):
    weights = MemorySource(made.model("llama"))
    with refuses(ModelError, "iteration"):
        write_torch_dist(tmp_path / "a", weights, arguments={}, iteration=iteration)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_becomes_shorter_while_it_is_copied(tmp_path):
    save_file(made.model("llama"), tmp_path / "weights")
    source = TensorFile(tmp_path / "weights")

    def cut(_):
        (tmp_path / "weights").write_bytes((tmp_path / "weights").read_bytes()[:-8])

    with refuses(CheckpointError, "weights"):
        write_torch_dist(tmp_path / "a", source, arguments={}, iteration=7, progress=cut)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("copied", [False, True])
def test_a_disk_that_fills_up(tmp_path, monkeypatch, copied):
    really, state = builtins.open, made.model("llama")
    source = MemorySource(state)
    if copied:
        save_file(state, tmp_path / "weights")
        source = TensorFile(tmp_path / "weights")

    def full(path, mode="r", *args, **options):
        place = "/dev/full" if str(path).endswith(".distcp") and "x" in mode else path
        return really(place, mode.replace("x", "w"), *args, **options)

    with monkeypatch.context() as disk:
        disk.setattr(builtins, "open", full)
        with pytest.raises(CheckpointError) as error:
            write_torch_dist(tmp_path / "a", source, arguments={}, iteration=7)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.ENOSPC
    assert not (tmp_path / "a").exists()
