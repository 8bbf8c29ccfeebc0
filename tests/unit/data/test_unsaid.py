# SPDX-License-Identifier: Apache-2.0
"""What templates and tokenizers could do to a chat unseen: told, refused, or without effect."""

import json

import pytest
from datasets import Dataset

from support.refusals import refuses
from wavemare.data.chat import describe_fates, iterate_rows, prepare_chats
from wavemare.data.row_format import RowFormat
from wavemare.data.sources import resolve
from wavemare.data.tokenizer import train_tokenizer
from wavemare.errors import DataError


def say(role, content, **more):
    return {"role": role, "content": content, **more}


ASKED = [say("user", "how high is the sea"), say("assistant", "as high as the moon pulls")]
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
TOOLS = [{"type": "function", "function": {"name": "tide", "description": "how high"}}]
CALLED = [
    say("user", "the tide?"),
    say("assistant", "", tool_calls=[CALL]),
    say("tool", "4 m"),
    ASKED[1],
]
SPOKEN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
SHOWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
LATEST = SPOKEN.replace("%}{{", "%}{% if m.role != 'system' %}{{", 1).replace(
    "{% endfor", "{% endif %}{% endfor"
)
WITH_CALLS = SPOKEN.replace(
    "m.content +",
    "m.content + ((m.tool_calls or []) | map(attribute='function') | list | tojson) +",
)
BLANK = [*ASKED, say("user", " and\n\nnow? "), say("assistant", "\nlower ")]
SYSTEM = [say("system", "be brief"), *ASKED]


@pytest.fixture
def tokenizer():
    made = train_tokenizer(["how high is the sea", "as high as the moon pulls"], 300, kind="gpt")
    made.chat_template = WITH_CALLS
    return made


def write(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return resolve(str(folder / "rows.jsonl"))


@pytest.mark.parametrize(
    ("template", "row", "unsaid"),
    [
        (SPOKEN, {"messages": CALLED, "tools": TOOLS}, ["tool_calls", "tools"]),
        (SPOKEN, {"messages": CALLED}, ["tool_calls"]),
        (WITH_CALLS, {"messages": CALLED}, []),
        (LATEST, {"messages": SYSTEM}, ["system"]),
        (LATEST, {"messages": ASKED}, []),
        (
            LATEST,
            {"prompt": [say("system", "be brief"), ASKED[0]], "completion": [ASKED[1]]},
            ["system"],
        ),
        (SPOKEN.replace("m.content", "(m.content | trim)"), {"messages": BLANK}, []),
    ],
    ids=["tools", "a call", "nothing", "a system", "no system", "a prompt", "blanks"],
)
def test_what_a_template_leaves_out_is_told(tokenizer, template, row, unsaid, tmp_path):
    tokenizer.chat_template = template
    assert RowFormat(tokenizer).encode(row).unsaid == unsaid
    rows = [{**row, "chat_template_kwargs": {"number": number}} for number in range(40)]
    parts = prepare_chats(write(tmp_path, rows), tokenizer, 200, tmp_path)
    assert sum(part.counts.get("unsaid", 0) for part in parts) == (40 if unsaid else 0)
    assert ("40 rows" in (describe_fates(parts, 200) or "")) == bool(unsaid)


PARTS = [{"type": "text", "text": "the tide?"}]
IN_TEXT = {"type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (SHOWN, [say("user", PARTS), ASKED[1]]),
        (SHOWN, [ASKED[0], say("tool", {"height": 4}), ASKED[1]]),
        (WITH_CALLS, [ASKED[0], say("assistant", "", tool_calls=[IN_TEXT])]),
    ],
    ids=["parts", "an object", "JSON within JSON"],
)
def test_objects_that_a_template_writes_wrongly_are_refused(tokenizer, template, turns):
    tokenizer.chat_template = template
    with refuses(DataError, "--data"):
        RowFormat(tokenizer).encode({"messages": turns})


def test_a_table_of_texts_may_hold_a_prompt_of_messages(tokenizer, tmp_path):
    row = {"prompt": [ASKED[0]], "completion": [ASKED[1]]}
    Dataset.from_list([{name: json.dumps(value) for name, value in row.items()}]).to_csv(
        tmp_path / "rows.csv"
    )
    formats = RowFormat(tokenizer)
    (read,) = iterate_rows(resolve(str(tmp_path / "rows.csv")))
    assert formats.encode(read) == formats.encode(row)
    text = {"prompt": "[1, 2", "completion": "]"}  # a text that only begins so
    assert formats.encode(text).row.ids[0] == tokenizer("[")["input_ids"][0]


def test_settings_of_a_tokenizer_change_no_row(tokenizer):
    """Padding and cutting that its file asks for, on either side, and an end that also pads."""
    expected = RowFormat(tokenizer).encode({"messages": CALLED})
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    tokenizer.backend_tokenizer.enable_padding(direction="left", length=500)
    tokenizer.backend_tokenizer.enable_truncation(7, direction="left")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert RowFormat(tokenizer).encode({"messages": CALLED}) == expected
    text = RowFormat(tokenizer).encode({"prompt": "the sea " * 9, "completion": "is high"}).row
    assert tokenizer.decode(text.ids).endswith("is high" + tokenizer.eos_token)
    assert len(text.ids) > 9
