"""Damage to a checkpoint is found before anything is loaded."""

import json

import pytest

from wavemare.engine.checkpoint_checks import _check_topology
from wavemare.engine.manifest import MANIFEST, read_manifest, resolve_tag
from wavemare.errors import CheckpointError

TOPOLOGY = {"world_size": 2, "data": 1, "pipe": 2, "model": 1, "zero_stage": 1, "cuts": [0, 3, 6]}


@pytest.fixture
def checkpoints(tmp_path):
    for tag in ("step-1", "step-2"):
        folder = tmp_path / tag
        folder.mkdir()
        (folder / "weights.pt").write_bytes(b"12345678")
        content = {"topology": TOPOLOGY, "files": {"weights.pt": 8}}
        (folder / MANIFEST).write_text(json.dumps(content))
    (tmp_path / "latest").write_text("step-2")
    return tmp_path


def test_a_whole_checkpoint_is_accepted(checkpoints):
    assert resolve_tag(checkpoints, None) == "step-2"
    assert resolve_tag(checkpoints, "step-1") == "step-1"
    assert read_manifest(checkpoints / "step-2")["topology"] == TOPOLOGY


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.write_bytes(b"1234"), "has 4 bytes instead of 8"),
        (lambda file: file.write_bytes(b"123456789"), "has 9 bytes instead of 8"),
        (lambda file: file.unlink(), "is missing"),
    ],
)
def test_a_file_cut_short_is_named_with_another_checkpoint_to_use(checkpoints, damage, reason):
    damage(checkpoints / "step-2" / "weights.pt")
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_manifest(checkpoints / "step-2")
    assert caught.value.value.endswith("weights.pt")
    assert "step-1" in caught.value.remedy


def test_a_broken_manifest_is_damage(checkpoints):
    (checkpoints / "step-2" / MANIFEST).write_text('{"files": {')
    with pytest.raises(CheckpointError, match="not a list of files"):
        read_manifest(checkpoints / "step-2")


def test_a_checkpoint_of_stock_deepspeed_has_no_manifest(checkpoints):
    (checkpoints / "step-1" / MANIFEST).unlink()
    assert read_manifest(checkpoints / "step-1") is None


def test_a_tag_that_is_not_there_names_those_that_are(checkpoints):
    with pytest.raises(CheckpointError, match="no such folder") as caught:
        resolve_tag(checkpoints, "step-3")
    assert "['step-1', 'step-2']" in caught.value.remedy


def test_no_checkpoint_at_all_is_none_as_in_deepspeed(tmp_path):
    assert resolve_tag(tmp_path, None) is None


@pytest.mark.parametrize("key", ["world_size", "data"])
def test_without_zero_the_number_of_replicas_does_not_matter(checkpoints, key):
    saved = {**TOPOLOGY, "zero_stage": 0}
    _check_topology(checkpoints / "step-2", saved, {**saved, key: 99})
    with pytest.raises(CheckpointError):
        _check_topology(checkpoints / "step-2", saved, {**saved, "pipe": 1})


@pytest.mark.parametrize("key", TOPOLOGY)
def test_another_topology_is_refused_naming_both(checkpoints, key):
    current = {**TOPOLOGY, key: 99}
    with pytest.raises(CheckpointError, match="it was saved by the topology") as caught:
        _check_topology(checkpoints / "step-2", TOPOLOGY, current)
    assert f"{key} {TOPOLOGY[key]}" in caught.value.reason
    assert f"{key} 99" in caught.value.reason
    assert "ds_to_universal" in caught.value.remedy
