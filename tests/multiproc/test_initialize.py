# SPDX-License-Identifier: Apache-2.0
"""``wavemare.initialize``: the engines it gives, what they return, what it refuses."""

import pytest

# Plain models first: in one process DeepSpeed keeps a pipeline's grid for all engines after it.
CASES = [
    "data_parallel",
    "first_weights",
    "one_file",
    "training_data_plain",
    "pipeline",
    "client_optimizer",
    "groups_of_a_stage",
    "interleaved_evaluation",
    "training_data",
    "dynamic_shapes",
    "bf16",
    "dualpipev",
    "refusals",
]


@pytest.fixture
def results(launch_once):
    return launch_once("initialize.py", *CASES)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ["pipeline", "client_optimizer", "interleaved_evaluation"])
def test_a_transformers_model_becomes_a_pipeline(results, case):
    first, last = (result[case] for result in results)
    reference = results[0]["reference"][0]
    for stage in (first, last):
        assert stage["class"] == "PipelineEngine"
        assert stage["subclass"]
        assert stage["optimized"] == stage["parameters"]
        assert stage["losses"] == pytest.approx(reference, rel=1e-5)
    assert first["losses"] == last["losses"]
    assert reference[-1] != reference[0]


def test_parameter_groups_of_the_whole_model_are_kept_apart(results):
    assert [result["pipeline"]["groups"] for result in results] == [3, 3]


def test_each_parameter_group_has_its_rate_on_stages_without_its_weights(results):
    for stage, result in enumerate(results):
        one = result["groups_of_a_stage"]["one"]
        for name, found in result["groups_of_a_stage"]["found"].items():
            for key in one:
                assert found[key] == pytest.approx(one[key], rel=1e-5), (name, key)
            if "zero" not in name:  # under ZeRO DeepSpeed keeps no group without weights
                assert [rate for rate, _ in found["groups"]] == one["rates"], name
                assert (found["groups"][0][1] == 0) == (stage == 1), name


def test_an_evaluation_is_the_models_own_whatever_its_shape(results):
    first, last = (result["interleaved_evaluation"] for result in results)
    assert first["evaluations"] == last["evaluations"]
    assert first["evaluations"][0] == pytest.approx(first["expected"], rel=1e-5)
    assert len(set(first["evaluations"])) == 3


def test_the_data_parallel_loss_is_the_mean_over_micro_batches_and_ranks(results):
    first, last = (result["data_parallel"] for result in results)
    assert first["class"] == "Engine"
    assert first["losses"] == last["losses"]
    assert first["losses"] == pytest.approx(results[0]["reference"][1], rel=1e-5)


def test_all_ranks_begin_with_the_bits_of_the_first_and_equal_weights_are_not_sent(results):
    first, last = (result["first_weights"] for result in results)
    assert first == last
    (digest,) = {digest for digest, _ in first.values()}
    assert digest
    for name, (_, sent) in first.items():
        if not name.endswith("3"):  # DeepSpeed sends them as it cuts them
            assert (sent > 0) == name.startswith("unlike"), name


def test_a_data_parallel_engine_trains_after_engines_of_other_groups(launch):
    run = launch("initialize.py", "after_others")
    for found in (run.result(rank)["after_others"] for rank in range(2)):
        for refused, losses in (found["pipeline"], found["split"], found["ours"]):
            assert "Call that engine's destroy()" in refused
            assert losses == found["alone"]


def test_shapes_may_change_where_the_configuration_says_so(results):
    first, last = (result["dynamic_shapes"] for result in results)
    assert first["losses"] == last["losses"]
    assert first["losses"] == pytest.approx(first["expected"], rel=1e-5)


@pytest.mark.parametrize("case", ["training_data", "training_data_plain"])
def test_a_dataset_feeds_the_engine(results, case):
    first, last = (result[case]["losses"] for result in results)
    assert first == last
    assert first[-1] < first[0]
    assert case == "training_data" or results[0][case]["timed"] == len(first)


def test_bf16_trains(results):
    assert results[0]["bf16"]["losses"] == results[1]["bf16"]["losses"]
    assert results[0]["bf16"]["losses"] == pytest.approx(results[0]["reference"][0], rel=2e-2)


def test_dualpipev_is_stock_deepspeeds(results):
    for result in results:
        stock, ours = result["dualpipev"]["stock"], result["dualpipev"]["ours"]
        assert ours["losses"] == stock["losses"]
        assert ours["class"].startswith("wavemare.engine.")
        assert stock["class"].startswith("deepspeed.")
        assert result["dualpipev"]["step"] == len(ours["losses"])


def test_one_file_serves_both(results):
    for result in results:
        assert result["one_file"]["stock"].startswith("deepspeed.")
        assert result["one_file"]["ours"].startswith("wavemare.")


def test_what_cannot_work_is_refused_by_name(results):
    for result in results:
        refusals = result["refusals"]
        assert (
            "Linear is neither a transformers model nor a PipelineModule"
            in (refusals["no pipeline of it"])
        )
        assert "the model is a PipelineModule of 2 stages" in refusals["other stages"]
        assert "--deepspeed_config" in refusals["no configuration"]
        assert "train_batch_size = 7" in refusals["batch"]
        assert "not a multiple" in refusals["stages do not divide"]
        assert "lr_scheduler = 'LambdaLR'" in refusals["scheduler"]


@pytest.mark.world_size(4)
def test_stages_and_replicas_together(launch_once):
    results = launch_once("initialize.py", "four_ranks", ranks=4)
    reference = results[0]["reference"][1]
    for result in results:
        assert result["four_ranks"]["losses"] == pytest.approx(reference, rel=1e-5)
    assert [r["four_ranks"]["data"] for r in results] == [[0, 2], [1, 2], [0, 2], [1, 2]]
