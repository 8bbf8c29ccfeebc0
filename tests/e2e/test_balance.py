# SPDX-License-Identifier: Apache-2.0
"""``--balance`` of the recipes: the same training, shared otherwise."""

import json

import pytest

from wavemare.parallel.layout.layout import Layout
from wavemare.report import read_run

TINY_GPT = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def losses_of(run):
    return [loss for _, loss in read_run(run).series("loss")]


def test_a_plan_changes_the_shares_and_nothing_that_is_learnt(
    recipe, small_options, recipe_config, tmp_path
):
    config = recipe_config("gpt/pretrain", "zero")
    batch = json.loads(config.read_text())["train_batch_size"]
    shares = (batch - 3, 3)

    def plan_of(shares):
        plan = Layout(global_batch=batch, shares=shares, data_parallel=2, zero_stage=1)
        file = tmp_path / f"{shares[0]}.json"
        file.write_text(plan.to_json())
        return file

    # Dropout would draw otherwise for other shares.
    model = tmp_path / "model.json"
    model.write_text(json.dumps({**TINY_GPT, **dict.fromkeys(DROPOUTS, 0.0)}))
    equal, unequal = tmp_path / "equal", tmp_path / "unequal"
    words = ["gpt/pretrain", "--deepspeed_config", config]
    for run, plan in ((equal, plan_of((batch // 2,) * 2)), (unequal, plan_of(shares))):
        options = small_options("gpt", run, model_config=model, balance=plan)
        ended = recipe(*words, *options).check()
    assert "wavemare.parallel's, see below" in ended.output
    assert "layout " in ended.output.split("wavemare.parallel's, see below")[1]
    assert json.loads((unequal / "layout.json").read_text())["shares"] == list(shares)
    expected, found = losses_of(equal), losses_of(unequal)
    assert found[:2] == pytest.approx(expected[:2], abs=1e-6)  # before the first update
    assert found == pytest.approx(expected, abs=1e-3)
    assert found != expected  # sums of other parts are rounded otherwise
    manifest = (unequal / "checkpoints" / "step-000020" / "wavemare.json").read_text()
    assert Layout.from_json((unequal / "layout.json").read_text()).digest in manifest
    config_of_run = json.loads((unequal / "config.json").read_text())["configuration"]
    balance = config_of_run["deepspeed"]["wavemare"]["balance"]
    assert balance == {"shares": list(shares), "mean": "tokens"}

    ended = recipe(
        *words,
        *small_options("gpt", unequal, model_config=model, resume=True, max_steps=22),
        *("--balance", plan_of((batch - 4, 4))),
    )
    ended.check()
    assert json.loads((unequal / "layout.json").read_text())["shares"] == [batch - 4, 4]
    assert len(losses_of(unequal)) > len(found)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["zero", "pipeline"])
def test_measured_plans_train_and_resume(recipe, small_options, recipe_config, tmp_path, engine):
    config = recipe_config("bert/pretrain", engine)
    run = tmp_path / "run"
    words = ["bert/pretrain", "--deepspeed_config", config]
    ended = recipe(*words, *small_options("bert", run, balance="auto", max_steps=24)).check()
    plan = Layout.from_json((run / "layout.json").read_text())
    assert plan.world_size == 2
    assert plan.stages == (2 if engine == "pipeline" else 1)
    assert f"layout {plan.digest[:12]}" in ended.output
    losses = losses_of(run)
    assert losses[-1] < losses[0]
    options = small_options("bert", run, balance="auto", resume=True, max_steps=28)
    assert "resumed after step 24" in recipe(*words, *options).check().output
    if engine == "pipeline":
        assert Layout.from_json((run / "layout.json").read_text()) == plan
