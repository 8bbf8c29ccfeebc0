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
    ("", "plan"),
    ("plan stages=2", "plan"),
    (schedule().replace("plan", "plam"), "plan"),
    (schedule(stages="x"), "stages"),
    (schedule(stages="9" * 30), "stages"),
    (schedule(stages=0), "stages"),
    (schedule(stages=MOST), "plan"),
    (schedule(stages=1), "action"),
    (schedule(micro_batches=MOST), "action"),
    (schedule(steps=2), "steps"),
    (schedule(BODY.replace("0: ", "")), "plan"),
    (schedule(BODY.replace("0F0@", "0X0@")), "action"),
    (schedule(BODY.replace("0F0@", "F00@")), "action"),
    (schedule(BODY.replace("0F0@0 ", "0F0@0 0F0@0 ")), "action"),
    (schedule(BODY.replace("0F0@", f"0F{MOST}@")), "action"),
    (schedule(BODY.replace("0F0@", f"{MOST}F0@")), "action"),
    (schedule(BODY.replace("0B1@0 ", "")), "action"),
    (schedule(send_slots=0), "send_slots"),
    (schedule(BODY.replace("0F0@0", "0F0@0/1")), "action"),
    (schedule("0: 0F0 1F0 1B0 0B0", micro_batches=1), "homes"),
]


@pytest.mark.parametrize(("text", "key"), SCHEDULES)
def test_the_text_of_a_schedule(refused, text, key):
    refused(lambda: check(Plan.parse(text)), PlanError, key)


VALID = json.loads(Layout(global_batch=8, shares=(2, 2), data_parallel=2, micro_steps=2).to_json())
SECONDS = {"step_s": 1, "tokens_per_s": 1, "stage_s": [1], "rank_s": [1, 1], "memory_bytes": []}


def layout(**changes):
    return json.dumps({**VALID, **changes})


LAYOUTS = [
    ("", "layout"),
    ("[]", "layout"),
    (schedule(), "layout"),
    ('{"plans": [], "equal": null, "cluster": {}}', "layout"),
    pytest.param("[" * 50_000, "layout", id="50,000 brackets"),
    pytest.param('{"version": ' + "1" * 5000 + "}", "layout", id="5,000 digits"),
    ('{"version": 1, "version": 1}', "layout"),
    ('{"version": 1}', "cuts"),
    (layout(version=2), "version"),
    (layout(stage=2), "stage"),
    (layout(global_batch="8"), "global_batch"),
    (layout(global_batch=9), "shares"),
    (layout(shares="22"), "shares"),
    (layout(shares=[2]), "shares"),
    (layout(shares=[0, 4]), "shares[0]"),
    (layout(stages=2), "cuts"),
    (layout(cuts=[0, 1]), "cuts"),
    (layout(tensor_parallel=True), "tensor_parallel"),
    (layout(schedule=[]), "schedule"),
    (layout(zero_stage=4), "zero_stage"),
    (layout(order=[0, 0]), "order"),
    (layout(predicted=3), "predicted"),
    (layout(predicted={"step": 1}), "predicted.step"),
    (layout(predicted={**SECONDS, "tokens_per_s": []}), "predicted.tokens_per_s"),
    (layout(predicted={**SECONDS, "step_s": -1}), "predicted.step_s"),
    (layout(predicted={**SECONDS, "step_s": 10**400}), "predicted.step_s"),
]


@pytest.mark.parametrize(("text", "key"), LAYOUTS)
def test_the_json_of_a_layout(refused, text, key):
    refused(lambda: Layout.from_json(text), PlanError, key)


DEVICE = {"type": "X", "tflops": 1.0, "memory_gib": 1.0, "memory_gb_s": 1.0}


def cluster(*, links=None, **device):
    values = {"devices": [{**DEVICE, **device}]}
    return values if links is None else {**values, "links": links}


CLUSTERS = [
    ([], "cluster"),
    ({"devices": []}, "cluster.devices"),
    ({"devices": [{"type": "V9"}]}, "cluster.devices[0].type"),
    ({**cluster(), "version": 2}, "cluster.version"),
    ({"device": [DEVICE]}, "cluster.device"),
    ({"devices": [{"type": 4}]}, "cluster.devices[0].type"),
    (cluster(overhead_s=-1), "cluster.devices[0].overhead_s"),
    (cluster(links={"within": {"beta": 1}}), "cluster.links.within.beta"),
    (cluster(tflop=1), "cluster.devices[0].tflop"),
    (cluster(tflops="1"), "cluster.devices[0].tflops"),
    (cluster(tflops=-1), "cluster.devices[0].tflops"),
    (cluster(memory_gib=math.nan), "cluster.devices[0].memory_gib"),
    (cluster(efficiency=2), "cluster.devices[0].efficiency"),
    (cluster(count=0), "cluster.devices[0].count"),
    (cluster(count=10**12), "cluster.devices[0].count"),
    (cluster(links={"between": {"bytes_s": 1e-310}}), "cluster.links.between.bytes_s"),
    (cluster(overhead_s=1e300), "cluster.devices[0].overhead_s"),
    (cluster(tflops=1.25e14), "cluster.devices[0].tflops"),
    (cluster(memory_gib=1.6e10), "cluster.devices[0].memory_gib"),
    (cluster(links={"between": {"alpha_s": 30000}}), "cluster.links.between.alpha_s"),
    (cluster(links={"pairs": [{"nodes": ["0"]}]}), "cluster.links.pairs[0].nodes"),
    (cluster(links={"pairs": [{"nodes": ["0", "1"]}]}), "cluster.links.pairs[0].nodes"),
    (cluster(links={"pairs": [{"nodes": ["0", "0"]}] * 2}), "cluster.links.pairs[1].nodes"),
    ({"devices": [DEVICE, {**DEVICE, "tflops": 2}]}, "devices.type"),
]


@pytest.mark.parametrize(("values", "key"), CLUSTERS)
def test_the_content_of_a_cluster_file(refused, values, key):
    refused(lambda: parse_cluster(values), PlanError, key)


TEXTS = [
    "V100",
    "8xV101",
    "0xV100",
    "999999999xV100",
    pytest.param("9" * 5000 + "xV100", id="5,000 digits"),
    pytest.param("8xV101," * 90 + "8xV100", id="longer than a file's name"),
    "nosuch.json",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_cluster(refused, text):
    refused(lambda: read_cluster(text), PlanError, "--cluster")


CLUSTER_FILES = [
    "{",
    pytest.param("[" * 50_000, id="brackets"),
    pytest.param(b"\xff\xfe", id="no text"),
    '{"devices": NaN}',
]


@pytest.mark.parametrize("content", CLUSTER_FILES)
def test_a_file_that_is_no_cluster(refused, write, content):
    file = write("cluster.json", content)
    refused(lambda: read_cluster(file), PlanError, "--cluster")


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 9}
GPT2["n_positions"] = 256
MODELS = [
    ({}, "model_type"),
    ({**GPT2, "model_type": "t5"}, "model_type"),
    ({**GPT2, "model_type": "gpt"}, "model_type"),
    ({**GPT2, "n_embd": "8"}, "n_embd"),
    ({**GPT2, "n_layer": 0}, "n_layer"),
    ({**GPT2, "n_layer": 10**9}, "num_hidden_layers"),
    ({**GPT2, "n_head": 3}, "num_attention_heads"),
    (None, "model"),
    ("nosuch", "--model"),
]


@pytest.mark.parametrize(("model", "key"), MODELS)
def test_a_model_to_plan_for(refused, model, key):
    act = lambda: find_layouts(model, "2xV100", global_batch=8, sequence_length=128)  # noqa: E731
    refused(act, ModelError, key)


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
    refused(lambda: find_layouts("gpt2", **values), PlanError, key)


def test_nothing_fits(refused):
    small = parse_cluster(cluster(memory_gib=0.001))
    act = lambda: find_layouts("gpt2-xl", small, global_batch=8, sequence_length=128)  # noqa: E731
    refused(act, PlanError, "--cluster")
