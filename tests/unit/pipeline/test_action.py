# SPDX-License-Identifier: Apache-2.0
"""Actions and their text form."""

import pytest

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.plan.plan import Action, Kind


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F5@1", Action(Kind.FORWARD, 2, 5, 1)),
        ("0B0", Action(Kind.BACKWARD, 0, 0)),
        ("10SA12", Action(Kind.SEND_ACTIVATION, 10, 12)),
        ("3S7@0", Action(Kind.STEP, 3, 7, 0)),
        ("1U4", Action(Kind.RESTORE, 1, 4, -1)),
    ],
)
def test_the_text_form_is_stage_code_micro_batch_version(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "F3", "1F", "2f5", "2X5", "1FF3", "1SASA3"),
        *("-1F3", "1F-3", "1.0F3", "1F3@", "1F3@-1", "1F3/", "1F3/1"),
        *(" 1F3", "1F3\n", "1F3 1F4", "1F\u0663"),
    ],
)
def test_other_text_is_refused_with_the_codes(text):
    with refuses(PlanError, "action", text) as info:
        Action.parse(text)
    assert info.value.value == text
    assert all(f" {kind.value}" in info.value.remedy for kind in Kind)
