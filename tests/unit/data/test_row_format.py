# SPDX-License-Identifier: Apache-2.0
"""Chats as tokens, and which of them are trained: six public forms against a slow twin and TRL."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import processors
from transformers import AddedToken
from typer.testing import CliRunner

from support.refusals import refuses
from wavemare.cli import app
from wavemare.data.chat import describe_fates, iterate_rows, last_question, prepare_chats
from wavemare.data.row_format import IGNORED, RowFormat
from wavemare.data.sources import resolve
from wavemare.data.tokenizer import begin_text, train_tokenizer
from wavemare.errors import ConfigError, DataError

TEMPLATES = Path(__file__).parents[2] / "data/chat_templates"
FORMS = json.loads((TEMPLATES / "forms.json").read_text(encoding="utf-8"))
WITHOUT_TOOLS = ("gemma",)
A_USER_BEGINS = ("mistral", "gemma")
MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def tokenizer_of(form):
    """Return a small tokenizer with the special tokens of a form."""
    facts = FORMS[form]
    texts = [path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.jinja"))]
    tokenizer = train_tokenizer(texts, 400, kind="gpt")
    tokens = [
        AddedToken(token, special=False, normalized=False) for token in facts.get("added", ())
    ]
    tokenizer.add_tokens(tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": facts["special"]})
    tokenizer.add_special_tokens({"eos_token": facts["eos"], "pad_token": facts["eos"]})
    tokenizer.add_special_tokens({"bos_token": facts.get("bos", facts["eos"])})
    tokenizer.chat_template = (TEMPLATES / f"{form}.jinja").read_text(encoding="utf-8")
    return tokenizer


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest", "at": 7}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "the height of the tide",
            "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
        },
    }
]
ASKED = [say("user", "how high is the sea"), say("assistant", "as high as the moon pulls")]
ROWS = {
    "one turn": {"messages": ASKED},
    "three turns": {
        "messages": [*ASKED, say("user", " and\n\nnow? "), say("assistant", "\nlower "), *ASKED]
    },
    "a system that speaks": {"messages": [say("system", "be brief"), *ASKED, *ASKED]},
    "a column for the system": {"system": "be brief", "messages": ASKED},
    "nobody answers": {"messages": [*ASKED, ASKED[0]]},
    "tools": {
        "tools": json.dumps(TOOLS),
        "messages": [
            say("user", "the tide?"),
            say("assistant", "", tool_calls=[CALL]),
            say("tool", "4 m"),
            say("assistant", "four metres"),
        ],
    },
    "arguments": {
        "messages": [ASKED[0], say("assistant", "high", reasoning_content="moon")],
        "chat_template_kwargs": {"thinking": True, "enable_thinking": False},
    },
    "the assistant begins": {"messages": [say("assistant", "hello"), *ASKED]},
}
CELLS = [
    (form, name)
    for form in FORMS
    for name in ROWS
    if not (name == "tools" and form in WITHOUT_TOOLS)
    and not (name == "the assistant begins" and form in A_USER_BEGINS)
]


# --- the twin: every form written by hand ---------------------------------------------------------


def calls_of(turn):
    return [json.dumps(call["function"]) for call in turn.get("tool_calls", ())]


def chatml(turns, tools, given):
    opening = turns[0]["content"] if turns[0]["role"] == "system" else ""
    if opening or tools:
        listed = "\nFunctions:" + "".join("\n" + json.dumps(tool) for tool in tools or ())
        yield f"<|im_start|>system\n{opening}{listed if tools else ''}<|im_end|>\n", False
    for turn in turns[1 if opening else 0 :]:
        if turn["role"] == "assistant":
            yield "<|im_start|>assistant\n", False
            calls = "".join(f"<tool_call>{call}</tool_call>" for call in calls_of(turn))
            yield turn["content"] + calls + "<|im_end|>", True
            yield "\n", False
        elif turn["role"] == "tool":
            answer = f"<tool_response>{turn['content']}</tool_response>"
            yield f"<|im_start|>user\n{answer}<|im_end|>\n", False
        else:
            yield f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n", False


def llama3(turns, tools, given):
    yield "<|begin_of_text|>", False
    roles = {"tool": "ipython"}
    if tools:
        text = "Environment: functions\n" + "\n".join(map(json.dumps, tools))
        turns = [{"role": "system", "content": text}, *turns]
    for turn in turns:
        role = turn["role"]
        yield f"<|start_header_id|>{roles.get(role, role)}<|end_header_id|>\n\n", False
        text = (calls_of(turn) or [turn["content"].strip()])[0]
        yield f"{text}<|eot_id|>", role == "assistant"


def mistral(turns, tools, given):
    yield "<s>", False
    if tools:
        yield f"[AVAILABLE_TOOLS] {json.dumps(tools)}[/AVAILABLE_TOOLS]", False
    system = ""
    for turn in turns:
        text = turn["content"]
        if turn["role"] == "system":
            system = text + "\n\n"
        elif turn["role"] == "user":
            yield f"[INST] {system}{text}[/INST]", False
            system = ""
        elif turn["role"] == "tool":
            yield f"[TOOL_RESULTS] {text}[/TOOL_RESULTS]", False
        else:
            called = [f"[TOOL_CALLS] {call}" for call in calls_of(turn)]
            yield (called or [f" {text.strip()}"])[0] + "</s>", True


def gemma(turns, tools, given):
    yield "<bos>", False
    system = ""
    for turn in turns:
        if turn["role"] == "system":
            system = turn["content"] + "\n\n"
            continue
        if turn["role"] == "user":
            yield f"<start_of_turn>user\n{system}{turn['content'].strip()}<end_of_turn>\n", False
        else:
            yield "<start_of_turn>model\n", False
            yield turn["content"].strip() + "<end_of_turn>", True
            yield "\n", False
        system = ""


def glm(turns, tools, given):
    yield "[gMASK]<sop>", False
    if tools:
        yield "<|system|>\nFunctions:" + "".join("\n" + json.dumps(t) for t in tools), False
    before = None
    for turn in turns:
        mark = {"tool": "observation"}.get(turn["role"], turn["role"])
        if before != "assistant":
            yield f"<|{mark}|>", False
        before = turn["role"]
        if before == "assistant":
            text = turn["content"].strip()
            called = "".join(f"\n<tool_call>{call}</tool_call>" for call in calls_of(turn))
            end = "<|observation|>" if called else "<|user|>"
            # Without thinking, what asks for an answer ends with these marks.
            yield "\n<think></think>", None if given.get("enable_thinking") is False else True
            yield (f"\n{text}" if text else "") + called + end, True
        elif before == "tool":
            yield f"\n<tool_response>{turn['content']}</tool_response>", False
        else:
            off = before == "user" and given.get("enable_thinking") is False
            yield f"\n{turn['content']}{'/nothink' if off else ''}", False


def deepseek(turns, tools, given):
    bar, line = "\uff5c", "\u2581"
    yield f"<{bar}begin{line}of{line}sentence{bar}>", False
    yield "".join(turn["content"] for turn in turns if turn["role"] == "system"), False
    if tools:
        yield f"\n\n## Tools\n{json.dumps(tools)}", False
    thinks = given.get("thinking")
    for turn in turns:
        text = turn["content"]
        if turn["role"] == "user":
            yield f"<{bar}User{bar}>{text}", False
        elif turn["role"] == "tool":
            begin, end = (f"<{bar}tool{line}output{line}{each}{bar}>" for each in ("begin", "end"))
            yield begin + text + end, False
        elif turn["role"] == "assistant":
            yield f"<{bar}Assistant{bar}>{'<think>' if thinks else '</think>'}", False
            begin, end = (f"<{bar}tool{line}call{line}{each}{bar}>" for each in ("begin", "end"))
            called = "".join(begin + call + end for call in calls_of(turn))
            thought = turn.get("reasoning_content", "") + "</think>" if thinks else ""
            yield f"{thought}{text}{called}<{bar}end{line}of{line}sentence{bar}>", True


TWINS = {f.__name__: f for f in (chatml, llama3, mistral, gemma, glm, deepseek)}


def twin_of(form, row, tokenizer, *, marked=True):
    """Return the tokens, and which of them are trained, by the place of each in the text.

    What the twin says of a part that is neither True nor False depends on marks.
    """
    turns, tools = row["messages"], row.get("tools")
    if row.get("system"):
        turns = [say("system", row["system"]), *turns]
    given = row.get("chat_template_kwargs", {})
    text, said = "", []
    for part, trained in TWINS[form](turns, json.loads(tools) if tools else None, given):
        text += part
        said += [marked if trained is None else trained] * len(part)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    flags, place = [], 0
    for token in ids:
        size = len(tokenizer.decode([token]))
        flags.append(any(said[place : place + size]))
        place += size
    assert place == len(text)
    return ids, flags


def trained_of(row):
    return [label != IGNORED for label in row.labels]


@pytest.fixture(scope="module")
def tokenizers():
    return {form: tokenizer_of(form) for form in FORMS}


@pytest.mark.parametrize(("form", "name"), CELLS, ids=[" ".join(cell) for cell in CELLS])
def test_six_forms_are_trained_as_a_twin_says(tokenizers, form, name):
    """With marks, and without them, where the same is found by what the template adds."""
    tokenizer = tokenizers[form]
    row, marks = ROWS[name], tokenizer.chat_template
    assert MARKS.search(marks)
    try:
        for template in (marks, MARKS.sub("", marks)):
            tokenizer.chat_template = template
            ids, flags = twin_of(form, row, tokenizer, marked=template is marks)
            formatted = RowFormat(tokenizer).encode(row)
            assert formatted.row.ids == ids
            assert trained_of(formatted.row) == flags
            assert any(flags)
            assert formatted.unended == 0
            assert ids.count(tokenizer.bos_token_id) == ("bos" in FORMS[form])
    finally:
        tokenizer.chat_template = marks


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_six_forms_are_trained_as_trl_trains_them(tokenizers, form, tmp_path):
    trl = pytest.importorskip("trl")
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizers[form]
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=1, **sizes)
    model = LlamaForCausalLM(config)
    for row in (ROWS[name] for each, name in CELLS if each == form):
        given = {key: value for key, value in row.items() if key != "system"}
        if "system" in row:  # a column that TRL does not have
            given["messages"] = [say("system", row["system"]), *row["messages"]]
        arguments = trl.SFTConfig(
            tmp_path, assistant_only_loss=True, max_length=None, use_cpu=True, report_to=[]
        )
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=Dataset.from_list([given]), processing_class=tokenizer
        )
        theirs = trainer.train_dataset[0]
        ours = RowFormat(tokenizer).encode(row).row
        assert ours.ids == theirs["input_ids"]
        assert ours.labels[1:] == theirs["labels"][1:]


# --- the ends of turns ----------------------------------------------------------------------------


def trained_text(tokenizer, row):
    """Return the texts of the runs of trained tokens."""
    formatted = RowFormat(tokenizer).encode(row)
    text, parts = "", []
    for token, label in zip(*formatted.row, strict=True):
        if label == IGNORED:
            parts, text = [*parts, text], ""
        else:
            text += tokenizer.decode([token])
    return [part for part in [*parts, text] if part], formatted.unended


def outside(template, end):
    """Put an end that the marks of a template hold behind them."""
    moved = re.sub(
        rf"\{{\{{- '{re.escape(end)}' -\}}\}}\s*(\{{%- endgeneration -%\}})", r"\1", template
    )
    assert moved != template
    return moved.replace("{%- endgeneration -%}", "{%- endgeneration -%}{{- '" + end + "' -}}")


def test_an_end_outside_of_the_marks_is_trained(tokenizers):
    tokenizer = tokenizers["chatml"]
    marks = tokenizer.chat_template
    try:
        expected = trained_text(tokenizer, ROWS["tools"])
        tokenizer.chat_template = outside(marks, "<|im_end|>")
        assert trained_text(tokenizer, ROWS["tools"]) == expected
        tokenizer.chat_template = outside(marks, "<|im_end|>").replace(
            "{%- endgeneration -%}", "{%- endgeneration -%}{{- '\n' -}}"
        )
        runs, unended = trained_text(tokenizer, ROWS["one turn"])
        assert (runs, unended) == ([ASKED[1]["content"] + "\n<|im_end|>"], 0)
    finally:
        tokenizer.chat_template = marks


BY_ROLES = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_mark_of_the_next_role_ends_a_turn(tokenizers):
    """Also the last one; with marks of what is trained, the template says what a chat ends with."""
    tokenizer = tokenizers["glm"]
    marks, row = tokenizer.chat_template, ROWS["a system that speaks"]
    answer = f"\n{ASKED[1]['content']}"
    try:
        tokenizer.chat_template = BY_ROLES
        assert trained_text(tokenizer, row) == ([f"{answer}<|user|>"] * 2, 0)
        tokenizer.chat_template = BY_ROLES.replace(
            "{{ '\n' + m.content }}",
            "{% if m.role == 'assistant' %}"
            "{% generation %}{{ '\n' + m.content }}{% endgeneration %}"
            "{% else %}{{ '\n' + m.content }}{% endif %}",
        )
        assert trained_text(tokenizer, row) == ([f"{answer}<|user|>", answer], 1)
    finally:
        tokenizer.chat_template = marks


def test_answers_without_an_end_are_counted_and_told(tokenizers, tmp_path):
    tokenizer = tokenizers["chatml"]
    marks = tokenizer.chat_template
    turns = [[say("user", f"sea {i}"), say("assistant", f"wave {i}")] for i in range(40)]
    source = write(tmp_path, [{"messages": each} for each in turns])
    try:
        parts = prepare_chats(source, tokenizer, 100, tmp_path)
        assert describe_fates(parts, 100) is None
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        )
        assert trained_text(tokenizer, {"messages": turns[0]})[1] == 1
        parts = prepare_chats(source, tokenizer, 100, tmp_path)
        assert sum(part.counts["unended"] for part in parts) == 40
        assert "40 rows" in describe_fates(parts, 100)
    finally:
        tokenizer.chat_template = marks


# --- starts and ends of texts ---------------------------------------------------------------------


@pytest.fixture
def framing():
    """A tokenizer that puts a start and an end token around each text."""
    tokenizer = tokenizer_of("mistral")
    framed = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B", special_tokens=framed
    )
    assert tokenizer.decode(tokenizer("sea")["input_ids"]) == "<s>sea</s>"
    return tokenizer


@pytest.mark.parametrize("start", ["", "<s>"], ids=["without a start", "with one"])
def test_one_start_and_no_end_within(framing, start):
    formats = RowFormat(framing)
    pair = formats.encode({"prompt": f"{start}the sea", "completion": " is high"}).row
    assert framing.decode(pair.ids) == "<s>the sea is high</s>"
    kept = [label for label in pair.labels if label != IGNORED]
    assert framing.decode(kept) == " is high</s>"
    text = formats.encode({"text": f"{start}the sea"}).row
    assert framing.decode(text.ids) == "<s>the sea</s>"
    assert framing.decode(begin_text(f"{start}the sea", framing)) == "<s>the sea"
    assert trained_of(text)[1:] == [True] * (len(text.ids) - 1)
    for name in ("one turn", "tools"):
        assert formats.encode(ROWS[name]).row.ids.count(framing.bos_token_id) == 1


def test_a_prompt_and_its_completion_may_be_chats(tokenizers):
    for form, tokenizer in tokenizers.items():
        row = {"prompt": [say("system", "be brief"), ASKED[0]], "completion": [ASKED[1]]}
        ids, flags = twin_of(form, {"messages": row["prompt"] + row["completion"]}, tokenizer)
        encoded = RowFormat(tokenizer).encode(row).row
        assert encoded.ids == ids
        # As in TRL, blanks behind the end are trained, and nothing that the prompt ends with.
        flags[flags.index(True) :] = [True] * (len(flags) - flags.index(True))
        assert trained_of(encoded) == flags
        question = last_question(row, tokenizer)
        assert (
            tokenizer(question, add_special_tokens=False)["input_ids"] == ids[: flags.index(True)]
        )


def test_template_arguments_of_all_rows_yield_to_those_of_a_row(tokenizers):
    formats = RowFormat(tokenizers["deepseek"], {"thinking": True})
    plain = {"messages": ROWS["arguments"]["messages"]}
    assert formats.encode(plain) == RowFormat(tokenizers["deepseek"]).encode(ROWS["arguments"])
    own = {**plain, "chat_template_kwargs": '{"thinking": false}'}
    assert formats.encode(own) == RowFormat(tokenizers["deepseek"]).encode(plain)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def show(tokenizers, tmp_path):
    """Run ``wavemare data show`` on rows, with the tokenizer of ChatML."""
    tokenizers["chatml"].save_pretrained(tmp_path / "model")

    def run(rows, *options, **environment):
        write(tmp_path, rows)
        words = ["data", "show", str(tmp_path / "rows.jsonl"), *options]
        ran = CliRunner().invoke(
            app, [*words, "--tokenizer", str(tmp_path / "model")], env=environment
        )
        if ran.exception:
            raise ran.exception
        return ran.output

    return run


def test_the_command_marks_each_trained_token(show, tokenizers, tmp_path):
    tokenizer = tokenizers["chatml"]
    rows = [ROWS["tools"], {"messages": ASKED[:1]}, ROWS["one turn"], ROWS["one turn"]]
    output = show(rows, "--rows", "3")
    assert "\x1b" not in output
    lines = re.findall(r"^ +(\d+)  (.)  +(\d+)  '", output, re.MULTILINE)
    expected = [
        (str(place), "»" if label != IGNORED else " ", str(token))
        for row in rows[:3]
        for place, (token, label) in enumerate(
            zip(*RowFormat(tokenizer).encode(row).row, strict=True)
        )
    ]
    assert lines == expected
    # In a process of its own: rich keeps what it has found out about the terminal.
    words = ["data", "show", str(tmp_path / "rows.jsonl"), "--rows", "3"]
    ran = subprocess.run(
        [sys.executable, "-m", "wavemare", *words, "--tokenizer", str(tmp_path / "model")],
        env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    marked = re.findall(r"^\x1b\[32m +\d+  (.)", ran.stdout, re.MULTILINE)
    assert marked == ["»"] * sum(mark == "»" for _, mark, _ in expected)


def test_the_command_takes_templates_and_their_arguments(show, tmp_path):
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + kind + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    own = ("--chat_template", str(tmp_path / "own.jinja"))
    output = show([ROWS["one turn"]], *own, "--chat_template_kwargs", '{"kind": "!"}')
    assert f"»{ASKED[1]['content']}!<|endoftext|>«" in output
    with refuses(DataError, "--chat_template_kwargs", "{"):
        show([ROWS["one turn"]], "--chat-template-kwargs", "{")
    with refuses(ConfigError, "--chat_template"):
        show([ROWS["one turn"]], "--chat-template", str(tmp_path / "none"))


# --- columns of files, and refusals ---------------------------------------------------------------


def write(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return resolve(str(folder / name))


def test_columns_beside_a_chat_are_read_wherever_they_begin(tmp_path):
    """From JSON also where only a late row has them, in its own order of keys; from tables too."""
    plain = {"messages": ASKED}
    late = {"messages": ROWS["tools"]["messages"], "tools": TOOLS, "system": "s", "other": 1}
    source = write(tmp_path, [plain] * 1100 + [late])
    *_, before, last = iterate_rows(source)
    assert before == plain
    assert json.dumps(last["tools"]) == json.dumps(TOOLS)
    assert last == {key: value for key, value in late.items() if key != "other"}
    for suffix in ("csv", "parquet"):
        given = {"messages": json.dumps(ASKED), "tools": json.dumps(TOOLS), "system": "2024-01-01"}
        getattr(Dataset.from_list([given]), f"to_{suffix}")(tmp_path / f"rows.{suffix}")
        assert list(iterate_rows(resolve(str(tmp_path / f"rows.{suffix}")))) == [given]
    Dataset.from_list([{"messages": ASKED}, {"messages": late["messages"]}]).to_parquet(
        tmp_path / "nested.parquet"
    )
    first, second = iterate_rows(resolve(str(tmp_path / "nested.parquet")))
    assert first == {"messages": ASKED}
    assert second["messages"][1]["tool_calls"] == [CALL]


def test_files_give_the_rows_that_are_formatted_alone(tokenizers, tmp_path):
    """Functions keep their order of keys, and the arguments of all rows are part of the cache."""
    tokenizer = tokenizers["glm"]
    rows = [
        {
            **ROWS["tools"],
            "tools": TOOLS,
            "messages": [say("user", f"{i}"), *ROWS["tools"]["messages"]],
        }
        for i in range(30)
    ]
    source = write(tmp_path, rows)
    for given in (None, {"enable_thinking": False}):
        parts = prepare_chats(source, tokenizer, 999, tmp_path, template_arguments=given)
        expected = [RowFormat(tokenizer, given).encode(row).row for row in rows]
        # Not one assertion about all: pytest would take minutes to show how they differ.
        found = {tuple(row.ids): row.labels for part in parts for row in part}
        assert [found.get(tuple(row.ids)) == row.labels for row in expected] == [True] * 30


def test_the_side_of_a_row_does_not_depend_on_the_order_of_its_keys(tokenizers, tmp_path):
    rows = [{"messages": [say("user", f"sea {i}"), say("assistant", "wave")]} for i in range(60)]
    turned = [
        {"messages": [dict(reversed(turn.items())) for turn in row["messages"]]} for row in rows
    ]
    one, other = (
        prepare_chats(write(tmp_path, each, f"{i}.jsonl"), tokenizers["chatml"], 100, tmp_path)
        for i, each in enumerate((rows, turned))
    )
    assert [row.ids for row in one[1]] == [row.ids for row in other[1]]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"messages": "sea"}, "--data"),
        ({"messages": []}, "--data"),
        ({"messages": [{"content": "sea"}]}, "--data"),
        ({"messages": ASKED, "tools": "sea"}, "--data"),
        ({"messages": [say("system", "a"), *ASKED], "system": "b"}, "--data"),
        ({"messages": ASKED, "chat_template_kwargs": [1]}, "--data"),
        ({"messages": ASKED, "chat_template_kwargs": {"truncation": True}}, "--data"),
        ({"prompt": [ASKED[0]], "completion": "sea"}, "--data"),
        ({"prompt": "sea", "completion": [ASKED[1]]}, "--data"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_rows_that_are_refused(tokenizers, row, key):
    with refuses(DataError, key):
        RowFormat(tokenizers["chatml"]).encode(row)


def test_a_template_that_a_user_must_begin_says_so(tokenizers):
    with refuses(DataError, "--data") as caught:
        RowFormat(tokenizers["gemma"]).encode(ROWS["the assistant begins"])
    assert "roles must alternate" in str(caught.value)
