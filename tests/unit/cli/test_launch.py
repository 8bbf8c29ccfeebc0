# SPDX-License-Identifier: Apache-2.0
"""What ranks are told of this machine."""

import pytest

from wavemare.cli import launch
from wavemare.engine.launch import devices as found


@pytest.fixture
def torch_version(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return lambda version: monkeypatch.setattr(found.metadata, "version", lambda _: version)


def test_cpu_is_said_outright_unless_the_user_has_set_it(torch_version, monkeypatch):
    torch_version("2.13.0+cpu")
    assert launch.extra_environment() == {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert launch.extra_environment() == {"DS_ACCELERATOR": "cpu"}
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    assert launch.extra_environment() == {}


@pytest.mark.parametrize("devices", [[], ["/dev/nvidia0"]])
def test_device_files_decide_with_a_torch_for_gpus(torch_version, monkeypatch, devices):
    torch_version("2.13.0+cu130")
    matches = {"/dev/nvidia[0-9]*": devices}
    monkeypatch.setattr(found.glob, "glob", lambda pattern: matches.get(pattern, []))
    assert found.accelerator_visible() is bool(devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found.accelerator_visible() is False
