# SPDX-License-Identifier: Apache-2.0
"""Plans of schedules (text), layouts (JSON), clusters and models to plan for."""

import json
import math

import pytest

from wavemare.errors import ModelError, PlanError
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.planner import find_layouts
from wavemare.parallel.planner.cluster import parse_cluster, read_cluster
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.plan.schedules import build_plan

HEADER = {"schedule": "1f1b", "stages": 2, "micro_batches": 2, "steps": 1, "send_slots": 1}
BODY = str(build_plan("1f1b", 2, 2, 1)).split("\n", 1)[1]
MOST = "9" * 18  # digits that are read


def schedule(body=BODY, **header):
    pairs = " ".join(f"{name}={value}" for name, value in {**HEADER, **header}.items())
    return f"plan {pairs}\n{body}"


SCHEDULES = [
    ("", "plan", "there is no line"),
    ("plan stages=2", "plan", "no header of a plan"),
    (schedule().replace("plan", "plam"), "plan", "Write 'plan"),
    (schedule(stages="x"), "stages", "not a whole number"),
    (schedule(stages="9" * 30), "stages", "not a whole number"),
    (schedule(stages=0), "stages", "at least 1"),
    (schedule(stages=MOST), "plan", "stage 2 does nothing"),
    (schedule(stages=1), "action", "has no stage 1"),
    (schedule(micro_batches=MOST), "action", "next optimizer step"),
    (schedule(steps=2), "steps", "does 1 optimizer steps"),
    (schedule(BODY.replace("0: ", "")), "plan", "line of rank 0"),
    (schedule(BODY.replace("0F0@", "0X0@")), "action", "codes: L"),
    (schedule(BODY.replace("0F0@", "F00@")), "action", "no action"),
    (schedule(BODY.replace("0F0@0 ", "0F0@0 0F0@0 ")), "action", "second time"),
    (schedule(BODY.replace("0F0@", f"0F{MOST}@")), "action", "does not come before"),
    (schedule(BODY.replace("0F0@", f"{MOST}F0@")), "action", "has no stage 99"),
    (schedule(BODY.replace("0B1@0 ", "")), "action", "before it"),
    (schedule(send_slots=0), "send_slots", "at least 1"),
    (schedule(BODY.replace("0F0@0", "0F0@0/1")), "action", "no action"),
    (schedule("0: 0F0 1F0 1B0 0B0", micro_batches=1), "homes", "Add homes=0,0"),
]


@pytest.mark.parametrize(("text", "key", "said"), SCHEDULES)
def test_the_text_of_a_schedule(refused, text, key, said):
    refused(lambda: check(Plan.parse(text)), PlanError, key, said)


VALID = json.loads(Layout(global_batch=8, shares=(2, 2), data_parallel=2, micro_steps=2).to_json())
SECONDS = {"step_s": 1, "tokens_per_s": 1, "stage_s": [1], "rank_s": [1, 1], "memory_bytes": []}


def layout(**changes):
    return json.dumps({**VALID, **changes})


LAYOUTS = [
    ("", "layout", "line 1, column 1"),
    ("[]", "layout", "no mapping"),
    (schedule(), "layout", "the plan of a schedule"),
    ('{"plans": [], "equal": null, "cluster": {}}', "layout", "several layouts"),
    pytest.param("[" * 50_000, "layout", "nested too deeply", id="50,000 brackets"),
    pytest.param('{"version": ' + "1" * 5000 + "}", "layout", "too many digits", id="5,000 digits"),
    ('{"version": 1, "version": 1}', "layout", "appears twice"),
    ('{"version": 1}', "cuts", "key is missing"),
    (layout(version=2), "version", "reads version 1"),
    (layout(stage=2), "stage", "Did you mean 'stages'?"),
    (layout(global_batch="8"), "global_batch", "whole number"),
    (layout(global_batch=9), "shares", "are not 9"),
    (layout(shares="22"), "shares", "no tuple"),
    (layout(shares=[2]), "shares", "1 of them for 2 replicas"),
    (layout(shares=[0, 4]), "shares[0]", "at least 1"),
    (layout(stages=2), "cuts", "2 stages need it"),
    (layout(cuts=[0, 1]), "cuts", "one stage is not cut"),
    (layout(tensor_parallel=True), "tensor_parallel", "whole"),
    (layout(schedule=[]), "schedule", "no such schedule"),
    (layout(zero_stage=4), "zero_stage", "no such stage of ZeRO"),
    (layout(order=[0, 0]), "order", "runs two ranks"),
    (layout(predicted=3), "predicted", "no mapping"),
    (layout(predicted={"step": 1}), "predicted.step", "no such key"),
    (layout(predicted={**SECONDS, "tokens_per_s": []}), "predicted.tokens_per_s", "it is a list"),
    (layout(predicted={**SECONDS, "step_s": -1}), "predicted.step_s", "at least 0"),
    (layout(predicted={**SECONDS, "step_s": 10**400}), "predicted.step_s", "no finite number"),
]


@pytest.mark.parametrize(("text", "key", "said"), LAYOUTS)
def test_the_json_of_a_layout(refused, text, key, said):
    refused(lambda: Layout.from_json(text), PlanError, key, said)


DEVICE = {"type": "X", "tflops": 1.0, "memory_gib": 1.0, "memory_gb_s": 1.0}


def cluster(*, links=None, **device):
    values = {"devices": [{**DEVICE, **device}]}
    return values if links is None else {**values, "links": links}


CLUSTERS = [
    ([], "cluster", "Write {...}"),
    ({"devices": []}, "cluster.devices", "at least 1 item"),
    ({"devices": [{"type": "V9"}]}, "cluster.devices[0].type", "no such card"),
    ({**cluster(), "version": 2}, "cluster.version", "Choose one of these"),
    ({"device": [DEVICE]}, "cluster.device", "'devices'?"),
    ({"devices": [{"type": 4}]}, "cluster.devices[0].type", "quotes"),
    (cluster(overhead_s=-1), "cluster.devices[0].overhead_s", "Give 0 or more"),
    (cluster(links={"within": {"beta": 1}}), "cluster.links.within.beta", "alpha_s"),
    (cluster(tflop=1), "cluster.devices[0].tflop", "'tflops'?"),
    (cluster(tflops="1"), "cluster.devices[0].tflops", "valid number"),
    (cluster(tflops=-1), "cluster.devices[0].tflops", "Give 1e-30 or more"),
    (cluster(memory_gib=math.nan), "cluster.devices[0].memory_gib", "at most 1e+30"),
    (cluster(efficiency=2), "cluster.devices[0].efficiency", "Give at most 1"),
    (cluster(count=0), "cluster.devices[0].count", "Give 1 or more"),
    (cluster(count=10**12), "cluster.devices[0].count", "at most 65536"),
    (
        cluster(links={"between": {"bytes_s": 1e-310}}),
        "cluster.links.between.bytes_s",
        "Give 1e-30 or more",
    ),
    (cluster(overhead_s=1e300), "cluster.devices[0].overhead_s", "Give at most 1e+30"),
    ({"devices": [DEVICE, {**DEVICE, "tflops": 2}]}, "devices.type", "different types"),
]


@pytest.mark.parametrize(("values", "key", "said"), CLUSTERS)
def test_the_content_of_a_cluster_file(refused, values, key, said):
    refused(lambda: parse_cluster(values), PlanError, key, said)


TEXTS = [
    ("V100", "COUNTxTYPE"),
    ("8xV101", "Did you mean 'V100'?"),
    ("0xV100", "Count from 1"),
    ("999999999xV100", "at most 65536"),
    pytest.param("9" * 5000 + "xV100", "COUNTxTYPE", id="5,000 digits"),
    pytest.param("8xV101," * 90 + "8xV100", "'V100'?", id="longer than a file's name"),
    ("nosuch.json", "No such file"),
]


@pytest.mark.parametrize(("text", "said"), TEXTS)
def test_the_text_of_a_cluster(refused, text, said):
    refused(lambda: read_cluster(text), PlanError, "--cluster", said)


CLUSTER_FILES = [
    ("{", "not JSON at line 1"),
    pytest.param("[" * 50_000, "too deeply", id="brackets"),
    pytest.param(b"\xff\xfe", "can't decode", id="no text"),
    ('{"devices": NaN}', "NaN is no number"),
]


@pytest.mark.parametrize(("content", "said"), CLUSTER_FILES)
def test_a_file_that_is_no_cluster(refused, write, content, said):
    file = write("cluster.json", content)
    refused(lambda: read_cluster(file), PlanError, "--cluster", str(file), said)


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 9}
GPT2["n_positions"] = 256
MODELS = [
    ({}, "model_type", "does not know the layers"),
    ({**GPT2, "model_type": "t5"}, "model_type", "'t5'"),
    ({**GPT2, "model_type": "gpt"}, "model_type", "'gpt2'?"),
    ({**GPT2, "n_embd": "8"}, "n_embd", "without quotes"),
    ({**GPT2, "n_layer": 0}, "n_layer", "at least 1"),
    ({**GPT2, "n_layer": 10**9}, "num_hidden_layers", "10000"),
    ({**GPT2, "n_head": 3}, "num_attention_heads", "divisor of 8"),
    (None, "model", "neither a configuration nor"),
    ("nosuch", "--model", "nor the name of a preset"),
]


@pytest.mark.parametrize(("model", "key", "said"), MODELS)
def test_a_model_to_plan_for(refused, model, key, said):
    act = lambda: find_layouts(model, "2xV100", global_batch=8, sequence_length=128)  # noqa: E731
    refused(act, ModelError, key, said)


SETTINGS = [
    ({"global_batch": "8"}, "global_batch"),
    ({"sequence_length": 0}, "sequence_length"),
    ({"dtype": "fp8"}, "dtype"),
    ({"margin": "5%"}, "margin"),
    ({"margn": 0.1}, "margn"),
    ({"max_stages": 0}, "max_stages"),
    ({"zero_stages": 3}, "zero_stages"),
]


@pytest.mark.parametrize(("changes", "key"), SETTINGS)
def test_a_setting_of_the_planner(refused, changes, key):
    values = {"cluster": "2xV100", "global_batch": 8, "sequence_length": 128, **changes}
    refused(lambda: find_layouts("gpt2", **values), PlanError, key, repr(values[key]))


def test_nothing_fits(refused):
    small = parse_cluster(cluster(memory_gib=0.001))
    act = lambda: find_layouts("gpt2-xl", small, global_batch=8, sequence_length=128)  # noqa: E731
    refused(act, PlanError, "--cluster", "equal parts need", "Use more or larger devices")
