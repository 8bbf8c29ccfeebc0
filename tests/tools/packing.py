# SPDX-License-Identifier: Apache-2.0
"""How much faster packed rows train than padded ones, beside the ratio of their tokens.

Usage: python tests/tools/packing.py [--length 512] [--rows 48]

One process, a small Llama, rows of 30 to 512 tokens. Times are of the processor, for all rows.
"""

import argparse
import random
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wavemare.data.chat import ChatSamples
from wavemare.data.row_format import IGNORED, Row

SHORTEST, LONGEST, VOCABULARY = 30, 512, 1000


def make_rows(count):
    draw = random.Random(7)
    for _ in range(count):
        ids = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(SHORTEST, LONGEST))]
        yield Row(ids, [IGNORED, *ids[1:]])


def batches(rows, length, *, packs):
    samples = ChatSamples(rows, length, 0, packs=packs, positions=packs)
    parts = (samples[i] for i in range(len(samples)))
    return [{name: values[None] for name, values in part.items()} for part in parts]


def seconds(model, given):
    started = time.process_time()
    for batch in given:
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad()
    return time.process_time() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=LONGEST, help="tokens of a packed sample")
    parser.add_argument("--rows", type=int, default=48)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=max(options.length, LONGEST),
    )
    model = LlamaForCausalLM(config)
    rows = list(make_rows(options.rows))
    padded = batches(rows, LONGEST, packs=False)
    packed = batches(rows, options.length, packs=True)
    for each in (padded, packed):  # the first calls take longer
        seconds(model, each[:1])
    times = [(seconds(model, padded), seconds(model, packed)) for _ in range(2)]
    slow, fast = (min(column) for column in zip(*times, strict=True))
    tokens = sum(len(row.ids) for row in rows)
    ratio = len(padded) * LONGEST / tokens
    print(f"padded {slow:.2f} s, packed {fast:.2f} s: {slow / fast:.2f} times as fast")
    print(f"tokens with padding over real ones: {ratio:.2f}; {slow / fast / ratio:.2f} of that")


if __name__ == "__main__":
    main()
