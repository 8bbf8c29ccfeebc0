# SPDX-License-Identifier: Apache-2.0
"""The state of megatron-core's optimizer as a universal checkpoint of DeepSpeed."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from support.refusals import refuses
from wavemare.errors import CheckpointError, ModelError
from wavemare.megatron import open_checkpoint
from wavemare.megatron.convert import Options, convert
from wavemare.megatron.optimizer import write_universal

DATA = Path(__file__).parents[2] / "data" / "megatron"
TRAINED = DATA / "llama-optimizer"
TOKENS, PADDED, HEADS, GROUPS, SIZE = 62, 64, 4, 2, 4
WEIGHTS = 2 * 9 + 3  # of two layers, and beside them


def read(folder, *names):
    """Read tensors as torch does."""
    reader = dcp.FileSystemReader(folder)
    described = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(described[name].size) for name in names}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return [state[name] for name in names]


def grouped_rows(part):
    """Yield the rows of Megatron's joint matrix in which query, key or value stand."""
    each = HEADS // GROUPS * SIZE
    for group in range(GROUPS):
        first = group * (each + 2 * SIZE)
        if part == "q":
            yield from range(first, first + each)
        elif part == "k":
            yield from range(first + each, first + each + SIZE)
        else:
            yield from range(first + each + SIZE, first + each + 2 * SIZE)


def test_the_optimizers_state_becomes_a_universal_checkpoint(tmp_path):
    """Against rows that this test picks one by one from what torch reads."""
    tag = write_universal(open_checkpoint(TRAINED), tmp_path / "universal")
    assert (tmp_path / "universal" / "latest_universal").read_text() == tag
    assert sorted(path.name for path in (tmp_path / "universal").iterdir()) == [
        tag,
        "latest_universal",
    ]
    zero = tmp_path / "universal" / tag / "zero"
    step = TRAINED / "iter_0000008"
    for kind, theirs in (("fp32", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        prefix = f"optimizer.state.{theirs}"
        qkv, up, embedding = read(
            step,
            f"{prefix}.decoder.layers.self_attention.linear_qkv.weight",
            f"{prefix}.decoder.layers.mlp.linear_fc1.weight",
            f"{prefix}.embedding.word_embeddings.weight",
        )
        assert len(embedding) == PADDED
        expected = {"model.embed_tokens.weight": embedding[:TOKENS], "0.embedding.weight": None}
        for layer in range(2):
            for part in "qkv":
                rows = [qkv[layer, row] for row in grouped_rows(part)]
                name = f"self_attn.{part}_proj.weight"
                expected[f"model.layers.{layer}.{name}"] = torch.stack(rows)
            half = len(up[layer]) // 2
            expected[f"model.layers.{layer}.mlp.gate_proj.weight"] = up[layer, :half]
            expected[f"model.layers.{layer}.mlp.up_proj.weight"] = up[layer, half:]
            expected[f"{layer + 1}.block.mlp.up_proj.weight"] = up[layer, half:]  # in stages
        expected["0.embedding.weight"] = expected["model.embed_tokens.weight"]
        for name, value in expected.items():
            found = torch.load(zero / name / f"{kind}.pt")["param"]
            assert found.dtype == torch.float32
            assert torch.equal(found, value), name
    assert float(torch.load(zero / "lm_head.weight" / "step.pt")) == 3
    rest = torch.load(tmp_path / "universal" / tag / "mp_rank_00_model_states.pt")
    assert (rest["global_steps"], rest["global_samples"]) == (8, 64)
    assert rest["consumed_train_samples"] == 64
    groups = torch.load(zero / "optimizer_state.pt")["param_groups"]
    # Weight decay is not the same in Megatron's two groups, so the engine's own stays.
    assert all(group == {"lr": 1e-3, "params": []} for group in groups)


def flat(folder):
    """Write a checkpoint as Megatron's default does: flat buckets of the optimizer's state."""
    shutil.copytree(TRAINED, folder)
    step = folder / "iter_0000008"
    names = [
        name
        for name, each in dcp.FileSystemReader(step).read_metadata().state_dict_metadata.items()
        if not name.startswith("optimizer.") and hasattr(each, "size")
    ]
    state = dict(zip(names, read(step, *names), strict=True))
    state["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"] = torch.zeros(128)
    for file in step.glob("*.distcp"):
        file.unlink()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(step), planner=planner, no_dist=True)
    return folder


@pytest.mark.parametrize("case", ["none", "flat"])
def test_an_optimizers_state_that_cannot_be_taken_is_refused(case, tmp_path):
    folder = DATA / "llama-tp2" if case == "none" else flat(tmp_path / "flat")
    opened = open_checkpoint(folder)
    with pytest.raises(CheckpointError) as caught:
        write_universal(opened, tmp_path / "out")
    assert caught.value.key == "optimizer"
    assert "--dist-ckpt-optim-fully-reshardable" in caught.value.remedy
    assert not (tmp_path / "out").exists()


def contents(folder):
    """The bytes of all files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def killed(target, last):
    """Convert in a process that is killed when it has written a half of so many files."""
    child = os.fork()
    if not child:
        save, saved = torch.save, []

        def dying(value, file):
            save(value, file)
            saved.append(file)
            if len(saved) == last:
                os.truncate(file, file.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        torch.save = dying
        convert(TRAINED, target, "universal")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not target.exists()
    return target.parent / f".{target.name}.partial" / "global_step8"


@pytest.mark.parametrize("last", [1, 4, 5, 42, 85])
def test_a_killed_conversion_goes_on(tmp_path, last):
    """What stands is kept: its files stay the same ones."""
    zero = killed(tmp_path / "target", last) / "zero"
    standing = {path.name: path.stat().st_ino for path in zero.glob("*.weight")}
    own = {name for name in standing if name.startswith(("model.", "lm_head."))}
    assert len(own) == min((last - 1) // 4, WEIGHTS)
    convert(TRAINED, tmp_path / "target", "universal")
    convert(TRAINED, tmp_path / "whole", "universal")
    assert contents(tmp_path / "target") == contents(tmp_path / "whole")
    zero = tmp_path / "target" / "global_step8" / "zero"
    assert {name: (zero / name).stat().st_ino for name in own} == {n: standing[n] for n in own}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "whole"]


def test_a_damaged_part_of_a_killed_conversion_is_found(tmp_path):
    zero = killed(tmp_path / "target", 42) / "zero"
    file = zero / "model.embed_tokens.weight" / "exp_avg_sq.pt"
    state = torch.load(file)
    state["param"].view(-1)[3] += 1
    torch.save(state, file)
    with refuses(ModelError, "weights", "model.embed_tokens.weight"):
        convert(TRAINED, tmp_path / "target", "universal")
    assert not list(tmp_path.iterdir())


def test_another_vocabulary_begins_anew(tmp_path):
    killed(tmp_path / "target", 42)
    convert(TRAINED, tmp_path / "target", "universal", Options(vocab_size=PADDED))
    convert(TRAINED, tmp_path / "whole", "universal", Options(vocab_size=PADDED))
    assert contents(tmp_path / "target") == contents(tmp_path / "whole")
