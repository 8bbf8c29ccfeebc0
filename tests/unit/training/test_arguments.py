# SPDX-License-Identifier: Apache-2.0
"""A recipe's command line, also in Megatron's spellings, and the configuration that it makes."""

import ast
import json
import sys
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from support.refusals import refuses
from wavemare.engine.config.resolve import check_batch_sizes, check_config
from wavemare.errors import CheckpointError, ConfigError, DataError
from wavemare.recipes.bert.finetune import FinetuneArguments as Classification
from wavemare.recipes.bert.pretrain import PretrainArguments as BertArguments
from wavemare.recipes.gpt.finetune import FinetuneArguments
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.recipes.llama.dpo import DpoArguments
from wavemare.recipes.llama.pretrain import PretrainArguments as LlamaArguments
from wavemare.recipes.llama.sft import SftArguments
from wavemare.training.arguments import parse_arguments
from wavemare.training.config import resolve_config
from wavemare.training.megatron import TABLE
from wavemare.training.models import (
    check_model,
    load_chat_model,
    make_or_load_classifier,
    model_config_of,
    read_model_config,
)
from wavemare.training.preferences import load_pair_model
from wavemare.training.text import find_data

CONFIG = str(files("wavemare.recipes") / "gpt" / "finetune.json")

SIZES = ["num-layers", "hidden-size", "num-attention-heads", "max-position-embeddings"]
SIZES.append("make-vocab-size-divisible-by")
WARMUP = {"warmup_num_steps", "warmup_type", "warmup_min_lr", "warmup_max_lr"}


def parsed(line, kind=PretrainArguments):
    return parse_arguments(kind, ["--deepspeed_config", CONFIG, *line.split()])


RECIPES = {
    "gpt/pretrain": PretrainArguments,
    "gpt/finetune": FinetuneArguments,
    "llama/pretrain": LlamaArguments,
    "llama/sft": SftArguments,
    "llama/dpo": DpoArguments,
    "bert/pretrain": BertArguments,
    "bert/finetune": Classification,
}


PROGRAMS = {"gpt/finetune": "gpt/pretrain"}  # whose program it runs


@pytest.mark.parametrize("name", RECIPES)
def test_each_option_is_read(name):
    """By the recipe, or by a helper of recipes."""
    helpers = Path(str(files("wavemare.training"))).glob("*.py")
    read = {
        node.attr
        for file in (
            Path(str(files("wavemare.recipes"))) / f"{PROGRAMS.get(name, name)}.py",
            *helpers,
        )
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    own = {field.name for field in fields(RECIPES[name])} - TABLE.keys()
    assert own - read == {"local_rank"}  # the launcher gives it, and the environment says the same


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
    wrong = {"model_type": "gpt2", "num_layers": 4, "of_mine": 3}
    (tmp_path / "model.json").write_text(json.dumps(wrong))
    with refuses(ConfigError, "--model_config: num_layers", 4):
        read_model_config(str(tmp_path / "model.json"), 256)


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
    "words",
    ["", "--num-layers 4", "--num-layers 16", "--num-virtual-stages-per-pipeline-rank 2"],
)
def test_impossible_virtual_stages_are_refused(words):
    given = f"--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 3 {words}"
    with refuses(ConfigError, "--num-layers-per-virtual-pipeline-stage", 2):
        resolve_config(parsed(given))


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
    with refuses(ConfigError, "--deepspeed_config", None):
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
    with refuses(ConfigError, "--min-lr", 0.1):
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
    with refuses(ConfigError, "--lr-warmup-iters", 1):
        resolve_config(parsed("--lr-warmup-iters 1 --lr-warmup-fraction 0.1"))


def test_a_model_from_a_folder_has_its_own_size(tmp_path):
    tiny = {**SIZES_OF_LLAMA, "num_key_value_heads": 2, "intermediate_size": 128}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **tiny))
    model.save_pretrained(tmp_path)
    own = f"--model {tmp_path} --seq-length 64 --attention-dropout 0.5"
    check_model(parsed(f"{own} {LLAMA}", FinetuneArguments))
    for words, name in (
        ("--num-layers 3", "--num-layers"),
        ("--hidden-size 32 --ffn-hidden-size 128", "--hidden-size"),
        ("--qk-layernorm", "--qk-layernorm"),
        ("--rotary-base 20000", "--rotary-base"),
        ("--num-attention-heads 8", "--num-attention-heads"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_model(parsed(f"{own} {words}", FinetuneArguments))
        assert caught.value.key == name
        check_model(parsed(f"{own} {words} --use-checkpoint-args", FinetuneArguments))
    arguments = parsed("--train-iters 3 --vocab-file bpe/vocab.json", FinetuneArguments)
    assert (arguments.max_steps, arguments.tokenizer) == (3, "bpe")
    with refuses(ConfigError, "--split", "9,1"):
        find_data(parsed("--split 9,1", Classification))


@pytest.mark.parametrize(
    ("option", "folder", "kind"),
    [
        *((f"--{name} 2", "--model folder", Classification) for name in SIZES),
        ("--model_config model.json", "--model folder", Classification),
        *((f"--vocab_size {size}", "--model folder", Classification) for size in (300, 4096)),
        ("--vocab_size 300", "--tokenizer folder", PretrainArguments),
        ("--vocab_size 4096", "--tokenizer folder", PretrainArguments),
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
    "bert/finetune": (Classification, lambda args: make_or_load_classifier(args, NO_CORPUS, 1)),
    "llama/sft": (SftArguments, lambda args: load_chat_model(args, packs=True)),
    "llama/dpo": (DpoArguments, load_pair_model),
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
    described = {"arguments": {"num_layers": 7, "swiglu": True, "lr": 0.5}}
    (tmp_path / "config.json").write_text(json.dumps({"configuration": described}))
    again = parsed(f"{both} --use-checkpoint-args --num-layers 8 --hidden-size 64")
    assert (again.num_layers, again.swiglu, again.hidden_size) == (7, True, None)
    assert again.lr is None
    for option in ("--finetune", "--no-load-optim"):
        with pytest.raises(ConfigError) as caught:
            parsed(f"{both} {option}")
        assert caught.value.key == option


def test_where_there_is_no_checkpoint(tmp_path, capfd):
    """The run starts from the beginning and says so, if something else describes the model."""
    absent, other = tmp_path / "absent", tmp_path / "other"
    both = f"--save {absent} --load {absent}/"
    arguments = parsed(both)
    assert (Path(arguments.output), arguments.resume) == (absent, False)
    assert f"no checkpoint in {absent}" in capfd.readouterr().err
    for words, kind in (
        (f"{both} --use-checkpoint-args", PretrainArguments),
        ("--use-checkpoint-args", PretrainArguments),
        (f"{both} --use-checkpoint-args", FinetuneArguments),
    ):
        with pytest.raises(ConfigError) as caught:
            parsed(words, kind)
        assert caught.value.key == "--use-checkpoint-args"
    parsed(f"{both} --use-checkpoint-args --model folder", FinetuneArguments)
    with pytest.raises(CheckpointError) as caught:  # and no run goes on in the other folder
        parsed(f"--load {absent} --save {other} --use-checkpoint-args")
    assert (caught.value.key, caught.value.value) == ("--load", str(absent))
    (absent / "checkpoints").mkdir(parents=True)
    (absent / "checkpoints" / "latest").touch()
    assert parsed(both).resume
    with pytest.raises(ConfigError) as caught:
        parsed(f"--load {absent} --save {other}")
    assert caught.value.key == "--load"


def test_a_checkpoint_of_megatron_is_started_from(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    (theirs / "iter_0000010").mkdir(parents=True)
    (theirs / "latest_checkpointed_iteration.txt").write_text("10")
    (theirs / "iter_0000010" / "metadata.json").touch()
    for folder in (theirs, theirs / "iter_0000010"):
        for words in (f"--load {folder}", f"--pretrained-checkpoint {folder} --load {ours}"):
            arguments = parsed(f"{words} --save {ours} --finetune --no-load-optim")
            found = (arguments.pretrained_checkpoint, arguments.output, arguments.resume)
            assert found == (str(folder), str(ours), False)
    assert parsed(f"--load {theirs}").output == PretrainArguments.output
    same = f"--load {theirs} --save {theirs}"
    assert parsed(same).output == str(theirs)
    (theirs / "checkpoints").mkdir()
    (theirs / "checkpoints" / "latest").touch()  # a run of wavemare has begun there
    assert parsed(same).resume
    assert parsed(same).pretrained_checkpoint == str(theirs)
    empty = f"--load {ours} --exit-on-missing-checkpoint"
    for words, key in (
        (empty, "--load"),
        (f"--pretrained-checkpoint {ours}", "--pretrained-checkpoint"),
    ):
        with pytest.raises(CheckpointError) as caught:
            parsed(words)
        assert caught.value.key == key
    for words in (f"--load {theirs} --save {ours}", f"--save-megatron {ours}"):
        with pytest.raises(ConfigError) as caught:
            parsed(words, Classification)
        assert caught.value.key == words.split()[0]


# As users of Megatron-LM have them, with small sizes.
OF_ALL = (
    "--use-mcore-models --transformer-impl transformer_engine --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--global-batch-size 16 --train-samples 64 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine "
    "--lr-warmup-samples 16 --lr-decay-samples 64 --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0 --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --sequence-parallel --attention-backend auto "
    "--distributed-timeout-minutes 60 --log-interval 1 --log-throughput --ckpt-format torch_dist "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 "
    "--recompute-granularity selective --recompute-modules core_attn mlp --no-load-rng "
)
LLAMA = (
    "--ffn-hidden-size 128 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --rotary-base 10000 "
    "--rotary-percent 1.0 --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--untie-embeddings-and-output-weights --init-method-std 0.01 --norm-epsilon 1e-6 "
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 "
)
SIZES_OF_LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
OF_LLAMA = {
    **SIZES_OF_LLAMA,
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
OF_MIXTRAL = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LISTS = {
    "gpt-3": (
        "--attention-dropout 0.1 --hidden-dropout 0.2 --init-method-std 0.006 --openai-gelu",
        "gpt2",
        {
            **SIZES_OF_LLAMA,
            "n_inner": None,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.2,
            "embd_pdrop": 0.2,
            "initializer_range": 0.006,
            "activation_function": "gelu_new",
        },
    ),
    "llama-2": (LLAMA, "llama", {**OF_LLAMA, "mlp_bias": False, "attention_bias": False}),
    "llama-3": (
        LLAMA.replace("10000", "500000")
        + "--use-rope-scaling --rope-scaling-factor 32 --kv-channels 8",
        "llama",
        {**OF_LLAMA, "head_dim": 8, "rope_parameters": SCALED},
    ),
    "qwen2": (f"{LLAMA} --add-qkv-bias --no-rope-fusion", "qwen2", OF_LLAMA | {"head_dim": None}),
    "mistral": (
        f"{LLAMA} --window-size (31,0)",
        "mistral",
        OF_LLAMA | {"sliding_window": 32},
    ),
    "qwen3": (f"{LLAMA} --qk-layernorm --kv-channels 32", "qwen3", OF_LLAMA | {"head_dim": 32}),
    "mixtral": (LLAMA + EXPERTS, "mixtral", OF_LLAMA | OF_MIXTRAL),
    "qwen3-moe": (
        f"{LLAMA} {EXPERTS} --qk-layernorm --moe-ffn-hidden-size 32 "
        "--moe-router-score-function softmax --moe-layer-freq 1",
        "qwen3_moe",
        {
            **OF_LLAMA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.01,
            "output_router_logits": True,
        },
    ),
    "qwen2-moe": (
        f"{LLAMA} {EXPERTS} --add-qkv-bias --moe-ffn-hidden-size 32 --moe-router-pre-softmax "
        "--moe-shared-expert-intermediate-size 96",
        "qwen2_moe",
        {"shared_expert_intermediate_size": 96, "norm_topk_prob": False, "qkv_bias": True},
    ),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("recipe", ["gpt", "llama"])
def test_lists_of_megatron_describe_models(name, recipe):
    words, family, expected = LISTS[name]
    if (name, recipe) == ("gpt-3", "llama"):  # whose own model has a gate, for which is no option
        return
    arguments = parsed(OF_ALL + words, PretrainArguments if recipe == "gpt" else LlamaArguments)
    values = model_config_of(arguments)
    assert values["model_type"] == family
    config = transformers.AutoConfig.for_model(**values)
    for key, value in expected.items():
        found = getattr(config, key, None)
        assert found == value or (isinstance(value, dict) and value.items() <= found.items()), key
    made = resolve_config(arguments)
    assert (arguments.max_steps, made["scheduler"]["params"]["warmup_num_steps"]) == (4, 1)
    assert made["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert made["optimizer"]["params"]["eps"] == 1e-8
    assert made["zero_optimization"]["stage"] == 1
    assert made["wavemare"]["watchdog"]["timeout_s"] == 3600
    size = made["wavemare"].get("expert_parallel")
    assert size == ({"size": 2} if "num-experts" in words else None)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--swiglu", "--position-embedding-type"),
        (LLAMA.replace("--swiglu", ""), "--swiglu"),
        (LLAMA.replace("RMSNorm", "LayerNorm"), "--normalization"),
        (LLAMA.replace("--disable-bias-linear", "--qk-layernorm"), "--add-qkv-bias"),
        (LLAMA.replace("dropout 0.0", "dropout 0.1"), "--hidden-dropout"),
        (LLAMA.replace("percent 1.0", "percent 0.5"), "--rotary-percent"),
        (LLAMA.replace("--group-query-attention", ""), "--num-query-groups"),
        (f"{LLAMA} --moe-router-topk 2", "--moe-router-topk"),
        (f"{LLAMA} {EXPERTS} --moe-layer-freq 2", "--moe-layer-freq"),
        (f"{LLAMA} --multi-latent-attention", "--multi-latent-attention"),
        (f"{LLAMA} --window-size 127,1", "--window-size"),
        (f"{LLAMA} --window-size 127", "--window-size"),
        ("--fp8-format hybrid", "--fp8-format"),
        ("--context-parallel-size 2", "--context-parallel-size"),
        ("--rampup-batch-size 32 32 1000", "--rampup-batch-size"),
        ("--train-samples 100", "--train-samples"),
        ("--num-layer 2", "--num-layer"),  # Megatron takes no beginnings of names either
        ("--num-layers=0", "--num_layers"),
        ("--optimizer muon", "--optimizer"),
        ("--lr-decay-iters 10", "--lr-decay-iters"),
        ("--data-parallel-sharding-strategy all", "--data-parallel-sharding-strategy"),
        ("--tokenizer-type SentencePieceTokenizer", "--tokenizer-type"),
    ],
)
def test_what_is_not_done_is_refused_by_its_option(words, key):
    def run():
        arguments = parsed(words)
        resolve_config(arguments)
        model_config_of(arguments)

    with pytest.raises(ConfigError) as caught:
        run()
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("--optimizer sgd --sgd-momentum 0.5", "optimizer.type", "SGD"),
        ("--optimizer sgd --sgd-momentum 0.5", "optimizer.params.momentum", 0.5),
        ("--optimizer adam", "optimizer.type", "AdamW"),
        ("--data-parallel-sharding-strategy optim_grads", "zero_optimization.stage", 2),
        ("--use-torch-fsdp2", "zero_optimization.stage", 3),
        ("--fp16 --initial-loss-scale 65536", "fp16.initial_scale_power", 16),
        ("--fp16 --loss-scale-window 500 --hysteresis 4", "fp16.hysteresis", 4),
        ("--async-save", "wavemare.checkpoint.background", True),
        ("--lr-decay-iters 900", "scheduler.params.total_num_steps", 900),
        ("--weight-decay=0.0", "optimizer.params.weight_decay", 0.0),
        (
            "--expert-model-parallel-size 2 --tensor-model-parallel-size 4",
            "wavemare.expert_parallel.size",
            4,
        ),
    ],
)
def test_options_of_megatron_change_the_configuration(words, path, value):
    found = resolve_config(parsed(words))
    for key in path.split("."):
        found = found[key]
    assert found == value


@pytest.mark.parametrize(
    ("words", "cuts"),
    [
        ("--decoder-first-pipeline-num-layers 1", [0, 3, 6]),
        ("--decoder-last-pipeline-num-layers 1", [0, 5, 8]),
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
            [0, 3, 7],
        ),
    ],
)
def test_layers_of_the_first_and_the_last_stage(words, cuts):
    line = f"--pipeline-model-parallel-size 3 --num-layers 7 {words}"
    assert resolve_config(parsed(line))["wavemare"]["pipeline"]["partition"] == cuts
    rotary = resolve_config(parsed(f"{line} --position-embedding-type rope"))
    assert rotary["wavemare"]["pipeline"]["partition"] == [0, *(cut - 1 for cut in cuts[1:])]
    with pytest.raises(ConfigError) as caught:
        resolve_config(parsed(line.replace("--num-layers 7", "--num-layers 2")))
    assert caught.value.key == words.split()[0]


def test_names_are_told_that_have_no_meaning(capfd):
    parsed("--use-mcore-models --lr 1e-3 --wandb-exp-name mine")
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert "--use-mcore-models, --wandb-exp-name" in told[0]


def test_the_folder_of_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    for words in (f"--tokenizer-model {tmp_path}", f"--tokenizer-model {tmp_path}/tokenizer.model"):
        assert parsed(f"--tokenizer-type HuggingFaceTokenizer {words}").tokenizer == str(tmp_path)
    with pytest.raises(ConfigError) as caught:
        parsed(f"--tokenizer-model {tmp_path} --vocab-file other/vocab.json")
    assert caught.value.key == "--tokenizer-model"
