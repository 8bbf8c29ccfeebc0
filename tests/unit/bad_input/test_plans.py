# SPDX-License-Identifier: Apache-2.0
"""Plans of schedules (text), plans of layouts (JSON), clusters and models to plan for."""

import json
import math

import pytest

import wavemare
from wavemare.errors import ModelError, PlanError
from wavemare.parallel.layouts import unrolled
from wavemare.parallel.plan import ParallelPlan
from wavemare.parallel.planner.cluster_file import parse_cluster, read_cluster
from wavemare.pipeline.check import check
from wavemare.pipeline.plan import Plan
from wavemare.pipeline.schedules import build_plan

HEADER = {"schedule": "1f1b", "stages": 2, "micro_batches": 2, "steps": 1, "send_slots": 0}
BODY = str(build_plan("1f1b", 2, 2, 1)).split("\n", 1)[1]
MOST = "9" * 18  # digits that are read


def schedule(body=BODY, **header):
    pairs = " ".join(f"{name}={value}" for name, value in {**HEADER, **header}.items())
    return f"plan {pairs}\n{body}"


SCHEDULES = [
    pytest.param("", "plan", "there is no line", id="nothing"),
    pytest.param("# a comment\n", "plan", "there is no line", id="a comment"),
    pytest.param("plan stages=2", "plan", "no header of a plan", id="half a header"),
    pytest.param(schedule().replace("plan", "plam"), "plan", "Write 'plan", id="another word"),
    pytest.param(
        schedule().replace("stages=2", "stages=2 stages=3"), "plan", "no header", id="a key twice"
    ),
    pytest.param(schedule(stages="x"), "stages", "not a whole number", id="letters for a number"),
    pytest.param(schedule(stages="-1"), "stages", "not a whole number", id="a negative number"),
    pytest.param(schedule(stages="9" * 30), "stages", "not a whole number", id="30 digits"),
    pytest.param(
        schedule(stages="\uff12"), "stages", "not a whole number", id="digits of full width"
    ),
    pytest.param(schedule(stages=0), "stages", "too small", id="no stage"),
    pytest.param(schedule(stages=MOST), "plan", "stage 2 does nothing", id="10^18 stages"),
    pytest.param(schedule(stages=1), "action", "has no stage 1", id="a stage too few"),
    pytest.param(schedule(micro_batches=MOST), "action", "next optimizer step", id="micro-batches"),
    pytest.param(schedule(steps=2), "steps", "does 1 optimizer steps", id="a step too many"),
    pytest.param(schedule(BODY.replace("1:", "2:")), "plan", "line of rank 1", id="a rank missing"),
    pytest.param(schedule(BODY.replace("0F0@", "0X0@")), "action", "codes: L", id="another code"),
    pytest.param(schedule(BODY.replace("0F0@", "F00@")), "action", "no action", id="exchanged"),
    pytest.param(
        schedule(BODY.replace("0F0@0 ", "0F0@0 0F0@0 ")), "action", "second time", id="done twice"
    ),
    pytest.param(
        schedule(BODY.replace("0F0@", f"0F{MOST}@")), "action", "does not come before", id="far off"
    ),
    pytest.param(
        schedule(BODY.replace("0F0@", f"{MOST}F0@")), "action", "has no stage 99", id="far stage"
    ),
    pytest.param(schedule(BODY.replace("0B1@0 ", "")), "action", "before it", id="no backward"),
]


@pytest.mark.parametrize(("text", "key", "said"), SCHEDULES)
def test_the_text_of_a_schedule(refused, text, key, said):
    refused(lambda: check(Plan.parse(text)), PlanError, key, said)


VALID = json.loads(
    ParallelPlan(global_batch=8, shares=(2, 2), data_parallel=2, micro_steps=2).to_json()
)
SECONDS = {"step_s": 1, "tokens_per_s": 1, "stage_s": [1], "rank_s": [1, 1], "memory_bytes": []}


def layout(**changes):
    return json.dumps({**VALID, **changes})


LAYOUTS = [
    pytest.param("", "plan", "line 1, column 1", id="nothing"),
    pytest.param("{", "plan", "line 1, column 2", id="half a brace"),
    pytest.param("[]", "plan", "no mapping", id="a list"),
    pytest.param("[" * 50_000, "plan", "nested too deeply", id="50,000 brackets"),
    pytest.param('{"version": ' + "1" * 5000 + "}", "plan", "too many digits", id="5,000 digits"),
    pytest.param('{"version": 1, "version": 1}', "plan", "stands twice", id="a key twice"),
    pytest.param('{"version": 1}', "colocated", "key is missing", id="a version alone"),
    pytest.param(layout(version=2), "version", "reads version 1", id="a later version"),
    pytest.param(layout(version=True), "version", "Make the plan again", id="version true"),
    pytest.param(layout(stage=2), "stage", "Did you mean 'stages'?", id="a misspelt key"),
    pytest.param(layout(**{"": 2}), "''", "no such key", id="a key without a name"),
    pytest.param(layout(global_batch="8"), "global_batch", "whole number", id="a batch in quotes"),
    pytest.param(layout(global_batch=9), "shares", "are not 9", id="another product"),
    pytest.param(layout(shares="22"), "shares", "no tuple", id="shares as text"),
    pytest.param(layout(shares=[2]), "shares", "1 of them for 2 replicas", id="a share missing"),
    pytest.param(layout(shares=[0, 4]), "shares[0]", "at least 1", id="an empty share"),
    pytest.param(layout(shares=[[2], [2]]), "shares[0]", "whole number", id="shares in shares"),
    pytest.param(layout(stages=2), "cuts", "2 stages need it", id="stages without cuts"),
    pytest.param(layout(cuts=[0, 1]), "cuts", "one stage is not cut", id="cuts of one stage"),
    pytest.param(layout(tensor_parallel=True), "tensor_parallel", "whole", id="splits of true"),
    pytest.param(layout(schedule=[]), "schedule", "no such schedule", id="a list for a schedule"),
    pytest.param(layout(wavelet=1), "wavelet", "neither true nor false", id="wavelet 1"),
    pytest.param(layout(zero_stage=1.0), "zero_stage", "0, 1, 2 or 3", id="ZeRO 1.0"),
    pytest.param(layout(zero_stage=4), "zero_stage", "no such stage of ZeRO", id="ZeRO 4"),
    pytest.param(layout(order=[0, 0]), "order", "runs two ranks", id="a device twice"),
    pytest.param(layout(order=[0]), "order", "1 devices for 2 ranks", id="a device too few"),
    pytest.param(layout(colocated=[3]), "colocated", "patterns of modules", id="a number's name"),
    pytest.param(layout(predicted=3), "predicted", "no mapping", id="a number predicted"),
    pytest.param(
        layout(predicted={**SECONDS, "tokens_per_s": []}),
        "predicted.tokens_per_s",
        "it is a list",
        id="a list of speeds",
    ),
    pytest.param(
        layout(predicted={**SECONDS, "stage_s": 1.0}),
        "predicted.stage_s",
        "no list of numbers",
        id="a single stage",
    ),
    pytest.param(
        layout(predicted={**SECONDS, "step_s": -1}),
        "predicted.step_s",
        "at least 0",
        id="negative seconds",
    ),
    pytest.param(
        layout(predicted={**SECONDS, "step_s": 10**400}),
        "predicted.step_s",
        "not a finite number",
        id="seconds beyond a float",
    ),
]


@pytest.mark.parametrize(
    "text", ["Et*9999999999L", "Et*" + "9" * 5000 + "L", "(" * 3 + "t" + "*9999)" * 3]
)
def test_a_layout_of_too_many_letters(refused, text):
    refused(lambda: unrolled(text), PlanError, "stages", "more than 100000 letters")


@pytest.mark.parametrize(("text", "key", "said"), LAYOUTS)
def test_the_json_of_a_layout(refused, text, key, said):
    refused(lambda: ParallelPlan.from_json(text), PlanError, key, said)


DEVICE = {"type": "X", "tflops": 1.0, "memory_gib": 1.0, "memory_gb_s": 1.0}
LINK = {"nodes": ["0", "0"], "alpha_s": 0, "bytes_s": 1}


def cluster(*, links=None, **device):
    values = {"devices": [{**DEVICE, **device}]}
    return values if links is None else {**values, "links": links}


CLUSTERS = [
    pytest.param([], "cluster", "no mapping", id="a list"),
    pytest.param({}, "cluster.devices", "missing", id="nothing"),
    pytest.param({"devices": []}, "devices", "List one or more", id="no device"),
    pytest.param({"devices": [1]}, "devices[0]", "no mapping", id="a number for a device"),
    pytest.param({"devices": [{"type": "V9"}]}, "devices[0].type", "no such card", id="a card"),
    pytest.param({**cluster(), "version": 2}, "version", "reads version 1", id="a later version"),
    pytest.param(cluster(tflop=1), "devices[0].tflop", "'tflops'?", id="a misspelt key"),
    pytest.param(cluster(tflops="1"), "devices[0].tflops", "no finite", id="a number in quotes"),
    pytest.param(cluster(tflops=-1), "devices[0].tflops", "above 0", id="a negative speed"),
    pytest.param(cluster(memory_gib=math.nan), "devices[0].memory_gib", "finite", id="nan"),
    pytest.param(cluster(memory_gib=10**400), "devices[0].memory_gib", "finite", id="10^400"),
    pytest.param(cluster(efficiency=2), "devices[0].efficiency", "at most 1", id="more than all"),
    pytest.param(cluster(count=0), "devices[0].count", "at least 1", id="none of a kind"),
    pytest.param(cluster(count=10**12), "devices[0].count", "at most 65536", id="10^12 devices"),
    pytest.param(cluster(node=3), "devices[0].node", "quotes", id="a node's number"),
    pytest.param(cluster(links=[]), "links", "no mapping", id="a list of links"),
    pytest.param(cluster(links={"pairs": 5}), "links.pairs", "no list", id="a number of pairs"),
    pytest.param(
        cluster(links={"pairs": [{**LINK, "nodes": [["0"], ["0"]]}]}),
        "links.pairs[0].nodes",
        "two names",
        id="lists for nodes",
    ),
    pytest.param(
        cluster(links={"pairs": [{**LINK, "nodes": ["0", "9"]}]}),
        "links.pairs[0].nodes",
        "no pair of the nodes",
        id="a node that there is not",
    ),
    pytest.param(
        cluster(links={"within": {"bytes_s": 0}}),
        "links.within.bytes_s",
        "above 0",
        id="a link that is cut",
    ),
    pytest.param(
        {"devices": [DEVICE, {**DEVICE, "tflops": 2}]},
        "devices.type",
        "different types",
        id="one type, two speeds",
    ),
]


@pytest.mark.parametrize(("values", "key", "said"), CLUSTERS)
def test_the_content_of_a_cluster_file(refused, values, key, said):
    refused(lambda: parse_cluster(values), PlanError, key, said)


TEXTS = [
    pytest.param("", "COUNTxTYPE", id="nothing"),
    pytest.param("V100", "COUNTxTYPE", id="no count"),
    pytest.param("8xV101", "Did you mean 'V100'?", id="a card"),
    pytest.param("0xV100", "Count from 1", id="none"),
    pytest.param("2x0xV100", "Count from 1", id="nodes of none"),
    pytest.param("999999999xV100", "at most 65536", id="10^9 cards"),
    pytest.param("9" * 5000 + "xV100", "COUNTxTYPE", id="5,000 digits"),
    pytest.param("8xV100,", "neither a file", id="a comma at the end"),
    pytest.param("8xV101," * 90 + "8xV100", "'V100'?", id="longer than a file's name"),
    pytest.param("nosuch.json", "No such file", id="a missing file"),
]


@pytest.mark.parametrize(("text", "said"), TEXTS)
def test_the_text_of_a_cluster(refused, text, said):
    refused(lambda: read_cluster(text), PlanError, "--cluster", said)


CLUSTER_FILES = [
    pytest.param("{", "not JSON at line 1", id="half a brace"),
    pytest.param("[" * 50_000, "too deeply", id="brackets"),
    pytest.param(b"\xff\xfe", "can't decode", id="no text"),
    pytest.param('{"devices": NaN}', "NaN is no number", id="nan"),
]


@pytest.mark.parametrize(("content", "said"), CLUSTER_FILES)
def test_a_file_that_is_no_cluster(refused, write, content, said):
    file = write("cluster.json", content)
    refused(lambda: read_cluster(file), PlanError, "--cluster", str(file), said)


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 9}
GPT2["n_positions"] = 256
MODELS = [
    pytest.param({}, "model_type", "does not know the layers", id="an empty configuration"),
    pytest.param({**GPT2, "model_type": "t5"}, "model_type", "'t5'", id="another family"),
    pytest.param({"model_type": "gpt2"}, "hidden_size", "lacks it", id="no sizes"),
    pytest.param({**GPT2, "n_embd": "8"}, "n_embd", "without quotes", id="a width in quotes"),
    pytest.param({**GPT2, "n_embd": -8}, "n_embd", "at least 1", id="a negative width"),
    pytest.param({**GPT2, "n_layer": 0}, "n_layer", "at least 1", id="no layer"),
    pytest.param({**GPT2, "n_layer": 10**9}, "num_hidden_layers", "10000", id="10^9 layers"),
    pytest.param({**GPT2, "n_head": 3}, "num_attention_heads", "divisor of 8", id="heads"),
    pytest.param({**GPT2, "architectures": 3}, "architectures", "[...]", id="an architecture"),
    pytest.param(None, "model", "neither a configuration nor", id="None"),
    pytest.param("nosuch", "--model", "nor the name of a preset", id="a name"),
]


@pytest.mark.parametrize(("model", "key", "said"), MODELS)
def test_a_model_to_plan_for(refused, model, key, said):
    act = lambda: wavemare.plan(model, "2xV100", global_batch=8, sequence_length=128)  # noqa: E731
    refused(act, ModelError, key, said)


SETTINGS = [
    pytest.param({"global_batch": "8"}, "global_batch", id="a batch in quotes"),
    pytest.param({"global_batch": 10**30}, "global_batch", id="10^30 samples"),
    pytest.param({"sequence_length": 0}, "sequence_length", id="no token"),
    pytest.param({"sequence_length": 1.5}, "sequence_length", id="half a token"),
    pytest.param({"dtype": "fp8"}, "dtype", id="a dtype"),
    pytest.param({"margin": "5%"}, "margin", id="a percentage"),
    pytest.param({"margin": math.nan}, "margin", id="a margin of nan"),
    pytest.param({"margn": 0.1}, "margn", id="a misspelt setting"),
    pytest.param({"max_stages": 0}, "max_stages", id="no stage"),
    pytest.param({"zero_stages": 3}, "zero_stages", id="a number of ZeRO's"),
    pytest.param({"zero_stages": (7,)}, "zero_stages", id="ZeRO 7"),
    pytest.param({"cluster": None}, "cluster", id="no cluster"),
]


@pytest.mark.parametrize(("changes", "key"), SETTINGS)
def test_a_setting_of_the_planner(refused, changes, key):
    values = {"cluster": "2xV100", "global_batch": 8, "sequence_length": 128, **changes}
    refused(lambda: wavemare.plan("gpt2", **values), PlanError, key, repr(values[key]))


def test_nothing_fits(refused):
    small = parse_cluster(cluster(memory_gib=0.001))
    act = lambda: wavemare.plan("gpt2-xl", small, global_batch=8, sequence_length=128)  # noqa: E731
    refused(act, PlanError, "--cluster", "equal parts need", "Use more or larger devices")
