# SPDX-License-Identifier: Apache-2.0
"""Rows to fine-tune on: what is trained of them against a slow twin, packing, and refusals."""

import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from support.refusals import refuses
from wavemare.data.chat import (
    ChatSamples,
    describe_fates,
    encode_row,
    fit_row,
    iterate_rows,
    mark_trained,
    pack,
    prepare_chats,
    read_chats,
)
from wavemare.data.row_format import Row
from wavemare.data.sources import resolve
from wavemare.data.tokenizer import train_tokenizer
from wavemare.errors import DataError, ModelError
from wavemare.recipes.llama.sft import label_answers
from wavemare.training.chats import TrainingChats
from wavemare.training.models import check_packing

END = "<|endoftext|>"
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
# The end of a turn is outside of the markers, as some templates have it.
MARKED = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)
# Forgets what was said before the last turn.
FORGETFUL = "{% for m in messages %}{{ m.role }}{% if loop.last %}{{ m.content }}{% endif %}"
FORGETFUL += "{{ eos_token }}{% endfor %}"
TINY = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def tokenizer(texts):
    return train_tokenizer(texts, 300, kind="gpt")


def chats(count):
    draw = random.Random(5)
    words = ["sea", "wave", "mare", "tide", "pipe", "stage", "clock", "assistant"]

    def say(role):
        content = " ".join(draw.choice(words) for _ in range(draw.randint(1, 9)))
        return {"role": role, "content": content}

    first = [[say("system")] if draw.random() < 0.5 else [] for _ in range(count)]
    turns = [[say(r) for r in ("user", "assistant") * draw.randint(1, 3)] for _ in range(count)]
    return [{"messages": [*a, *b]} for a, b in zip(first, turns, strict=True)]


def slow_row(messages, tokenizer):
    """Write a chat by hand, and look up in which turn each token begins."""
    text, speaker = "", []
    for turn in messages:
        head, said = f"<{turn['role']}>\n", turn["content"] + END
        text += head + said + "\n"
        trained = turn["role"] == "assistant"
        speaker += [False] * len(head) + [trained] * len(said) + [False]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    labels, position = [], 0
    for token in ids:
        labels.append(token if speaker[position] else -100)
        position += len(tokenizer.decode([token]))
    assert position == len(text)
    return Row(ids, labels)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefix", "by markers"])
def test_what_the_assistant_says_is_trained_to_its_end(tokenizer, template):
    tokenizer.chat_template = template
    rows = chats(40)
    expected = [slow_row(row["messages"], tokenizer) for row in rows]
    assert [encode_row(row, tokenizer) for row in rows] == expected
    assert fit_row(expected[0], 1000) == (expected[0], "whole")
    length = len(expected[0].ids) - 3
    cut = Row(expected[0].ids[:length], expected[0].labels[:length])
    assert fit_row(expected[0], length) == (cut, "cut")
    shown = mark_trained(expected[0], tokenizer)
    answers = [m["content"] for m in rows[0]["messages"] if m["role"] == "assistant"]
    assert [part.split("«")[0] for part in shown.split("»")[1:]] == [a + END for a in answers]


def test_completions_and_texts(tokenizer):
    pair = {"prompt": "the sea ", "completion": "and a wave"}
    row = encode_row(pair, tokenizer)
    before, after = (tokenizer(text)["input_ids"] for text in pair.values())
    end = tokenizer.eos_token_id
    assert row == Row([*before, *after, end], [-100] * len(before) + [*after, end])
    row = encode_row({"text": "a wave" + END}, tokenizer)
    ids = tokenizer("a wave")["input_ids"]
    assert row == Row([*ids, end], [-100, *ids[1:], end])


def test_packing_against_a_slow_twin():
    draw = random.Random(3)
    lengths = [draw.randint(1, 30) for _ in range(300)]
    slow = []
    for row in sorted(range(300), key=lambda row: -lengths[row]):
        rooms = [(30 - sum(lengths[r] for r in rows), i) for i, rows in enumerate(slow)]
        fitting = [(room, i) for room, i in rooms if room >= lengths[row]]
        if fitting:
            slow[min(fitting)[1]].append(row)
        else:
            slow.append([row])
    assert pack(lengths, 30) == slow


def tiny(kind, config, **more):
    torch.manual_seed(2)
    model = kind(config(**TINY, **more)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def test_packed_rows_compute_what_they_compute_alone(tokenizer):
    tokenizer.chat_template = PLAIN
    rows = [encode_row(row, tokenizer) for row in chats(12)]
    model = tiny(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2, attn_implementation="sdpa")
    samples = ChatSamples(rows, 400, tokenizer.pad_token_id, packs=True, positions=True)
    assert len(samples) < 12
    total = torch.tensor(0.0)
    alone = {}
    with torch.no_grad():
        for row in rows:
            output = model(torch.tensor([row.ids]), labels=torch.tensor([row.labels]))
            trained = sum(label != -100 for label in row.labels)
            alone[tuple(row.ids)] = output.logits[0]
            total += output.loss * trained
        packed = torch.tensor(0.0)
        for sample in (samples[i] for i in range(len(samples))):
            (batch,) = label_answers([{name: values[None] for name, values in sample.items()}])
            output = model(**batch, use_cache=False, num_items_in_batch=1)
            packed += output.loss
            starts = [*(sample["position_ids"] == 0).nonzero()[:, 0].tolist(), 400]
            for start, stop in pairwise(starts):
                expected = alone.pop(tuple(sample["input_ids"][start:stop].tolist()), None)
                if expected is not None:  # what fills the sample up is no row
                    torch.testing.assert_close(
                        output.logits[0, start:stop], expected, atol=1e-5, rtol=1e-5
                    )
    assert not alone
    assert float(packed) == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize(("limit", "ranks", "micro"), [(None, 1, 4), (9, 2, 2), (2, 2, 8)])
def test_the_validation_loss_of_packed_rows_is_that_of_rows_alone(tokenizer, limit, ranks, micro):
    tokenizer.chat_template = PLAIN
    rows = [encode_row(row, tokenizer) for row in chats(20)]
    model = tiny(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2)

    def loss(packs):
        chats = TrainingChats(None, tokenizer, 300, None, rows, rows, None, 0, packs)
        labelled, total, counts = 0, 0.0, []
        for rank in range(ranks):
            engine = SimpleNamespace(
                data_rank=rank, data_world_size=ranks, train_micro_batch_size_per_gpu=lambda: micro
            )
            loader = [*label_answers(chats.evaluation_loader(engine, limit))]
            counts.append((len(loader), {len(batch["labels"]) for batch in loader}))
            for batch in loader:
                number = int((batch["labels"][:, 1:] != -100).sum())
                with torch.no_grad():  # the sum: what divides is given
                    total += float(model(**batch, use_cache=False, num_items_in_batch=1).loss)
                labelled += number
        assert len({str(count) for count in counts}) == 1  # ranks meet in each micro-batch
        return labelled, total / labelled, counts[0][0]

    alone, packed = loss(packs=False), loss(packs=True)
    if limit != 9:  # rows alone leave out what fills no micro-batch: one of nine
        assert packed[0] == alone[0]
        assert packed[1] == pytest.approx(alone[1], rel=1e-5)
    chosen = [rows[i * 20 // (limit or 20)] for i in range(limit or 20)]
    assert packed[0] == sum(label != -100 for row in chosen for label in row.labels)
    assert packed[2] <= alone[2]


def test_a_model_that_mixes_packed_rows_is_refused():
    check_packing(tiny(GPT2LMHeadModel, GPT2Config))
    with refuses(ModelError, "--model", "BloomForCausalLM"):
        check_packing(tiny(BloomForCausalLM, BloomConfig))


def test_rows_without_packing_are_filled_up(tokenizer):
    row = encode_row({"text": "a wave"}, tokenizer)
    (sample,) = ChatSamples([row], 9, 7, packs=False, positions=False)
    rest = 9 - len(row.ids)
    assert sample["input_ids"].tolist() == row.ids + [7] * rest
    assert sample.keys() == {"input_ids", "trained"}
    (batch,) = label_answers([{name: values[None] for name, values in sample.items()}])
    assert batch["labels"].tolist() == [row.labels + [-100] * rest]
    assert batch.keys() == {"input_ids", "labels"}
    for packs in (False, True):
        with refuses(DataError, "max_length", 2):
            ChatSamples([row], 2, 7, packs=packs, positions=packs)


@pytest.mark.parametrize(
    ("row", "template", "key"),
    [
        (chats(1)[0], None, "--chat_template"),
        (chats(3)[2], FORGETFUL, "--data"),
        ({"prompt": "a", "completion": 3}, PLAIN, "--data"),
    ],
)
def test_rows_that_are_refused(tokenizer, row, template, key):
    tokenizer.chat_template = template
    with refuses(DataError, key):
        encode_row(row, tokenizer)


def test_columns_tell_the_kind_of_rows(tmp_path):
    file = tmp_path / "rows.jsonl"

    def read(name):
        parts = read_chats(resolve(name), Path(mkdtemp(dir=tmp_path)))
        return [[json.loads(text) for text in part["row"]] for part in parts]

    def load(**row):
        rows = [{**row, "text": f"{i}", "id": i} for i in range(50)]
        file.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return read(str(file))

    train, validation = load(messages=[{"role": "user", "content": "sea"}])
    assert train[0] == {"messages": [{"role": "user", "content": "sea"}]}
    train, validation = load(prompt="a", completion="b")
    assert train[0] == {"prompt": "a", "completion": "b"}
    train, validation = load()
    assert sorted(int(row["text"]) for row in train + validation) == list(range(50))
    assert 0 < len(validation) < 10
    for i, (number, answer) in enumerate([(1, "2024-01-01"), ("x", "2024-01-02")]):
        turns = [{"role": "user", "content": answer}, {"role": "tool", "content": [{f"{i}": i}]}]
        (tmp_path / f"{i}.jsonl").write_text(json.dumps({"messages": turns, "n": number}) + "\n")
    (_, validation) = read(str(tmp_path / "?.jsonl"))
    assert validation[0]["messages"][0]["content"].startswith("2024-01-0")
    assert list(validation[0]["messages"][1]["content"][0]) in (["0"], ["1"])
    file.write_text('{"question": "a", "answer": "b"}\n')
    with refuses(DataError, "--data", str(file)):
        read(str(file))


@pytest.mark.parametrize("name", ["prompt", "completion"])
@pytest.mark.parametrize("value", [3, 1.5, True, {"role": "user", "content": "sea"}], ids=repr)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_prompt_or_completion_is_text_or_messages(tmp_path, name, value, kind):
    file = tmp_path / f"rows.{kind}"

    def load(given):
        rows = [{"prompt": "a", "completion": "b", name: given}] * 2
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [row[name] for row in iterate_rows(resolve(str(file)))]

    for given in ("text", [{"role": "user", "content": "sea"}]):  # the remedy
        assert load(given) == [given] * 2
    with refuses(DataError, "--data", str(file)):
        load(value)


def test_the_default_rows_describe_functions(tmp_path):
    train, validation = read_chats(resolve(None), tmp_path)
    assert len(train) > 1000
    assert len(validation)
    assert all(json.loads(text)["prompt"].startswith("def ") for text in train["row"])


def write(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return resolve(str(folder / "rows.jsonl"))


def pair(number, prompt=1, answer=1):
    words = ["sea", "wave", "mare", "tide"]
    text = " ".join(words[int(d) % 4] for d in f"{number:08b}")
    return {"prompt": f"{text} " * prompt, "completion": f" {text}" * answer}


@pytest.mark.parametrize("mode", ["cut", "skip"])
def test_long_rows_are_cut_or_left_out_and_counted(tokenizer, tmp_path, mode):
    """Also among the rows for validation; whole rows stay what they are alone."""
    rows = [pair(i) for i in range(200)]  # whole
    rows += [pair(i + 200, answer=9) for i in range(60)]  # the answer is cut
    rows += [pair(i + 260, prompt=9) for i in range(40)]  # no answer is left
    length = 60
    whole = [encode_row(row, tokenizer) for row in rows]
    kept = [Row(*(part[:length] for part in row)) for row in whole[: 260 if mode == "cut" else 200]]
    assert {len(row.ids) > length for row in whole[200:]} == {True}
    parts = prepare_chats(write(tmp_path, rows), tokenizer, length, tmp_path, long_rows=mode)
    assert sorted([row for part in parts for row in part]) == sorted(kept)
    assert all(len(part) for part in parts)
    counts = Counter(parts[0].counts) + Counter(parts[1].counts)
    cut = 60 if mode == "cut" else 0
    assert counts["rows"] == 300
    assert (counts["cut"], counts["skipped"]) == (cut, 100 - cut)
    assert [f"{cut}" in describe_fates(parts, length), "300" in describe_fates(parts, length)]
    known = [{**row} for row in rows]
    assert parts[1].first in known
    assert [part.lengths.tolist() for part in parts] == [[len(r.ids) for r in p] for p in parts]


def test_rows_in_which_nothing_is_trained_are_left_out(tokenizer, tmp_path):
    tokenizer.chat_template = PLAIN
    asked = [{"messages": [{"role": "user", "content": f"sea {i}"}]} for i in range(20)]
    parts = prepare_chats(write(tmp_path, chats(100) + asked), tokenizer, 500, tmp_path)
    assert sum(part.counts.get("empty", 0) for part in parts) == 20
    assert sum(map(len, parts)) == 100
    with refuses(DataError, "--data", str(tmp_path / "rows.jsonl")):
        prepare_chats(write(tmp_path, asked), tokenizer, 500, tmp_path)


def test_several_workers_format_what_one_does(tokenizer, tmp_path):
    source = write(tmp_path, [pair(i, prompt=i % 3 + 1) for i in range(2300)])
    one, two = (
        prepare_chats(source, tokenizer, 100, tmp_path / str(workers), workers=workers)
        for workers in (1, 2)
    )
    for mine, theirs in zip(one, two, strict=True):
        assert [*mine] == [*theirs]
        assert mine.counts == theirs.counts


def test_rows_are_formatted_once_for_the_same_data_and_options(tokenizer, tmp_path):
    source = write(tmp_path, [pair(i) for i in range(40)])

    def formats(length=100, tokenizer=tokenizer, **options):
        before = {*tmp_path.glob("rows-*")}
        prepare_chats(resolve(source.name), tokenizer, length, tmp_path, **options)
        return {*tmp_path.glob("rows-*")} != before

    assert formats()
    assert not formats()
    assert formats(length=90)
    assert formats(long_rows="skip")
    tokenizer.chat_template = PLAIN
    assert formats()
    assert formats(tokenizer=train_tokenizer(["other"], 300, kind="gpt"))
    write(tmp_path, [pair(i) for i in range(41)])
    assert formats()


def test_an_error_in_a_row_reaches_all_that_wait_for_it(tokenizer, tmp_path):
    """The row is read once: those that wait raise what the first one found."""
    source = write(tmp_path, [pair(i) for i in range(400)] + [{"prompt": "a", "completion": 3}])
    start = threading.Barrier(3)

    def prepare(_):
        start.wait()
        with pytest.raises(DataError) as caught:
            prepare_chats(source, tokenizer, 100, tmp_path / "cache")
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        errors = {*pool.map(prepare, range(3))}
    assert len(errors) == 1
    source = write(tmp_path, [pair(i) for i in range(400)])  # mended
    assert len(prepare_chats(source, tokenizer, 100, tmp_path / "cache")) == 2
