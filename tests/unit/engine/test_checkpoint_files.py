# SPDX-License-Identifier: Apache-2.0
"""What torch.save writes, with a checksum, from a copy, and read without running code."""

import argparse
import datetime
import io
import json
import os
import pickle
import random
import threading
from collections import Counter, OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import xxhash
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.lr_schedules import OneCycle, WarmupCosineLR, WarmupLR
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.zero_to_fp32 import parse_model_states

from support.refusals import refuses
from wavemare.engine.checkpoint.files import (
    CheckpointFiles,
    RankFiles,
    check_client_state,
    check_optimizer_state,
    check_scheduler,
    read_file,
    safe_loading,
    write_file,
)
from wavemare.engine.checkpoint.manifest import checksum
from wavemare.engine.checkpoint.random_state import random_state, restore_random_state
from wavemare.errors import CheckpointError


def state():
    """What DeepSpeed's files hold: views, shared storages, modules' states, its own objects."""
    torch.manual_seed(3)
    flat = torch.randn(100)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    weight = torch.nn.Parameter(torch.randn(2, 3))
    marked = torch.randn(2)
    marked.ds_id, marked.whole = "3_4", flat
    return {
        "marked": marked,
        "views": [flat[10:20], flat.view(10, 10).t(), flat],
        "tied": (weight, weight),
        "module": module.state_dict(),
        "leaf": torch.randn(3, requires_grad=True),
        "other": {"a": OrderedDict(b=torch.arange(4)), "scaler": LossScaler(8.0), "none": None},
        "types": [torch.ones(2, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(True)],
        "step": 7,
        "text": "caf\u00e9",
    }


def as_saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("zipped", [True, False])
def test_the_record_is_of_what_torch_save_writes(tmp_path, zipped):
    value, file = state(), tmp_path / "file.pt"
    record = write_file(value, str(file), zipped=zipped)
    content = file.read_bytes()
    assert record.bytes == len(content)
    assert record.xxh3 == xxhash.xxh3_64(content).hexdigest()
    assert record == checksum(file)
    if zipped:
        assert content == as_saved(value)
    found = read_file(file)
    assert torch.equal(found["views"][1], value["views"][1])
    assert found["other"]["scaler"].cur_scale == 8.0


def test_a_copy_is_written_as_the_original_would_have_been(tmp_path):
    value = state()
    before = as_saved(value)
    files = RankFiles(0, background=True)
    files.take(value, str(tmp_path / "file.pt"))
    with torch.no_grad():
        for tensor in [*value["views"], *value["tied"], *value["module"].values(), value["leaf"]]:
            tensor.zero_()
    value["step"] = 8
    files.write_queued()
    assert (tmp_path / "file.pt").read_bytes() == before
    assert files.written[str(tmp_path / "file.pt")] == checksum(tmp_path / "file.pt")


@pytest.mark.parametrize("size", [1, 10_000_000])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(size, zipped):
    with pytest.raises(OSError, match="No space left"):
        write_file({"weight": torch.zeros(size)}, "/dev/full", zipped=zipped)


@pytest.mark.parametrize("background", [False, True])
def test_the_first_error_is_kept_and_nothing_is_written_after_it(tmp_path, background):
    files = RankFiles(3, background=background)
    files.take({"a": torch.zeros(10)}, str(tmp_path / "one.pt"))
    files.take({"a": torch.zeros(20)}, "/dev/full")
    files.take({"a": torch.zeros(30)}, str(tmp_path / "three.pt"))
    assert (tmp_path / "one.pt").exists() is not background
    files.write_queued()
    report = json.loads(json.dumps(files.report()))
    assert list(report["written"]) == [str(tmp_path / "one.pt")]
    assert report["failure"] == "rank 3 could not write full (No space left on device)"
    assert not (tmp_path / "three.pt").exists()


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def write_pickle(value, path):
    Path(path).write_bytes(pickle.dumps(value))


def test_deepspeeds_scripts_are_told_that_a_file_holds_a_part(tmp_path):
    files = CheckpointFiles()
    for part in (None, "its experts are divided over the ranks"):
        files.part = part
        path = tmp_path / f"mp_rank_0{int(part is None)}_model_states.pt"
        module, shapes = {"a": torch.ones(2)}, [{"a": torch.Size([2])}]
        kept = {"module": module, "buffer_names": [], "shared_params": {}, "param_shapes": shapes}
        files.save(kept, str(path))
        if part is None:
            assert parse_model_states([path])[0].param_shapes == shapes
        else:
            assert torch.equal(files.load(str(path))["module"]["a"], module["a"])
            with refuses(CheckpointError, "zero_to_fp32", "a checkpoint of parts"):
                parse_model_states([path])


@pytest.mark.parametrize(
    "save",
    [
        torch.save,
        write_pickle,
        lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
    ],
)
def test_no_code_of_a_file_is_run(tmp_path, save):
    marker, file = tmp_path / "marker", tmp_path / "evil.pt"
    save({"module": Evil(marker)}, file)
    with refuses(CheckpointError, "checkpoint", str(file)):
        read_file(file)
    # As DeepSpeed loads parts of a universal checkpoint, past its checkpoint engine.
    with refuses(CheckpointError, "checkpoint", str(file)), safe_loading(file):
        torch.load(file, weights_only=False)
    assert not marker.exists()
    if save is torch.save:  # the file is one that would
        torch.load(file, weights_only=False)
        assert marker.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no file of torch", as_saved([1])[:90]])
def test_what_is_no_file_of_torch_is_named(tmp_path, content):
    (tmp_path / "file.pt").write_bytes(content)
    with refuses(CheckpointError, "checkpoint", str(tmp_path / "file.pt")) as caught:
        read_file(tmp_path / "file.pt")
    assert caught.value.value == str(tmp_path / "file.pt")


class Own:
    """A client's."""


def test_loads_are_safe_in_their_thread_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    environment, load = dict(os.environ), torch.load
    own, scaler = tmp_path / "own.pt", tmp_path / "scaler.pt"
    torch.save({"own": Own()}, own)
    torch.save({"scaler": LossScaler(2.0)}, scaler)
    with safe_loading(tmp_path), ThreadPoolExecutor(1) as pool:
        with refuses(CheckpointError, "checkpoint", str(own)):
            torch.load(own, weights_only=False)
        assert torch.load(scaler, weights_only=False)["scaler"].cur_scale == 2.0
        other = pool.submit(torch.load, own, weights_only=False)
        assert isinstance(other.result(60)["own"], Own)
        assert os.environ == environment
    assert isinstance(torch.load(own, weights_only=False)["own"], Own)
    assert torch.load is load
    assert os.environ == environment


def test_classes_that_the_client_has_named_are_read(tmp_path):
    torch.save({"own": Own(), "scaler": LossScaler(2.0)}, tmp_path / "own.pt")
    with refuses(CheckpointError, "checkpoint", str(tmp_path / "own.pt")):
        read_file(tmp_path / "own.pt")
    with torch.serialization.safe_globals([Own, LossScaler]), safe_loading(tmp_path):
        assert isinstance(read_file(tmp_path / "own.pt")["own"], Own)
        # What is inside another one does not end it.
        assert isinstance(torch.load(tmp_path / "own.pt", weights_only=False)["own"], Own)
    with refuses(CheckpointError, "checkpoint", str(tmp_path / "own.pt")):
        read_file(tmp_path / "own.pt")


class ByGetattr:
    """Written as Python 3.11.0 to 3.11.3 write a member of an enumeration."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_members_of_enumerations_are_read_by_their_names(tmp_path):
    path = tmp_path / "states.pt"
    torch.save({"zero_stage": ByGetattr(ZeroStageEnum, "gradients")}, path)
    assert read_file(path) == {"zero_stage": ZeroStageEnum.gradients}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ZeroStageEnum, "__class__"),
        (ZeroStageEnum, "mro"),
        (torch.Tensor, "__init__"),
        (LossScaler, "__dict__"),
        (ByGetattr(ZeroStageEnum, "gradients"), "real"),
    ],
)
def test_no_other_attribute_is_looked_up(tmp_path, kind, name):
    path = tmp_path / "states.pt"
    torch.save({"zero_stage": ByGetattr(kind, name)}, path)
    with refuses(CheckpointError, "checkpoint", str(path)):
        read_file(path)


CLIENT_STATES = [
    {
        "loss": np.float32(0.5),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "big": np.float64(1e300),
    },
    {
        "array": np.arange(6.0).reshape(2, 3),
        "halves": np.ones(2, np.float16),
        "names": np.array(["a"]),
    },
    {"random": random.getstate(), "numpy": np.random.get_state()},
    {"bits": np.random.default_rng(1).bit_generator.state, "torch": torch.get_rng_state()},
    {"args": argparse.Namespace(lr=0.1, out=Path("a/b")), "more": SimpleNamespace(x=[1])},
    {"at": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "for": datetime.timedelta(3)},
    {"counts": Counter("aab"), "order": OrderedDict(b=1), "set": {1, 2}},
]


@pytest.mark.parametrize("state", CLIENT_STATES)
def test_what_a_client_keeps_comes_back(tmp_path, state):
    check_client_state(state)
    write_file(state, str(tmp_path / "x.pt"))
    found = read_file(tmp_path / "x.pt")
    assert repr(found) == repr(state)


@dataclass
class Progress:
    epoch: int


KINDS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


@pytest.fixture
def generator_of_numpy():
    before = np.random.get_bit_generator()
    yield lambda kind: np.random.set_bit_generator(getattr(np.random, kind)(3))
    np.random.set_bit_generator(before)


@pytest.mark.parametrize("kind", KINDS)
def test_random_generators_go_on(tmp_path, generator_of_numpy, kind):
    def draw():
        numbers = [np.random.rand(), np.random.standard_normal(), random.random()]
        return [*numbers, random.gauss(0, 1), torch.rand(1).item()]

    generator_of_numpy(kind)
    draw()  # numpy and Python keep a second Gaussian
    write_file(random_state(), str(tmp_path / "a.pt"))
    expected = draw()
    draw()
    restore_random_state(read_file(tmp_path / "a.pt"))
    assert draw() == expected
    generator_of_numpy("PCG64" if kind == "MT19937" else "MT19937")
    with refuses(CheckpointError, "numpy.random", "PCG64" if kind == "MT19937" else "MT19937"):
        restore_random_state(read_file(tmp_path / "a.pt"))
    generator_of_numpy(kind)  # as the remedy says
    restore_random_state(read_file(tmp_path / "a.pt"))
    assert draw() == expected


SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
    lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, scale_fn=lambda x: x),
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
    lambda o: transformers.get_cosine_schedule_with_warmup(o, 1, 3),
    WarmupLR,
    lambda o: WarmupCosineLR(o, 9),
    lambda o: OneCycle(o, 0.1, 0.2),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_states_of_schedulers_come_back(tmp_path, make):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["params"][0].sum().backward()
    scheduler = make(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(1.0) if "Plateau" in type(scheduler).__name__ else scheduler.step()
    check_scheduler(scheduler)
    check_optimizer_state(optimizer)
    write_file(scheduler.state_dict(), str(tmp_path / "a.pt"))
    assert read_file(tmp_path / "a.pt") == scheduler.state_dict()


class OwnLR(torch.optim.lr_scheduler.LambdaLR):
    """Keeps an object in its state."""

    def __init__(self, optimizer):
        self.progress = Progress(3)
        super().__init__(optimizer, lambda step: 1.0)


def test_a_scheduler_whose_state_would_not_come_back_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with refuses(CheckpointError, "lr_scheduler.state_dict()['progress']"):
        check_scheduler(OwnLR(optimizer))
    with torch.serialization.safe_globals([Progress]):  # as the remedy says
        check_scheduler(OwnLR(optimizer))


def test_an_optimizer_whose_state_would_not_come_back_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    check_optimizer_state(optimizer)
    check_optimizer_state(None)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"own": Progress(3)}
    with refuses(CheckpointError, "optimizer.state"):
        check_optimizer_state(optimizer)


@pytest.mark.parametrize(
    "value",
    [
        [Progress(3)],
        defaultdict(int, a=1),
        np.random.default_rng(1),
        np.array([Progress(3)]),
        lambda: 3,
        threading.Lock(),
    ],
)
def test_what_would_not_come_back_is_refused_by_its_key(value):
    with refuses(CheckpointError, "client_state['own']", value) as caught:
        check_client_state({"fine": 3, "own": value})
    assert "add_safe_globals" in caught.value.remedy
