# SPDX-License-Identifier: Apache-2.0
"""Damage to a checkpoint is found before anything is loaded."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.refusals import refuses
from wavemare.engine.checkpoint import compatibility as checkpoint_checks
from wavemare.engine.checkpoint.compatibility import (
    check_checkpoint_fits,
    check_optimizer,
    resize_refusal,
)
from wavemare.engine.checkpoint.manifest import (
    MANIFEST,
    as_tag,
    checksum,
    complete_tags,
    keep_last,
    read_manifest,
    resolve_tag,
    verify_contents,
)
from wavemare.engine.config.resolve import WavemareConfig, check_config
from wavemare.engine.optim.policy import POLICY
from wavemare.errors import CheckpointError, ConfigError
from wavemare.optim import SOAP, Muon

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


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"1234"),
        lambda file: file.write_bytes(b"123456789"),
        lambda file: file.unlink(),
    ],
)
def test_a_file_cut_short_is_named_with_another_checkpoint_to_use(checkpoints, damage):
    file = checkpoints / "step-2" / "weights.pt"
    damage(file)
    with refuses(CheckpointError, "checkpoint", str(file)) as caught:
        read_manifest(checkpoints / "step-2")
    assert "step-1" in caught.value.remedy


@pytest.mark.parametrize(
    "content",
    ['{"files": {', '{"files": {"weights.pt": {"bytes": 8}}}', '{"files": {}, "format": "new"}'],
)
def test_a_broken_manifest_is_damage(checkpoints, content):
    (checkpoints / "step-2" / MANIFEST).write_text(content)
    with refuses(
        CheckpointError, "checkpoint", str(checkpoints / "step-2" / "wavemare.json")
    ) as caught:
        read_manifest(checkpoints / "step-2")
    assert "'step-1'" in caught.value.remedy
    assert complete_tags(checkpoints) == ["step-1"]


def test_a_manifest_of_a_later_version_is_refused(checkpoints):
    content = json.dumps({"format": 3, "files": {"weights.pt": 8}})
    (checkpoints / "step-2" / MANIFEST).write_text(content)
    with refuses(CheckpointError, "checkpoint", str(checkpoints / "step-2" / "wavemare.json")):
        read_manifest(checkpoints / "step-2")


def test_a_checkpoint_of_stock_deepspeed_has_no_manifest(checkpoints):
    (checkpoints / "step-1" / MANIFEST).unlink()
    assert read_manifest(checkpoints / "step-1") is None


def test_a_tag_that_is_not_there_names_those_that_are(checkpoints):
    with refuses(CheckpointError, "checkpoint", str(checkpoints / "step-3")) as caught:
        resolve_tag(checkpoints, "step-3")
    assert "['step-1', 'step-2']" in caught.value.remedy


@pytest.mark.parametrize("tag", [5, Path("a/b"), "a b", "step[1]", "ünï", "-x", "latest-1"])
def test_what_a_save_takes_as_a_tag_a_load_finds(tmp_path, tag):
    (tmp_path / as_tag(tag)).mkdir(parents=True)
    assert resolve_tag(tmp_path, tag) == str(tag)
    (tmp_path / "latest").write_text(as_tag(tag))
    assert resolve_tag(tmp_path, None) == str(tag)


TAGS = ["", ".", "..", ".a", "a/../b", "/a", "a/", "a//b", "latest", "latest/a", " a", "a\n", "a\0"]


@pytest.mark.parametrize("tag", TAGS)
def test_what_is_no_tag(tmp_path, tag):
    for use in (as_tag, lambda tag: resolve_tag(tmp_path, tag)):
        with refuses(CheckpointError, "tag", tag):
            use(tag)


def test_no_checkpoint_at_all_is_none_as_in_deepspeed(tmp_path):
    assert resolve_tag(tmp_path, None) is None


def check_topology(monkeypatch, folder, saved, current):
    """Check a checkpoint against an engine of another topology, or of the same."""
    engine = SimpleNamespace(
        module=SimpleNamespace(parts=current["cuts"]),
        num_stages=current["pipe"],
        dp_world_size=current["data"],
        mp_world_size=current["model"] * current["pipe"],
        zero_optimization_stage=lambda: current["zero_stage"],
        layout=None,
        settings=WavemareConfig.of({}),
        has_moe_layers=False,
        zero_nvme_offload_optimizer=lambda: False,
        bfloat16_enabled=lambda: True,
    )
    engine.module.parameters = list
    monkeypatch.setattr(checkpoint_checks.dist, "get_world_size", lambda: current["world_size"])
    return check_checkpoint_fits(folder, {"topology": saved}, engine, whole=True)


@pytest.mark.parametrize("key", ["world_size", "data"])
def test_without_zero_the_number_of_replicas_does_not_matter(checkpoints, monkeypatch, key):
    saved = {**TOPOLOGY, "zero_stage": 0}
    folder = checkpoints / "step-2"
    assert not check_topology(monkeypatch, folder, saved, {**saved, key: 99})
    assert check_topology(monkeypatch, folder, saved, {**saved, "pipe": 1})
    (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()  # each has its part
    assert check_topology(monkeypatch, folder, saved, {**saved, key: 99})


@pytest.mark.parametrize("key", TOPOLOGY)
def test_another_topology_is_brought_to_this_one_unless_layers_are_split(
    checkpoints, monkeypatch, key
):
    changed = [0, 99] if key == "cuts" else 99
    folder = checkpoints / "step-2"
    for model in (1, 2):
        saved = {**TOPOLOGY, "model": model}
        if model == 1 and key != "model":
            assert check_topology(monkeypatch, folder, saved, {**saved, key: changed})
            continue
        with refuses(CheckpointError, "checkpoint", str(folder)) as caught:
            check_topology(monkeypatch, folder, saved, {**saved, key: changed})
        assert f"{key} {saved[key]}" in caught.value.reason
        assert f"{key} {changed}" in caught.value.reason
        converts = "-m wavemare.universal --input_folder" in caught.value.remedy
        assert converts == (key != "zero_stage")


@pytest.mark.parametrize("key", ["experts", "replicas"])
def test_experts_and_replicas_keep_their_numbers(key):
    saved = {**TOPOLOGY, key: 2}
    assert resize_refusal(saved, {**saved, "pipe": 1}) is not None
    assert resize_refusal(TOPOLOGY, saved) is not None
    assert resize_refusal(TOPOLOGY, {**TOPOLOGY, "pipe": 1}) is None


def make(folder, tag, saved, sizes=(8,), runs=("run 1",)):
    """Make a checkpoint as a save leaves it; return its folder."""
    own = folder / tag
    own.mkdir(parents=True)
    files = {}
    for number, size in enumerate(sizes):
        file = own / f"rank_{number}.pt"
        file.write_bytes(bytes(range(number, number + 1)) * size)
        files[file.name] = vars(checksum(file))
    content = {"format": 2, "saved": saved, "topology": TOPOLOGY, "files": files}
    content |= {"runs": list(runs)} if runs else {}
    (own / MANIFEST).write_text(json.dumps(content))
    return own


@pytest.fixture
def three(tmp_path):
    """Three checkpoints; the newest by time is the first by name."""
    for tag, hour in (("b", 8), ("c", 9), ("a", 10)):
        make(tmp_path, tag, f"2026-01-02T{hour:02}:00:00.000000+00:00", (5, 9, 2, 7))
    (tmp_path / "latest").write_text("a")
    return tmp_path


@pytest.mark.parametrize("position", [0, 4, 8])
def test_a_flipped_byte_is_found_and_the_newest_other_one_named(three, position):
    file = three / "a" / "rank_1.pt"
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)
    manifest = read_manifest(three / "a")  # the sizes are right
    with refuses(CheckpointError, "checkpoint", str(file)) as caught:
        verify_contents(three / "a", manifest)
    assert caught.value.value == str(file)
    assert "tag 'c'" in caught.value.remedy
    (three / "c" / "rank_0.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        verify_contents(three / "a", manifest)
    assert "tag 'b'" in caught.value.remedy


def test_a_file_that_a_pattern_would_find_is_refused_and_a_note_is_not(three):
    (three / "a" / "README").write_text("mine")
    read_manifest(three / "a")
    (three / "a" / "rank_9.pt").write_text("")
    with refuses(CheckpointError, "checkpoint", str(three / "a" / "rank_9.pt")) as caught:
        read_manifest(three / "a")
    assert caught.value.value.endswith("rank_9.pt")


def test_a_list_of_sizes_alone_is_still_read(checkpoints):
    verify_contents(checkpoints / "step-2", read_manifest(checkpoints / "step-2"))


def test_the_newest_stay_and_nothing_of_others_is_removed(three):
    (three / "foreign").mkdir()
    (three / "foreign" / "weights.pt").write_bytes(b"1")
    damaged = make(three, "damaged", "2020", (4,))
    (damaged / "rank_0.pt").write_bytes(b"")
    make(three, ".hidden", "2019")
    make(three, "of another engine", "2018", runs=["run 1", "run 3"])
    make(three, "of an older version", "2017", runs=None)
    assert complete_tags(three)[:3] == ["a", "c", "b"]
    own = ["run 1", "run 2"]
    assert keep_last(three, 2, "a", own) == ["b"]
    others = [".hidden", "damaged", "foreign", "latest", "of an older version", "of another engine"]
    assert sorted(path.name for path in three.iterdir()) == sorted(["a", "c", *others])
    assert keep_last(three, 1, "c", own) == []  # of the two one is the newest, and one is named
    shutil.rmtree(three / "a")
    assert keep_last(three, 1, "c", own) == []


def test_a_broken_latest_names_what_is_there(three):
    make(three, ".d.partial", "2026")
    (three / "latest").write_text("no")
    with refuses(CheckpointError, "checkpoint", str(three / "no")) as caught:
        resolve_tag(three, None)
    assert "['a', 'b', 'c']" in caught.value.remedy


@pytest.mark.parametrize("background", [True, False])
def test_two_writers_in_the_background_are_refused(background):
    config = {"wavemare": {"checkpoint": {"background": background}}}
    check_config({**config, "checkpoint": {"load_universal": True}}, world_size=1)
    refused = refuses(ConfigError, "checkpoint.writer", {"type": "fast"})
    with refused if background else nullcontext():
        check_config({**config, "checkpoint": {"writer": {"type": "fast"}}}, world_size=1)


def engine_of(kind, policy, **settings):
    pipemare = {"schedule": "pipemare", "pipemare": {"optimizer_policy": policy}}
    return SimpleNamespace(
        basic_optimizer=kind([torch.nn.Parameter(torch.ones(2, 2))], **settings),
        settings=WavemareConfig.of({"wavemare": {"pipeline": pipemare}}),
    )


@pytest.mark.parametrize("policys", [SOAP, Muon])
@pytest.mark.parametrize(
    ("kind", "settings"), [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {})]
)
def test_the_remedy_for_states_of_another_optimizer_than_the_policys_works(
    tmp_path, policys, kind, settings
):
    saver = engine_of(kind, "keep", **settings)
    state = {"optimizer": saver.basic_optimizer.state_dict()}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    with refuses(CheckpointError, "checkpoint", str(tmp_path)) as caught:
        check_optimizer(tmp_path, engine_of(policys, "auto"))
    assert POLICY in caught.value.remedy
    check_optimizer(tmp_path, saver)
    with refuses(CheckpointError, "checkpoint", str(tmp_path)):  # "keep" alone does not do
        check_optimizer(tmp_path, engine_of(torch.optim.NAdam, "keep"))
