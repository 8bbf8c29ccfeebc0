# SPDX-License-Identifier: Apache-2.0
"""``wavemare.hf.Trainer`` with data-parallel engines: transformers' own results, our engines."""

import pytest

EQUALITY = ["gpt2_zero0", "bert_zero1", "gpt2_zero2", "bert_zero3"]
# Tensor parallelism last: in one process DeepSpeed keeps its groups for all engines after it.
CASES = [
    "without_a_file",
    *EQUALITY,
    "by_variable",
    "sparse",
    "tokens",
    "resumed",
    "own_loader",
    "refusals",
    "again",
    "tensor_parallel",
    "own_optimizer",
    "named_optimizer",
    "adagrad",
]


@pytest.fixture
def results(launch_once):
    return launch_once("hf_trainer.py", *CASES)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", EQUALITY)
def test_without_a_section_it_trains_as_transformers_does(results, case):
    for result in results:
        stock, ours = result[case]["stock"], result[case]["ours"]
        assert stock["class"].startswith("deepspeed.")
        assert ours["class"] == "wavemare.engine.data_parallel.Engine"
        for key in ("losses", "eval", "lr", "weights"):
            assert ours[key] == stock[key], key
        whole = result[case.replace("zero3", "zero1")]["stock"]  # of ZeRO 3 stock counts a part
        assert ours["counted"] == whole["counted"]
        assert len(ours["losses"]) == 3
        assert ours["losses"][0] != ours["losses"][-1]


def test_without_a_deepspeed_file_it_is_transformers(results):
    for result in results:
        found = result["without_a_file"]
        assert found["ours"] == found["stock"]
        assert len(found["ours"][0]) == 3


def test_accelerates_variable_for_cpus_keeps_the_engine(results):
    for result in results:
        found, expected = result["by_variable"], result["gpt2_zero0"]["ours"]
        if isinstance(found, str):  # with a GPU
            assert found.startswith("ConfigError: cpu = True")
            continue
        for key in ("class", "losses", "eval", "weights"):
            assert found[key] == expected[key], key


def test_the_sparse_collective_sums_as_stock_does(results):
    for result in results:
        assert result["sparse"]["sparse"]
        stock = result["bert_zero1"]["stock"]
        assert result["sparse"]["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        # transformers multiplies BERT's mean by the two processes.
        assert result["sparse"]["eval"] == pytest.approx(stock["eval"] / 2, rel=1e-4)


def test_values_of_our_section_that_are_called_auto_reach_our_engine(results):
    assert results[0]["sparse"]["section"] == {"sparse_collective": {"mode": "auto"}}


def test_ranks_that_share_a_model_read_the_same_batches(results):
    # Batches of 4 read by one pair are those of 2 read by each of two ranks.
    for result in results:
        stock = result["gpt2_zero0"]["stock"]
        # The third step has the last, short batch, which transformers fills up for two ranks.
        own = result["tensor_parallel"]["losses"][:2]
        assert own == pytest.approx(stock["losses"][:2], rel=1e-4)
        assert result["tensor_parallel"]["eval"] == pytest.approx(stock["eval"], rel=1e-3)
        flos, parameters = stock["counted"]
        # Two rows more fill up the last batches of two data ranks.
        assert result["tensor_parallel"]["counted"] == [flos * 22 / 24, parameters]
        assert stock["whole logits"]
        assert not result["tensor_parallel"]["whole logits"]  # for the loss alone


def test_the_collator_of_a_loader_of_ones_own_draws_by_rank(results):
    one, other = (result["own_loader"] for result in results)
    assert len(set(one)) == len(one) == len(other) == 6
    assert not set(one) & set(other)


def test_an_optimizer_that_the_file_does_not_name_trains_a_split_model(results):
    for result in results:
        own, named = result["own_optimizer"], result["named_optimizer"]
        assert own["losses"][0] == named["losses"][0]
        # Only the file's decays norms and biases, too.
        assert own["losses"] == pytest.approx(named["losses"], rel=1e-3)
        assert own["weights"] != named["weights"]
        assert own["weights"] == results[0]["own_optimizer"]["weights"]


def test_an_optimizer_whose_states_come_with_it_trains_a_split_model(results):
    for result in results:
        found = result["adagrad"]
        assert found["split"]["losses"] == pytest.approx(found["stock"]["losses"], rel=1e-4)
        for stage in (1, 3):  # DeepSpeed would train both groups as one
            assert found[f"ZeRO {stage}"].startswith("ConfigError: optimizer = 'Adagrad'")
        whole, *zero = found["by rates"]
        assert zero == [pytest.approx(whole, rel=1e-5)] * 2
        assert len(set(whole)) == 4


def test_balanced_means_are_not_weighed_twice(results):
    for result in results:
        stock = result["gpt2_zero0"]["stock"]
        # transformers divides GPT-2's sum over 15 positions by 16 labels.
        assert result["tokens"]["eval"] == pytest.approx(stock["eval"] * 16 / 15, rel=1e-3)
        expected = [loss * 16 / 15 for loss in stock["losses"]]
        assert result["tokens"]["losses"] == pytest.approx(expected, rel=1e-3)


def test_a_resumed_run_reads_the_samples_that_a_sampler_has_drawn(results):
    for result in results:
        found = result["resumed"]
        for name, run in found.items():
            assert run["digests"][0] == run["digests"][1], name
            assert run["losses"][0] == run["losses"][1], name
            assert run["newest"] == [None, "checkpoint-2"], name
        for order in ("grouped", "weighted"):
            assert found[f"zero1 {order}"] == found[f"stock {order}"]


def test_what_differs_from_the_arguments_is_one_message(results):
    for result in results:
        assert (
            "differ: train_micro_batch_size_per_gpu=3, the argument per_device_train_batch_size=2; "
            "gradient_clipping=0.5, the argument max_grad_norm=1.0; "
            "optimizer.params.lr=0.5, the argument learning_rate=0.01. Make them equal"
        ) in result["refusals"]["differences"]


def test_optimizers_that_the_file_would_overrule_are_shown(results):
    for result in results:
        shown = result["refusals"]["types"]
        assert "optimizer.type=AdamW, the argument optim=sgd" in shown
        assert "scheduler.type=WarmupLR, the argument lr_scheduler_type=cosine" in shown
        assert "optimizers = 'SGD'" in result["refusals"]["objects"]


def test_zero_3_trains_once_and_the_remedy_trains_again(results):
    for result in results:
        found = result["again"]
        assert found["message"].startswith("ConfigError: zero_optimization.stage = 3: ")
        expected = result["gpt2_zero2"]["stock"]["losses"]
        assert found["losses"] == pytest.approx(expected, rel=1e-4)


def test_what_cannot_work_is_refused_by_name(results):
    for result in results:
        refusals = result["refusals"]
        assert "wavemare.pipelin" in refusals["unknown key"]
        assert "wavemare.balance.shares = [3, 1]" in refusals["shares"]
        assert "wavemare.parallel" in refusals["parallel"]
        assert "not a multiple" in refusals["stages"]
        assert "wavemare.pipeline.untie = 'auto'" in refusals["auto"]
        assert "num_processes = 1" in refusals["one"]
        assert "--use_cpu" in refusals["one"]
