# SPDX-License-Identifier: Apache-2.0
"""How much faster packed rows train than padded ones, beside the ratio of their tokens.

Usage: python tests/tools/packing.py [--rows 96] [--rounds 3] [--hidden 256] [--json FILE]
       python tests/tools/packing.py --attention

One process on a CPU, a small Llama, rows of 30 to 512 tokens. The layouts take turns. Times are of
the processor, for the forward and backward passes of all rows; the medians of the rounds are given.
Padded rows stand four in a batch: filled up to 512 tokens, or to the longest of the four, in random
order or sorted by length. They get no mask of padding, which would make them slower.

With --attention the attention of 2,048 tokens alone is timed, forward and backward: of nine rows,
one by one and by a mask of blocks, and of four padded rows of 512 tokens. Medians of 9 calls.
"""

import argparse
import json
import random
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wavemare.data.chat import ChatSamples
from wavemare.data.row_format import IGNORED, Row
from wavemare.models.packed import RowMask, whole_arguments
from wavemare.recipes.llama.sft import label_answers

SHORTEST, LONGEST, VOCABULARY, TOGETHER = 30, 512, 1000, 4


def make_rows(count):
    draw = random.Random(7)
    for _ in range(count):
        ids = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(SHORTEST, LONGEST))]
        yield Row(ids, [IGNORED, *ids[1:]])


def padded(rows, length=None):
    """Return batches of rows, filled up to a length or to their longest."""
    for start in range(0, len(rows), TOGETHER):
        part = rows[start : start + TOGETHER]
        longest = length or max(len(row.ids) for row in part)
        samples = ChatSamples(part, longest, 0, packs=False, positions=False)
        yield torch.utils.data.default_collate([samples[i] for i in range(len(samples))])


def packed(rows, length):
    """Return batches of as many tokens as four padded rows have."""
    samples = ChatSamples(rows, length, 0, packs=True, positions=True)
    together = TOGETHER * LONGEST // length
    for start in range(0, len(samples), together):
        part = range(start, min(start + together, len(samples)))
        yield torch.utils.data.default_collate([samples[i] for i in part])


def build(hidden):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config)


def seconds(model, given):
    started = time.process_time()
    for batch in label_answers(given):
        more = whole_arguments(model, batch, torch.device("cpu"))
        model(**batch, **more, use_cache=False).loss.backward()
        model.zero_grad()
    return time.process_time() - started


def time_attention(heads, size, tokens, samples, **mask):
    """Return the processor's milliseconds of a call and its backward pass."""
    states = [
        torch.randn(samples, tokens, heads, size).transpose(1, 2).requires_grad_() for _ in range(3)
    ]
    found = []
    for _ in range(10):  # the first call takes longer
        started = time.process_time()
        torch.nn.functional.scaled_dot_product_attention(*states, **mask).sum().backward()
        found.append(1000 * (time.process_time() - started))
    return statistics.median(found[1:])


def attention():
    rows = [271, 400, 30, 150, 500, 230, 90, 300, 77]
    mask = RowMask([rows], torch.device("cpu"))
    for heads, size in ((4, 32), (8, 32), (12, 64)):
        one = partial(time_attention, heads, size)
        times = {
            "padded rows": one(512, 4, is_causal=True),
            "row by row": one(2048, 1, attn_mask=mask),
            "a mask of blocks": one(2048, 1, attn_mask=mask.dense()),
        }
        print(f"{heads} heads of {size}:", *(f"{name} {ms:.0f} ms," for name, ms in times.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256, help="width, a multiple of 64")
    parser.add_argument("--attention", action="store_true", help="time the attention alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.attention:
        attention()
        return
    rows = list(make_rows(options.rows))
    layouts = {
        "padded to 512": padded(rows, LONGEST),
        "padded, random order": padded(rows),
        "padded, sorted": padded(sorted(rows, key=lambda row: len(row.ids))),
        "packed to 512": packed(rows, 512),
        "packed to 2048": packed(rows, 2048),
    }
    batches = {name: list(given) for name, given in layouts.items()}
    model = build(options.hidden)
    for given in batches.values():  # the first calls take longer
        seconds(model, given[:1])
    times = {name: [] for name in batches}
    for _ in range(options.rounds):
        for name, given in batches.items():
            times[name].append(seconds(model, given))
    real = sum(len(row.ids) for row in rows)
    found = {
        name: {
            "seconds": statistics.median(times[name]),
            "tokens over real ones": sum(each["input_ids"].numel() for each in given) / real,
        }
        for name, given in batches.items()
    }
    for name, each in found.items():
        line = f"{name:22} {each['seconds']:6.2f} s, {each['tokens over real ones']:.2f} tokens"
        if name.startswith("packed"):
            for other in (other for other in found if not other.startswith("packed")):
                gained = found[other]["seconds"] / each["seconds"]
                share = gained / found[other]["tokens over real ones"]
                each[f"beside {other}"] = {"times as fast": gained, "of the ratio": share}
                line += f"; {gained:.2f} x {other} ({share:.2f} of the ratio)"
        print(line)
    if options.json is not None:
        facts = {"rows": options.rows, "rounds": options.rounds, "hidden": options.hidden}
        facts |= {"real tokens": real, "torch": torch.__version__, "layouts": found}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
