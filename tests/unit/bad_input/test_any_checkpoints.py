# SPDX-License-Identifier: Apache-2.0
"""Whatever has happened to a file of a checkpoint: what it holds, or a `CheckpointError`."""

import io
from collections import OrderedDict

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from fuzz_strategies import FUZZ, damaged, refusal
from hypothesis import given
from hypothesis import strategies as st

from wavemare.engine.checkpoint.files import read_file, safe_loading
from wavemare.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


def saved(zipped):
    """The bytes of a small file with all kinds of things that DeepSpeed's have."""
    content = {
        "module": OrderedDict(weight=torch.arange(6.0).view(2, 3).t(), empty=torch.zeros(0)),
        "leaf": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "scaler": LossScaler(8.0),
        "zero_stage": ZeroStageEnum.gradients,
        "others": [None, True, -1, 2**40, 0.5, "caf\u00e9", (1, 2), {3}, b"bytes"],
    }
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


FILES = {"zip": saved(zipped=True), "legacy": saved(zipped=False)}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "states.pt"


def examine(file, content):
    """Read a file; return whether it could be. Any other error than ours is a finding."""
    file.write_bytes(content)
    error = refusal(read_file, CheckpointError, file)
    if error is not None:
        assert (error.key, error.value) == ("checkpoint", str(file))
        assert error.reason.startswith("the file cannot be read")
        assert str(error).isprintable()
    return error is None


@pytest.mark.parametrize("kind", FILES)
@FUZZ
@given(data=st.data())
def test_damaged_files(file, kind, data):
    examine(file, data.draw(damaged(FILES[kind])))


@FUZZ
@given(st.binary(max_size=40).map(lambda tail: b"\x80\x02" + tail))
def test_any_pickle(file, content):
    examine(file, content)


def test_a_pickle_with_a_name_of_any_length(file):
    assert not examine(file, b"\x80\x02c\x1b[2J" + 5000 * b"x" + b"\nname\n.")


RAISED = [
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ValueError("no value"),
    KeyError(3),
    IndexError("pop from empty list"),
    TypeError("no type"),
    AssertionError(),
    AttributeError("no attribute"),
    RecursionError("too deep"),
    OSError(5, "Input/output error"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_every_error_of_a_load_past_our_engine_names_its_file(file, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(CheckpointError) as caught, safe_loading(file.parent):
        torch.load(str(file), weights_only=False)  # as DeepSpeed does for a universal checkpoint
    assert caught.value.value == str(file)
    assert caught.value.__cause__ is error
    with pytest.raises(CheckpointError) as caught, safe_loading(file.parent):
        torch.load(io.BytesIO(), weights_only=False)
    assert caught.value.value == str(file.parent)
    assert torch.load is fail
