# SPDX-License-Identifier: Apache-2.0
"""``wavemare.hf.Trainer`` with pipelines and waves, against plain loops over the same batches."""

import pytest

# Waves first: in one process DeepSpeed keeps a pipeline's grid for all engines after it.
SYNCHRONOUS = [
    "gpt2_wavelet",
    "bert_wavelet",
    "smoothed_wavelet",
    "gpt2_1f1b",
    "bert_1f1b",
    "gpt2_smoothed",
    "gpt2_varied",
    "bert_varied",
]
ASYNCHRONOUS = ["gpt2_pipemare", "bert_pipemare"]
STALE = ["stale_auto", "stale_absent"]
IGNORED = ["ignored_wavelet", "ignored_1f1b"]
RATES = [
    "rates_wavelet",
    "rates_ZeRO",
    "rates_ZeRO_named",
    "rates_1f1b",
    "rates_1f1b_alone",
    "rates_pipemare_alone",
]
# Last, as they leave broken engines.
APART = ["apart_1f1b", "apart_pipemare"]
IMPOSSIBLE = {
    "impossible_train": "a second call of the model",
    "impossible_evaluate": "output_hidden_states",
}


@pytest.fixture
def results(launch_once):
    others = *STALE, "own_interleaved", "begun", "hidden_outputs", "refusals", *APART, *IMPOSSIBLE
    others = "modes", "modes_1", *others
    first = RATES[:3] + SYNCHRONOUS
    return launch_once("hf_pipeline.py", *first, *IGNORED, *ASYNCHRONOUS, *RATES[3:], *others)


ENGINES = {"1f1b": "PipelineEngine", "wavelet": "Engine"}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_a_step_has_the_loss_of_transformers(results, case):
    for result in (found[case] for found in results):
        assert result["class"] == ENGINES.get(case.split("_")[1], "PipelineEngine")
        assert result["losses"] == pytest.approx(result["expected"], rel=2e-5)
        assert result["counted"] == result["counted_expected"]  # operations, and parameters
        assert len(result["losses"]) in (3, 8)


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_an_asynchronous_pipeline_begins_alike_and_is_stale(results, case):
    for result in (found[case] for found in results):
        assert result["class"] == "PipelineEngine"
        assert result["losses"][0] == pytest.approx(result["expected"][0], rel=2e-5)
        assert result["losses"] != pytest.approx(result["expected"], rel=1e-3)
        assert result["losses"] == results[0][case]["losses"]


@pytest.mark.parametrize("case", STALE)
def test_micro_batches_are_the_arguments_and_the_first_rank_warns_of_staleness(results, case):
    first, second = (found[case] for found in results)
    assert first["micro_batches"] == second["micro_batches"] == 2
    told, kept = first["told"]
    assert "optimizer_policy keep: AdamW stays" in kept
    assert told.startswith("pipemare: 2 micro-batches per optimizer step on 2 stages")
    assert "up to 2 steps old (2.00 on average)" in told
    assert "with 4 or more (gradient_accumulation_steps" in told
    assert second["told"] == []


@pytest.mark.parametrize("case", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_evaluation_and_prediction_are_the_saved_models(results, case):
    for result in (found[case] for found in results):
        assert result["eval"] == pytest.approx(result["eval_expected"], rel=1e-4)
        assert result["logits"][0] == 5
        assert result["logits_error"] < 1e-4
        assert result["digest"] == results[0][case]["digest"]


def test_gradients_are_not_clipped_to_0_and_the_start_is_evaluated(results):
    for result in (found["begun"] for found in results):
        assert result["losses"] == pytest.approx(result["expected"], rel=2e-5)
        assert len(result["losses"]) == 3
        assert result["first"] == pytest.approx(result["first_expected"], rel=1e-4)


def test_predictions_never_lack_what_a_configuration_adds_to_them(results):
    for result in (found["hidden_outputs"] for found in results):
        assert result["said"].startswith("ModelError: config.output_hidden_states = True")
        assert result["alone"] == [7, 16, 50]
        assert result["eval"]


@pytest.mark.world_size(2)
def test_a_loss_of_the_scripts_own_is_that_of_one_process(results):
    found = list(results)
    for result in (each["own_interleaved"] for each in found):
        assert result["losses"] == pytest.approx(result["expected"], rel=2e-5)
        assert result["eval"] == pytest.approx(result["eval_expected"], rel=1e-4)
        assert result["labels"] == result["labels_expected"]
    called, batches = found[-1]["own_interleaved"]["trained"]
    assert called == batches  # and not for what fills up the last step


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_loss_that_the_last_stage_cannot_compute_ends_all_ranks_with_the_reason(results, case):
    for result in results:
        assert IMPOSSIBLE[case] in result[case]


@pytest.mark.parametrize("case", APART)
def test_ranks_whose_labels_alone_differ_are_refused(results, case):
    for result in results:
        assert "ranks 0 and 1 hold one model, and read different batches" in result[case]


@pytest.mark.parametrize("case", IGNORED)
def test_a_loss_that_is_no_number_is_left_out_of_the_log_as_by_transformers(results, case):
    for result in (found[case] for found in results):
        assert result["losses"] == pytest.approx(result["expected"], rel=2e-5)


@pytest.mark.parametrize("case", RATES)
def test_a_scheduler_of_the_scripts_own_gives_each_step_its_rate(results, case):
    for result in (found[case] for found in results):
        assert result == [[0.5, 0.25, 0.125, 0.0625]] * 2


def test_an_optimizer_with_modes_evaluates_its_averages_or_is_refused(results):
    for result in results:
        found = result["modes"]
        assert found["said"] == "accepted"
        assert found["eval"] == pytest.approx(found["expected"], rel=1e-4)
        assert result["modes_1"]["said"].startswith("ConfigError: optim = 'Averaging'")


def test_what_would_not_be_called_is_refused(results):
    for result in results:
        refusals = result["refusals"]
        assert "OwnStep.training_step would not be called" in refusals["own step"]
        assert "OwnInputs._prepare_inputs would not be called" in refusals["own inputs"]
        assert "create_optimizer = 'OwnOptimizer'" in refusals["own optimizer"]
        assert "create_scheduler = 'OwnScheduler'" in refusals["own scheduler"]
        assert "optimizer_cls_and_kwargs = 'SGD'" in refusals["own class"]
        assert refusals["own optimizer alone"] == "accepted"
        assert refusals["own class alone"] == "accepted"
        assert refusals["own loss"] == "accepted"
        assert refusals["own waves"] == "accepted"
        assert "auto_find_batch_size" in refusals["batch size"]
        assert refusals["half"].startswith("ConfigError: fp16.enabled = True: ")
        assert "bf16" in refusals["half"]
