"""Bad input ends soon, with one message on one rank, and damages nothing on disk."""

import json
import shutil
import struct

import numpy as np
import pytest

MEGATRON_HEADER = struct.Struct("<9sQBQQ")


@pytest.fixture
def refused(command, small_options, recipe_config, tmp_path):
    """Start pretraining with something wrong, and return the message that it ends with."""
    output = tmp_path / "run"
    output.mkdir()
    (output / "summary.json").write_text("of an older run")

    def run(*, config=None, words=None, engine="zero", **changes):
        file = tmp_path / "config.json"
        values = json.loads(recipe_config("gpt/pretrain", engine).read_text())
        file.write_text(json.dumps({**values, **(config or {})}))
        options = small_options("gpt", output, **changes)
        start = words or ["wavemare", "train", "gpt", "--config", file]
        ended = command(*start, *options, timeout=100)
        assert ended.code not in (0, 1), ended.output
        assert ended.output.count("error") == 1, ended.output
        assert "Traceback" not in ended.output
        assert (output / "summary.json").read_text() == "of an older run"
        assert not list(output.rglob("*.tmp"))
        return ended.output[ended.output.index("error") :]

    return run


def indexed(folder, tokens, *, cut=0, magic=b"MMIDIDX\x00\x00"):
    """Write Megatron data of two documents; ``cut`` bytes are missing at the index's end."""
    tokens = np.asarray(tokens, dtype="<u2")
    half = len(tokens) // 2
    lengths = np.array([half, len(tokens) - half], dtype="<i4")
    pointers = np.array([0, half * 2], dtype="<i8")
    bounds = np.array([0, 1, 2], dtype="<i8")
    index = MEGATRON_HEADER.pack(magic, 1, 8, 2, 3)
    index += lengths.tobytes() + pointers.tobytes() + bounds.tobytes()
    (folder / "corpus.bin").write_bytes(tokens.tobytes())
    (folder / "corpus.idx").write_bytes(index[: len(index) - cut])
    return folder / "corpus"


@pytest.fixture(scope="session")
def tokenizer_folder(text_folder, tmp_path_factory):
    from wavemare.data import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [file.read_text() for file in text_folder.glob("*.txt")]
    train_tokenizer(texts, 300, kind="gpt").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """Folder for the one run whose checkpoints the tests damage."""
    return tmp_path_factory.mktemp("saved") / "run"


@pytest.fixture
def checkpoints(saved_run, command, small_options, recipe_config):
    """Whole checkpoints of the steps 2 and 4."""
    if not saved_run.exists():
        config = recipe_config("gpt/pretrain", "zero")
        options = small_options("gpt", saved_run, max_steps=4, save_interval=2, eval_interval=4)
        command("wavemare", "train", "gpt", "--config", config, *options).check()
    return saved_run / "checkpoints"


def cut_short(checkpoints, run):
    """Copy checkpoints to another run, the newest with a file that lacks its last byte."""
    shutil.copytree(checkpoints, run / "checkpoints")
    file = max((run / "checkpoints" / "step-000004").glob("*.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    return file.name


def test_every_refusal_comes_within_two_seconds_of_start_up(
    launch, checkpoints, small_options, recipe_config, tokenizer_folder, tmp_path
):
    config = recipe_config("gpt/pretrain", "zero")
    cut_short(checkpoints, tmp_path / "damaged")
    (tmp_path / "empty.txt").write_text("")
    for name in ("cut", "beyond"):
        (tmp_path / name).mkdir()
    changed = {
        "batch": {"train_batch_size": 30},
        "unknown key": {"wavemare": {"pipeline": {"stagse": 2}}},
    }
    for name, change in changed.items():
        values = {**json.loads(config.read_text()), **change}
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    cases = {
        "missing file": {"data": tmp_path / "absent.txt"},
        "empty corpus": {"data": tmp_path / "empty.txt"},
        "corrupt index": {
            "data": indexed(tmp_path / "cut", range(200), cut=5),
            "tokenizer": tokenizer_folder,
        },
        "batch": {},
        "unknown key": {},
        "sequence": {"sequence_length": 65},
        "token": {
            "data": indexed(tmp_path / "beyond", [1, 2, 3, 999] * 100),
            "tokenizer": tokenizer_folder,
        },
        "checkpoint": {"resume": True, "output": tmp_path / "damaged"},
    }
    words = {
        case: [
            "--deepspeed_config",
            str(tmp_path / f"{case}.json" if case in changed else config),
            *small_options("gpt", **{"output": tmp_path / "run", **options}),
        ]
        for case, options in cases.items()
    }
    (tmp_path / "cases.json").write_text(json.dumps(words))
    finished = launch("refusals.py", tmp_path / "cases.json").check()
    for rank in range(2):
        results = finished.result(rank)
        assert results.keys() == cases.keys()
        for case, result in results.items():
            assert result["seconds"] < 2, (case, result)


def test_a_missing_file(refused, tmp_path):
    message = refused(data=tmp_path / "absent.txt")
    assert "--data" in message
    assert "absent.txt" in message


def test_an_empty_corpus(refused, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    message = refused(data=tmp_path / "empty.txt")
    assert "--data" in message
    assert "empty" in message


@pytest.mark.parametrize(
    ("damage", "found"),
    [({"cut": 5}, "bytes"), ({"magic": b"NOTMEGATR"}, "magic")],
)
def test_a_corrupt_index(refused, tokenizer_folder, tmp_path, damage, found):
    prefix = indexed(tmp_path, range(200), **damage)
    message = refused(data=prefix, tokenizer=tokenizer_folder)
    assert "corpus.idx" in message
    assert found in message
    assert " where " in message  # found where expected


def test_a_batch_triple_that_does_not_multiply(refused):
    message = refused(config={"train_batch_size": 30})
    assert "train_batch_size = 30" in message
    assert "8 x 1 x 2 = 16" in message


def test_a_run_without_a_launcher(refused, recipe_config):
    config = recipe_config("gpt/pretrain", "zero")
    words = ["python", "-m", "wavemare.recipes.gpt.pretrain", "--deepspeed_config", config]
    message = refused(words=words)
    assert "without a launcher" in message
    assert "wavemare train" in message


def test_an_unknown_key(refused):
    message = refused(config={"wavemare": {"pipeline": {"stagse": 2}}})
    assert "wavemare.pipeline.stagse" in message
    assert "Did you mean 'stages'?" in message


def test_a_sequence_longer_than_the_model(refused):
    message = refused(sequence_length=65)
    assert "--sequence_length = 65" in message
    assert "64 positions" in message


def test_a_token_id_beyond_the_vocabulary(refused, tokenizer_folder, tmp_path):
    prefix = indexed(tmp_path, [1, 2, 3, 400] * 100)
    message = refused(data=prefix, tokenizer=tokenizer_folder)
    assert "token 400" in message
    assert "300" in message


def test_cuts_that_do_not_fit_the_model(refused):
    section = {"pipeline": {"stages": 2, "partition": [0, 40]}}
    message = refused(config={"wavemare": section}, engine="pipeline")
    assert "wavemare.pipeline.partition" in message


def test_a_checkpoint_that_was_cut_short(refused, checkpoints, tmp_path):
    name = cut_short(checkpoints, tmp_path / "run")
    message = refused(resume=True)
    assert name in message
    assert "bytes instead of" in message
    assert "step-000002" in message


def test_resuming_where_nothing_was_saved(refused):
    message = refused(resume=True)
    assert "--resume" in message
    assert "no checkpoint" in message


def test_an_unknown_option(refused):
    message = refused(max_stepz=4)
    assert "--max_stepz" in message
    assert "Did you mean 'max_steps'?" in message


def test_a_prompt_that_the_model_cannot_go_on_from(refused):
    assert "--prompt" in refused(prompt="")
