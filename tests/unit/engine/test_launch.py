# SPDX-License-Identifier: Apache-2.0
"""A run without a launcher is refused; compiled parts are off unless asked for."""

import pytest

from wavemare.engine.launch import compiled_ops_enabled, ensure_launched
from wavemare.errors import LaunchError

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@pytest.fixture
def bare(monkeypatch):
    for name in (*TORCH, *(name for names in MPI for name in names)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_no_launcher_is_refused_with_the_commands_that_work(bare):
    with pytest.raises(LaunchError, match="without a launcher") as caught:
        ensure_launched()
    for launcher in ("wavemare train", "deepspeed", "torchrun", "mpirun", "srun"):
        assert launcher in caught.value.remedy


@pytest.mark.parametrize("names", [TORCH, *MPI])
def test_each_launchers_variables_are_enough(bare, names):
    for name in names:
        bare.setenv(name, "0" if name.endswith(("RANK", "PROCID")) else "1")
    ensure_launched()


def test_one_missing_variable_is_named(bare):
    for name in TORCH[1:]:
        bare.setenv(name, "1")
    with pytest.raises(LaunchError, match="RANK not set"):
        ensure_launched()


@pytest.mark.parametrize(("value", "enabled"), [(None, False), ("0", False), ("1", True)])
def test_compiled_parts_are_off_by_default(monkeypatch, value, enabled):
    monkeypatch.delenv("WAVEMARE_COMPILED_OPS", raising=False)
    if value is not None:
        monkeypatch.setenv("WAVEMARE_COMPILED_OPS", value)
    assert compiled_ops_enabled() is enabled
