# SPDX-License-Identifier: Apache-2.0
"""What pipelines report is one thing, whichever schedule runs."""

SAMPLES = {"1f1b": [8, 16, 24], "zb-h1": [8, 16, 24], "pipemare": [8, 16, 20]}
USED = [{"batch", "send_output", "receive_grad"}, {"batch", "receive_input", "send_grad"}]


def test_all_figures_of_a_short_step_have_its_sample_count(launch_once):
    first, _ = launch_once("pipeline_figures.py")
    for schedule, found in first.items():
        assert found["counts"]
        for name, counts in found["counts"].items():
            assert counts == SAMPLES[schedule], (schedule, name)


def test_messages_are_timed(launch_once):
    for stage, results in enumerate(launch_once("pipeline_figures.py")):
        for schedule, found in results.items():
            timed = {name for name, elapsed in found["times"].items() if elapsed > 0}
            assert USED[stage] <= timed, schedule
