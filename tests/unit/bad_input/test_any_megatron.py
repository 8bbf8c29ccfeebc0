# SPDX-License-Identifier: Apache-2.0
"""Whatever has happened to a checkpoint of Megatron: its weights, or a `CheckpointError`."""

import argparse
import functools
import io
import os
import pickle
import shutil

import pytest
import torch
from fuzz_strategies import FUZZ, damaged, refusal
from hypothesis import given
from hypothesis import strategies as st

import megatron_folders as made
from wavemare.errors import CheckpointError
from wavemare.megatron.inspect import describe
from wavemare.megatron.store import open_store

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")
STEP = "iter_0000005"
MOMENT = "optimizer.state.exp_avg.decoder.final_layernorm.weight"


def read_all(folder):
    """Read everything that a checkpoint has."""
    store = open_store(folder)
    describe(store)
    for source in (store.weights, store.raw):
        for name, stored in source.stored.items():
            weight = source.read(name)
            assert (tuple(weight.shape), weight.dtype) == (stored.shape, stored.dtype)


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """The files of small checkpoints, by format."""
    folder = tmp_path_factory.mktemp("valid")
    state, args = made.model("qwen2-moe", layers=2), made.arguments("qwen2-moe")
    for common in ("file", "object"):
        content = made.keys(state, 2)
        content[MOMENT] = [((0,), torch.ones(4)), ((4,), torch.ones(4))]
        step = made.torch_dist(folder / common, content, args, common=common)
        (step / "run_config.yaml").write_text("model:\n  num_layers: 2\n")
        torch.save({"step": torch.tensor(5)}, step / "train_state.pt")
    made.fsdp_dtensor(folder / "fsdp_dtensor", state, args)
    made.rank_files(folder / "torch", state, args, tp=2, spec="te")
    made.legacy(folder / "legacy", made.model("gpt2", layers=2), args, zipped=False, version=0)
    found = {path.name: files_of(path) for path in folder.iterdir()}
    for name in found:
        read_all(folder / name)
    return found


def written(folder, files):
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", ["file", "object", "fsdp_dtensor", "torch", "legacy"])
@FUZZ
@given(data=st.data())
def test_damaged_files(valid, tmp_path, kind, data):
    files = dict(valid[kind])
    name = data.draw(st.sampled_from(sorted(files)))
    files[name] = data.draw(damaged(files[name]))
    folder = written(tmp_path / "given", files)
    error = refusal(read_all, CheckpointError, folder)
    assert error is None or str(error).isprintable()
    assert files_of(tmp_path) == {f"given/{n}": content for n, content in files.items()}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, call, *arguments):
        self.reduced = call, arguments

    def __reduce__(self):
        return self.reduced


def evils(marker):
    """Objects that make a file, each in its own way."""
    command = f"touch {marker}"
    return [
        Evil(os.system, command),
        Evil(eval, f"__import__('os').system({command!r})"),
        Evil(functools.partial(os.system, command)),
        Evil(argparse.Namespace, Evil(os.system, command)),
        Evil(getattr, Evil(__import__, "os"), "system"),
        Evil(torch.hub.load, str(marker), "any"),
        Evil(torch.load, str(marker)),
        Evil(io.open, str(marker), "w"),
    ]


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("number", range(8))
def test_nothing_is_run(valid, tmp_path, number):
    marker = tmp_path / "marker"
    evil = evils(marker)[number]
    model = {"decoder.final_layernorm.weight": torch.ones(2)}
    places = {
        "file": [".metadata", "common.pt", "train_state.pt"],
        "object": [".metadata"],
        "fsdp_dtensor": [".metadata"],
        "torch": ["mp_rank_00/model_optim_rng.pt"],
    }
    for kind, names in places.items():
        for name in names:
            contents = [pickle.dumps(evil), saved(evil), saved({"args": evil, "model": model})]
            for content in contents:
                folder = written(tmp_path / "given", {**valid[kind], f"{STEP}/{name}": content})
                error = refusal(read_all, CheckpointError, folder)
                # A function of torch's may be the value of an argument, which is not called.
                assert error is not None or evil.reduced[0].__module__.startswith("torch")
                assert not marker.exists()
    content = made.keys(made.model("llama", layers=1))
    for key in ("decoder.layers.mlp.linear_fc2._extra_state/shard_0_1", "common_state/shard_0_1"):
        shutil.rmtree(tmp_path / "given")
        made.torch_dist(tmp_path / "given", {**content, key: [evil]}, {})
        refusal(read_all, CheckpointError, tmp_path / "given")
        assert not marker.exists()


def change_first(name, value):
    """Change a field of the place where the first weight lies."""

    def change(metadata, step):
        index = next(i for i in metadata.storage_data if i.fqn == "output_layer.weight")
        info = metadata.storage_data[index]
        setattr(info, name, value(step, info) if callable(value) else value)

    return change


def change_weight(change):
    """Change the description of a weight."""
    return lambda metadata, _: change(metadata.state_dict_metadata["output_layer.weight"])


def linked(step, info):
    target = step.parent.parent / "secret"
    shutil.copy(step / info.relative_path, target)
    (step / "__9_9.distcp").symlink_to(target)
    return "__9_9.distcp"


def pipe(step, _):
    os.mkfifo(step / "__9_8.distcp")
    return "__9_8.distcp"


def copied(step, info):
    shutil.copy(step / info.relative_path, step.parent / "other.distcp")
    return "../other.distcp"


def without(metadata, _):
    index = next(i for i in metadata.storage_data if i.fqn == "output_layer.weight")
    del metadata.storage_data[index]


def chunk(each):
    return each.chunks[0]


HOSTILE = {
    "a file above the folder": change_first("relative_path", copied),
    "an absolute path": change_first("relative_path", lambda s, i: str(s / i.relative_path)),
    "a link out of the folder": change_first("relative_path", linked),
    "a pipe": change_first("relative_path", pipe),
    "the folder": change_first("relative_path", "."),
    "no name": change_first("relative_path", ""),
    "a name that is none": change_first("relative_path", 5),
    "a file that is absent": change_first("relative_path", "__7_7.distcp"),
    "after the end": change_first("offset", 2**40),
    "before the start": change_first("offset", -1),
    "a fraction": change_first("offset", 0.5),
    "too long": change_first("length", 2**40),
    "too short": change_first("length", 10),
    "another place": change_first("offset", 64),
    "compressed": change_first("transform_descriptors", ["zstd"]),
    "no place": without,
    "a huge shape": change_weight(lambda e: setattr(e, "size", torch.Size([2**60, 2**60]))),
    "a huge chunk": change_weight(
        lambda e: (
            setattr(e, "size", torch.Size([2**40, 8])),
            setattr(chunk(e), "sizes", torch.Size([2**40, 8])),
        )
    ),
    "a chunk outside": change_weight(lambda e: setattr(chunk(e), "sizes", torch.Size([17, 8]))),
    "a chunk that is smaller": change_weight(
        lambda e: setattr(chunk(e), "sizes", torch.Size([4, 8]))
    ),
    "a negative size": change_weight(lambda e: setattr(e, "size", (-16, 8))),
    "more dimensions": change_weight(lambda e: setattr(e, "size", torch.Size([16, 8, 1]))),
    "two chunks of one place": change_weight(lambda e: e.chunks.append(chunk(e))),
    "no chunks": change_weight(lambda e: e.chunks.clear()),
    "half of a moment": lambda m, _: m.state_dict_metadata[MOMENT].chunks.pop(),
    "another data type": change_weight(lambda e: setattr(e.properties, "dtype", torch.int8)),
    "no data type": change_weight(lambda e: setattr(e.properties, "dtype", "float")),
    "a name with an escape": lambda m, _: m.state_dict_metadata.update({"\x1b[2J": 1}),
    "a name that is a number": lambda m, _: m.state_dict_metadata.update({5: 1}),
    "layers without end": lambda m, _: m.state_dict_metadata.update(
        {
            "decoder.layers.x": type(m.state_dict_metadata["output_layer.weight"])(
                m.state_dict_metadata["output_layer.weight"].properties, torch.Size([2**40, 0]), []
            )
        }
    ),
}


KNOWN_WHEN_READ = {"another place", "another data type", "half of a moment"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_description_that_lies(valid, tmp_path, name):
    step = written(tmp_path / "given", valid["file"]) / STEP
    metadata = pickle.loads((step / ".metadata").read_bytes())
    HOSTILE[name](metadata, step)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    before = sorted(tmp_path.rglob("*"))
    act = read_all if name in KNOWN_WHEN_READ else open_store
    error = refusal(act, CheckpointError, tmp_path / "given")
    assert error is not None
    assert str(error).isprintable()
    assert sorted(tmp_path.rglob("*")) == before


def pickled_by_hand(depth=20_000):
    """A list in a list in a list: writing it by recursion would not end well."""
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", pickled_by_hand(), b"PK\3\4" * 40])
@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp", "run_config.yaml"])
def test_files_of_nothing(valid, tmp_path, name, content):
    files = {**valid["file"], f"{STEP}/{name}": content}
    error = refusal(read_all, CheckpointError, written(tmp_path / "given", files))
    assert error is not None or (name == "run_config.yaml" and not content)


@pytest.mark.parametrize(
    "text", ["[" * 20_000, "a: &a [*a]", "\0", "- b", "{", "!!python/name:os 1"]
)
def test_a_configuration_of_bridge(valid, tmp_path, text):
    files = {**valid["file"], f"{STEP}/run_config.yaml": text.encode()}
    refusal(read_all, CheckpointError, written(tmp_path / "given", files))
