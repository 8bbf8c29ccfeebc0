# SPDX-License-Identifier: Apache-2.0
"""``wavemare.hf.Trainer`` with data, arguments and layouts that are less common."""

import pytest

SHARED = ["again_1f1b", "again_pipemare", "noisy"]
# Data-parallel first: in one process DeepSpeed keeps a pipeline's grid for all engines after it.
READ = ["bf16_zero", "bf16_1f1b", "streamed", "workers"]
PARTS = ["parts", "noisy_parts"]


@pytest.fixture
def results(launch_once):
    def of(case):
        (together,) = [cases for cases in (SHARED, READ) if case in cases]
        return [found[case] for found in launch_once("hf_breadth.py", *together)]

    return of


def check_steps(result, steps):
    assert result["losses"] == pytest.approx(result["expected"], rel=2e-5)
    assert len(result["losses"]) == steps


def check_evaluation(result):
    assert result["eval"] == pytest.approx(result["eval_expected"], rel=1e-4)
    assert result["logits"] == [5, 16, 50]
    assert result["logits_error"] < 1e-4


@pytest.mark.world_size(2)
def test_a_stream_without_a_length_trains_a_pipeline(results):
    for result in results("streamed"):
        check_steps(result, 3)
        check_evaluation(result)


def test_workers_of_all_stages_draw_alike(results):
    for result in results("workers"):
        check_steps(result, 3)


@pytest.mark.parametrize("engine", ["zero", "1f1b"])
def test_bf16_trains_near_fp32(results, engine):
    for result in results(f"bf16_{engine}"):
        assert [result["fp32 type"], result["bf16 type"]] == ["torch.float32", "torch.bfloat16"]
        assert result["bf16"] == pytest.approx(result["fp32"], rel=1e-2)
        assert result["bf16"] != result["fp32"]


@pytest.mark.parametrize("engine", ["1f1b", "pipemare"])
def test_a_second_run_goes_on_with_the_weights(results, engine):
    for result in results(f"again_{engine}"):
        assert result["steps"] == 3
        assert result["second"] == result["other"]


def test_neftune_is_noise_in_training_alone(results):
    for result in results("noisy"):
        plain, noised = result["losses"]
        assert abs(noised - plain) > 1e-3
        assert result["before"][0] == result["before"][1]
        assert result["error"] < 1e-5


@pytest.mark.world_size(2)
def test_neftune_is_the_same_noise_on_ranks_that_share_a_model(launch_once):
    one, other = (found["noisy_parts"] for found in launch_once("hf_breadth.py", *PARTS))
    assert one == other
    plain, noised = one["losses"]
    assert abs(noised - plain) > 1e-3


@pytest.mark.world_size(2)
def test_tensor_parallelism_predicts_beside_the_loss(launch_once):
    for found in launch_once("hf_breadth.py", *PARTS):
        result = found["parts"]
        assert result["shapes"] == [[7, 16, 50]]
        assert result["mean"] == pytest.approx(result["expected"], abs=1e-6)


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.parametrize("case", ["replicas", "stages_of_parts"])
def test_four_ranks_train_two_stages(launch_once, case):
    digests = set()
    for found in launch_once("hf_breadth.py", case, ranks=4):
        result = found[case]
        check_steps(result, 3)
        digests.add(result["digest"])
        if case == "stages_of_parts":  # two replicas would fill up the short batch
            check_evaluation(result)
    assert len(digests) == 1
