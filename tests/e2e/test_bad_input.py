# SPDX-License-Identifier: Apache-2.0
"""Bad input ends with one message on one rank, and damages nothing on disk.

Whole commands show that there is one message and which code; what it says is asked of ranks that
meet all mistakes one after the other.
"""

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

    def run(*, config=None, words=None, **changes):
        file = tmp_path / "config.json"
        values = json.loads(recipe_config("gpt/pretrain", "zero").read_text())
        file.write_text(json.dumps({**values, **(config or {})}))
        options = small_options("gpt", output, **changes)
        start = words or ["wavemare", "train", "gpt", "--config", file]
        ended = command(*start, *options)
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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("bad")


@pytest.fixture
def checkpoints(place, recipe, small_options, recipe_config):
    """Whole checkpoints of the steps 2 and 4."""
    if not (place / "saved").exists():
        config = recipe_config("gpt/pretrain", "zero")
        options = small_options("gpt", place / "saved", max_steps=4, save_interval=2)
        recipe("gpt/pretrain", "--deepspeed_config", config, *options).check()
    return place / "saved" / "checkpoints"


def cut_short(checkpoints, run):
    """Copy checkpoints to another run, the newest with a file that lacks its last byte."""
    shutil.copytree(checkpoints, run / "checkpoints", dirs_exist_ok=True)
    file = max((run / "checkpoints" / "step-000004").glob("*.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    return file.name


def cases_in(place, tokenizer):
    """Return changed options and changed keys by case; their files are made."""
    (place / "empty.txt").write_text("")
    (place / "shares.json").write_text("{}")
    data = {}
    for case, tokens, damage in (
        ("cut", range(200), {"cut": 5}),
        ("magic", range(200), {"magic": b"NOTMEGATR"}),
        ("beyond", [1, 2, 3, 400] * 100, {}),
    ):
        (place / case).mkdir(exist_ok=True)
        prefix = indexed(place / case, tokens, **damage)
        data[case] = ({"data": prefix, "tokenizer": tokenizer}, {})
    return {
        **data,
        "absent": ({"data": place / "absent.txt"}, {}),
        "empty": ({"data": place / "empty.txt"}, {}),
        "batch": ({}, {"train_batch_size": 30}),
        "key": ({}, {"wavemare": {"pipeline": {"stagse": 2}}}),
        "cuts": ({}, {"wavemare": {"pipeline": {"stages": 2, "partition": [0, 40]}}}),
        "sequence": ({"sequence_length": 65}, {}),
        "checkpoint": ({"resume": True}, {}),
        "nothing saved": ({"resume": True}, {}),
        "option": ({"max_stepz": 4}, {}),
        "prompt": ({"prompt": ""}, {}),
        "plan": ({"balance": place / "shares.json"}, {}),
    }


@pytest.fixture
def told(place, checkpoints, launch_once, small_options, recipe_config, tokenizer_folder):
    """Return what each of two ranks says of a case."""
    file = place / "cases.json"
    if not file.exists():
        words = {}
        for case, (options, keys) in cases_in(place, tokenizer_folder).items():
            run = place / "runs" / case
            run.mkdir(parents=True)
            (run / "summary.json").write_text("of an older run")
            config = recipe_config("gpt/pretrain", "pipeline" if case == "cuts" else "zero")
            (run / "ds.json").write_text(json.dumps({**json.loads(config.read_text()), **keys}))
            words[case] = ["--deepspeed_config", str(run / "ds.json")]
            words[case] += small_options("gpt", **{"output": run, **options})
        cut_short(checkpoints, place / "runs" / "checkpoint")
        file.write_text(json.dumps(words))

    def of(case):
        run = place / "runs" / case
        found = [rank[case] for rank in launch_once("refusals.py", "gpt.pretrain", file)]
        assert (run / "summary.json").read_text() == "of an older run"
        assert not list(run.rglob("*.tmp"))
        return found

    return of


CASES = [
    ("absent", ["--data", "absent.txt"]),
    ("empty", ["--data", "empty"]),
    ("cut", ["corpus.idx", "bytes", " where "]),  # found where expected
    ("magic", ["corpus.idx", "magic", " where "]),
    ("beyond", ["token 400", "300"]),
    ("batch", ["train_batch_size = 30", "8 x 1 x 2 = 16"]),
    ("key", ["wavemare.pipeline.stagse", "Did you mean 'stages'?"]),
    ("cuts", ["wavemare.pipeline.partition"]),
    ("sequence", ["--sequence_length = 65", "64 positions"]),
    ("checkpoint", [".pt", "bytes instead of", "step-000002"]),
    ("nothing saved", ["--resume", "no checkpoint"]),
    ("option", ["--max_stepz", "Did you mean 'max_steps'?"]),
    ("prompt", ["--prompt"]),
    ("plan", ["--balance", "version"]),
]


@pytest.mark.parametrize(("case", "words"), CASES, ids=[case for case, _ in CASES])
def test_a_refusal_says_what_is_wrong_on_every_rank(told, case, words):
    for found in told(case):
        for word in words:
            assert word in found["message"]


def test_a_checkpoint_that_was_cut_short(refused, checkpoints, tmp_path):
    """The ranks have met by then: the first that fails speaks for all."""
    name = cut_short(checkpoints, tmp_path / "run")
    message = refused(resume=True)
    assert name in message
    assert "bytes instead of" in message


@pytest.mark.nightly
def test_a_run_without_a_launcher(refused, recipe_config):
    config = recipe_config("gpt/pretrain", "zero")
    words = ["python", "-m", "wavemare.recipes.gpt.pretrain", "--deepspeed_config", config]
    message = refused(words=words)
    assert "without a launcher" in message
    assert "wavemare train" in message


def test_an_unknown_key(refused):
    """It is refused before any rank is started."""
    message = refused(config={"wavemare": {"pipeline": {"stagse": 2}}})
    assert "wavemare.pipeline.stagse" in message
