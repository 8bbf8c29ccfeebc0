# SPDX-License-Identifier: Apache-2.0
"""A recipe's command line, also in Megatron's spellings, and the configuration that it makes."""

import json
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest

from wavemare.engine.config.resolve import check_batch_sizes, check_config
from wavemare.errors import ConfigError, DataError
from wavemare.recipes.bert.finetune import FinetuneArguments as Classification
from wavemare.recipes.bert.finetune import check_options
from wavemare.recipes.gpt.finetune import FinetuneArguments
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.recipes.llama.sft import SftArguments
from wavemare.training.arguments import parse_arguments
from wavemare.training.config import resolve_config
from wavemare.training.models import load_chat_model, load_classifier, read_model_config

CONFIG = str(files("wavemare.recipes") / "gpt" / "finetune.json")

SIZES = (
    *("num-layers", "hidden-size", "num-attention-heads", "max-position-embeddings"),
    "make-vocab-size-divisible-by",
)
WARMUP = {"warmup_num_steps", "warmup_type", "warmup_min_lr", "warmup_max_lr"}


def parsed(line, kind=PretrainArguments):
    return parse_arguments(kind, ["--deepspeed_config", CONFIG, *line.split()])


def test_a_megatron_command_line(tmp_path):
    arguments = parsed(
        "--num-layers 6 --hidden-size 64 --num-attention-heads 8 --max-position-embeddings 512 "
        "--seq-length 256 --micro-batch-size 2 --global-batch-size 24 --train-iters 300 --lr 6e-4 "
        "--min-lr 6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.02 --weight-decay 0.05 "
        "--clip-grad 0.5 --pipeline-model-parallel-size 3 --data-path 0.3 a 0.7 b --split 969,30,1 "
        "--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2 --save-interval 50 "
        "--log-interval 7 --eval-interval 60 --eval-iters 10 --bf16 --deepspeed "
        "--tensorboard-dir boards --wandb-project sea --tokenizer-type GPT2BPETokenizer "
        "--vocab-file bpe/vocab.json --merge-file bpe/merges.txt --prompt hello",
    )
    assert arguments.max_steps == 300
    assert arguments.sequence_length == 256
    assert arguments.data == "0.3 a 0.7 b"
    assert arguments.split == "969,30,1"
    assert (arguments.save_interval, arguments.log_interval, arguments.eval_interval) == (50, 7, 60)
    assert arguments.tokenizer == "bpe"
    assert (arguments.prompt, arguments.eval_iters) == ("hello", 10)
    assert parsed("--eval-iters 0").eval_interval == sys.maxsize
    config = resolve_config(arguments)
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["train_batch_size"] == 24
    assert config["optimizer"]["params"] == {"lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.05}
    assert config["gradient_clipping"] == 0.5
    assert config["scheduler"]["type"] == "WarmupCosineLR"
    assert config["scheduler"]["params"]["cos_min_ratio"] == pytest.approx(0.1)
    assert config["scheduler"]["params"]["warmup_num_steps"] == 6
    assert config["bf16"] == {"enabled": True}
    assert config["tensorboard"] == {"enabled": True, "output_path": "boards"}
    assert config["wandb"] == {"enabled": True, "project": "sea"}
    assert config["wavemare"] == {
        "pipeline": {"stages": 3, "partition": "compute", "inputs": ["input_ids"]},
        "tensor_parallel": {"size": 2},
        "watchdog": {"folder": str(Path("runs/gpt-pretrain/watchdog").resolve())},
    }
    check_config(config, world_size=6)
    assert check_batch_sizes(config, data_world_size=1)["gradient_accumulation_steps"] == 12
    alone = resolve_config(parsed("--micro-batch-size 2 --pipeline-model-parallel-size 2"))
    assert check_batch_sizes(alone, data_world_size=3)["train_batch_size"] == 6
    assert arguments.padded(4000, 2) == 4096
    assert arguments.padded(4097, 2) == 4352  # a multiple of 128 * 2
    for kind, sizes in (
        ("gpt2", {"n_layer": 6, "n_embd": 64, "n_head": 8, "n_positions": 512}),
        (
            "bert",
            {
                "num_hidden_layers": 6,
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_attention_heads": 8,
                "max_position_embeddings": 512,
            },
        ),
    ):
        (tmp_path / "model.json").write_text(json.dumps({"model_type": kind}))
        found = read_model_config(str(tmp_path / "model.json"), 256, arguments)
        assert found == {"model_type": kind, **sizes}


@pytest.mark.parametrize(
    ("words", "chunks"),
    [
        ("--num-virtual-stages-per-pipeline-rank 3", 3),
        ("--num-layers 12 --num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers 12 --num-layers-per-virtual-pipeline-stage 4", None),
    ],
)
def test_virtual_stages_of_megatron_are_interleaved(words, chunks):
    config = resolve_config(parsed(f"--pipeline-model-parallel-size 3 {words}"))
    found = config["wavemare"]["pipeline"]
    interleaved = {"schedule": "interleaved", "chunks": chunks} if chunks else {}
    assert found == {"stages": 3, "partition": "compute", "inputs": ["input_ids"]} | interleaved


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "cannot share None layers"),
        ("--num-layers 4", "cannot share 4 layers"),
        ("--num-layers 16", r"Give --num-layers a multiple of 6, or give --num-virtual"),
        ("--num-virtual-stages-per-pipeline-rank 2", "says the same"),
    ],
)
def test_impossible_virtual_stages_are_refused(words, said):
    given = f"--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 3 {words}"
    with pytest.raises(ConfigError, match=said) as refused:
        resolve_config(parsed(given))
    assert str(refused.value).startswith("--num-layers-per-virtual-pipeline-stage = 2")


def test_a_written_list_of_cuts_is_kept_for_the_model_to_refuse(tmp_path):
    values = json.loads(Path(CONFIG).read_text())
    values["wavemare"]["pipeline"]["partition"] = [0, 5]
    (tmp_path / "ds.json").write_text(json.dumps(values))
    for words in ("--num-layers 2", "--pipeline-model-parallel-size 3"):
        line = ["--deepspeed_config", str(tmp_path / "ds.json"), *words.split()]
        found = resolve_config(parse_arguments(PretrainArguments, line))
        assert found["wavemare"]["pipeline"]["partition"] == [0, 5]


def test_one_stage_is_no_pipeline():
    assert "pipeline" not in resolve_config(parsed("--pipeline-model-parallel-size 1"))["wavemare"]


def test_without_them_only_schedules_are_filled_in_and_told(capfd):
    arguments = parsed("--max_steps 300 --save-interval 5 --data corpus.txt --output x")
    assert (arguments.max_steps, arguments.data) == (300, "corpus.txt")
    config, expected = resolve_config(arguments), json.loads(Path(CONFIG).read_text())
    expected["scheduler"]["params"] |= {"total_num_steps": 300, "warmup_num_steps": 30}
    expected["wavemare"]["watchdog"] = {"folder": str(Path("x/watchdog").resolve())}
    assert config == expected
    told = capfd.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in told] == [
        ["scheduler.params.total_num_steps auto", "300"],
        ["scheduler.params.warmup_num_steps auto", "30"],
    ]
    assert arguments.padded(4001, 2) == 4001


def test_the_command_line_of_the_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe", "--deepspeed_config", CONFIG, "--max_steps", "7"])
    assert parse_arguments(PretrainArguments).max_steps == 7
    monkeypatch.setattr(sys, "argv", ["recipe"])
    with pytest.raises(ConfigError, match=r"--deepspeed_config.*missing"):
        parse_arguments(PretrainArguments)


@pytest.mark.parametrize(
    ("style", "kind", "keys"),
    [("linear", "WarmupDecayLR", {"total_num_steps"}), ("constant", "WarmupLR", set())],
)
def test_schedules(style, kind, keys):
    scheduler = resolve_config(parsed(f"--lr-decay-style {style} --lr=0.5"))["scheduler"]
    assert scheduler["type"] == kind
    assert scheduler["params"].keys() == keys | WARMUP
    assert scheduler["params"]["warmup_max_lr"] == 0.5
    with pytest.raises(ConfigError, match=r"--min-lr.*no lowest rate.*cosine"):
        resolve_config(parsed(f"--lr-decay-style {style} --min-lr 0.1"))


@pytest.mark.parametrize(
    ("words", "steps", "first"),
    [
        ("--lr-warmup-fraction 0.02", 6, 0.0),
        ("--lr-warmup-iters 7", 7, 0.0),
        ("--lr-warmup-fraction 0", 1, 0.5),
        ("--lr-warmup-iters 0 --lr-decay-style cosine", 1, 1.0),
    ],
)
def test_warmup_is_linear_as_in_megatron(words, steps, first):
    words = f"--lr-decay-style linear --lr 0.5 --max_steps 300 {words}"
    params = resolve_config(parsed(words))["scheduler"]["params"]
    assert (params["warmup_num_steps"], params["warmup_type"]) == (steps, "linear")
    assert params.get("warmup_min_lr", params.get("warmup_min_ratio")) == first
    with pytest.raises(ConfigError, match=r"--lr-warmup-iters.*says the same"):
        resolve_config(parsed("--lr-warmup-iters 1 --lr-warmup-fraction 0.1"))


def test_a_model_from_a_folder_has_its_own_size():
    with pytest.raises(ConfigError, match=r"--hidden-size.*no such option"):
        parsed("--hidden-size 8", FinetuneArguments)
    arguments = parsed("--train-iters 3 --vocab-file bpe/vocab.json", FinetuneArguments)
    assert (arguments.max_steps, arguments.tokenizer) == (3, "bpe")
    with pytest.raises(ConfigError, match=r"--split.*no Megatron data"):
        check_options(parsed("--split 9,1", Classification))


@pytest.mark.parametrize(
    ("option", "folder", "kind"),
    [
        *((f"--{name} 2", "--model folder", Classification) for name in SIZES),
        ("--model_config model.json", "--model folder", Classification),
        *((f"--vocab_size {size}", "--model folder", Classification) for size in (300, 4096)),
        *(
            (f"--vocab_size {size}", "--tokenizer folder", PretrainArguments)
            for size in (300, 4096)
        ),
        ("--vocab-size 300", "--vocab-file bpe/vocab.json", PretrainArguments),
    ],
)
def test_what_a_folder_has_of_its_own_is_refused_by_the_name_of_its_option(option, folder, kind):
    parsed(option, kind)
    with pytest.raises(ConfigError) as caught:
        parsed(f"{option} {folder}", kind)
    name, value = option.split()
    parsed(f"{caught.value.key} {value}", kind)  # there is such an option
    assert caught.value.key.replace("_", "-") == name.replace("_", "-")
    parsed(folder, kind)  # without it, as the remedy says


def test_a_tokenizer_of_its_own_has_the_size_that_is_given():
    assert parsed("").trained_vocabulary == 4096
    assert parsed("--vocab_size 300").trained_vocabulary == 300


NO_CORPUS = SimpleNamespace(label_names=("a", "b"))
LOADERS = {
    "bert/finetune": (Classification, lambda args: load_classifier(args, NO_CORPUS, {}, 1)),
    "llama/sft": (SftArguments, load_chat_model),
}


@pytest.mark.parametrize("recipe", [*LOADERS])
def test_a_tokenizer_is_refused_by_the_option_that_names_it(recipe, tmp_path):
    kind, load = LOADERS[recipe]
    with pytest.raises(DataError) as caught:
        load(parsed(f"--model {tmp_path}", kind))
    assert parsed(f"{caught.value.key} other", kind).model == "other"


def test_load_resumes_where_there_is_a_checkpoint(tmp_path):
    both = f"--save {tmp_path} --load {tmp_path}"
    arguments = parsed(both)
    assert (arguments.output, arguments.resume) == (str(tmp_path), False)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").touch()
    assert parsed(both).resume
    assert not parsed(f"--save {tmp_path}").resume
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    with pytest.raises(ConfigError, match=r"--load.*of Megatron.*wavemare convert"):
        parsed(both)
