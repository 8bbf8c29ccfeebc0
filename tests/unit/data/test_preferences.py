# SPDX-License-Identifier: Apache-2.0
"""Rows of preferences: their tokens beside those of a slow twin, what is left out, and refusals."""

import json

import numpy as np
import pytest
import torch

from support.refusals import refuses
from wavemare.data.chat import EncodedRows, describe_fates, prepare_chats
from wavemare.data.preferences import PairSamples, iterate_pairs, sides_of
from wavemare.data.row_format import IGNORED
from wavemare.data.sources import resolve
from wavemare.data.tokenizer import train_tokenizer
from wavemare.errors import DataError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["sea", "wave", "mare", "tide", "pipe", "stage", "clock"]


@pytest.fixture
def tokenizer(texts):
    made = train_tokenizer(texts, 300, kind="gpt")
    made.chat_template = TEMPLATE
    return made


def write(folder, rows):
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return resolve(str(folder / "pairs.jsonl"))


def pairs(count, *, chats):
    rows = []
    for number in range(count):
        prompt, chosen, rejected = (" ".join(WORDS[: (number + n) % 5 + 1]) for n in range(3))
        texts = {"prompt": f"{number}", "chosen": f" {chosen}", "rejected": f" {rejected} {prompt}"}
        if chats:
            roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
            texts = {k: [{"role": roles[k], "content": v}] for k, v in texts.items()}
        rows.append(texts)
    return rows


def expected(row, tokenizer, *, chats):
    """The trained text behind the whole one, of both rows of a pair."""
    end = tokenizer.eos_token
    for name in ("chosen", "rejected"):
        if not chats:
            yield row["prompt"], row[name] + end
            continue
        asked, said = row["prompt"][0]["content"], row[name][0]["content"]
        yield f"<user>{asked}{end}<assistant>", f"{said}{end}"


@pytest.mark.parametrize("chats", [False, True], ids=["texts", "chats"])
def test_a_pair_is_two_rows_of_which_the_answers_are_trained(tmp_path, tokenizer, chats):
    rows = pairs(40, chats=chats)
    source = write(tmp_path, rows)
    parts = prepare_chats(source, tokenizer, 60, tmp_path, pairs=True)
    found = []
    for part in parts:
        samples = PairSamples(part, 60, 0)
        assert 2 * len(samples) == len(part)
        for place, lengths in enumerate(samples.lengths):
            sample = samples[place]
            assert sample["attention_mask"].sum(1).tolist() == lengths.tolist()
            assert torch.equal(sample["reference"], torch.zeros(2))
            sides = []
            for ids, labels, length in zip(
                sample["input_ids"], sample["labels"], lengths, strict=True
            ):
                assert (labels[length:] == IGNORED).all()
                start = int((labels != IGNORED).nonzero()[0])
                assert torch.equal(ids[start:length], labels[start:length])
                sides.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:length])))
            found.append(tuple(sides))
    assert sorted(found) == sorted(tuple(expected(row, tokenizer, chats=chats)) for row in rows)
    assert len(parts[1]) > 0


def test_rows_of_a_pair_are_left_out_together(tmp_path, tokenizer):
    rows = pairs(20, chats=False)
    long = {"prompt": "mare " * 50, "chosen": " a", "rejected": " b"}  # nothing of it is trained
    cut = {"prompt": "mare", "chosen": " sea" * 50, "rejected": " b"}
    parts = prepare_chats(write(tmp_path, [*rows, long, cut]), tokenizer, 30, tmp_path, pairs=True)
    assert sum(map(len, parts)) == 2 * 21
    told = describe_fates(parts, 30)
    assert "1 are cut, 2 left out" in told
    options = {"long_rows": "skip", "pairs": True}
    parts = prepare_chats(write(tmp_path, [*rows, long, cut]), tokenizer, 30, tmp_path, **options)
    assert sum(map(len, parts)) == 2 * 20


def test_the_default_pairs_describe_functions():
    rows = list(iterate_pairs(resolve(None)))
    assert len(rows) > 1000
    assert all(row["prompt"].startswith("def ") for row in rows)
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert len({row["chosen"] for row in rows}) > 1000


@pytest.mark.parametrize("value", [None, "", []], ids=repr)
@pytest.mark.parametrize("name", ["chosen", "rejected"])
def test_a_row_without_a_pair_is_refused(tmp_path, tokenizer, name, value):
    rows = pairs(10, chats=value == [])
    rows[3][name] = value
    with refuses(DataError, "--data"):
        prepare_chats(write(tmp_path, rows), tokenizer, 60, tmp_path, pairs=True)


def test_answers_have_the_form_of_their_prompt():
    turns = [{"role": "assistant", "content": "sea"}]
    row = {"prompt": "mare", "chosen": " sea", "rejected": " tide"}
    assert [side["completion"] for side in sides_of(row)] == [" sea", " tide"]
    for changed in ({"chosen": turns}, {"prompt": turns}):
        with refuses(DataError, "--data"):
            sides_of({**row, **changed})


@pytest.mark.parametrize("lost", ["prompt", "chosen", "rejected"])
def test_all_three_columns_are_needed(tmp_path, lost):
    rows = [{k: v for k, v in row.items() if k != lost} for row in pairs(3, chats=False)]
    source = write(tmp_path, rows)
    with refuses(DataError, "--data", source.name):
        list(iterate_pairs(source))


def test_samples_hold_what_a_reference_says(tmp_path, tokenizer):
    source = write(tmp_path, pairs(9, chats=False))
    rows, _ = prepare_chats(source, tokenizer, 60, tmp_path, pairs=True)
    assert isinstance(rows, EncodedRows)
    samples = PairSamples(rows, 60, 0)
    samples.reference = np.arange(samples.lengths.size, dtype=np.float32).reshape(-1, 2)
    assert samples[2]["reference"].tolist() == [4.0, 5.0]
