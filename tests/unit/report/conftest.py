# SPDX-License-Identifier: Apache-2.0
"""Run folders made by hand: their numbers are those that a report must show."""

import json
import re
from html import unescape
from types import SimpleNamespace

import pytest

MIB = 2**20
METRICS = [
    {"step": 2, "loss": 5.5, "learning_rate": 0.001, "grad_norm": 2.0, "tokens_per_second": 900.0,
     "bubble": 0.4, "bubble_predicted": 0.1, "staleness_0": 0.75, "staleness_1": 0.0},
    {"step": 4, "loss": 4.25, "learning_rate": 0.002, "grad_norm": 1.5, "tokens_per_second": 1100.0,
     "bubble": 0.2, "bubble_predicted": 0.05, "staleness_0": 0.75, "staleness_1": 0.0},
    {"step": 4, "eval_loss": 4.125},
]  # fmt: skip
SPARSE = {"sparse_payload_bytes": 4 * MIB, "sparse_bytes_up": MIB, "sparse_bytes_down": 2 * MIB,
          "sparse_seconds": 0.02, "sparse_predicted_seconds": 0.01, "sparse_density": 0.04,
          "sparse_union": 0.07, "sparse_calls_dense": 1, "sparse_calls_pushpull": 3}  # fmt: skip
CONFIG = {
    "configuration": {
        "arguments": {"max_steps": 4, "prompt": "</script><script>window.broken = 1</script>"},
        "deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": 0.002}}},
        "batch": {"train_batch_size": 8, "gradient_accumulation_steps": 2},
        "wavemare": {"pipeline": {"stages": 2, "schedule": "pipemare", "pipemare": {"slack": 0}}},
    },
    "environment": {
        "started": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.13.0"},
        "world_size": 2,
        "command": ["python", "-m", "a b"],
    },
}
# Stage 0 computes 6 of 10 seconds, stage 1 all of 8: the bubble is the mean of 0.4 and 0.
SPANS = [
    [["0F0", 0.0, 1.0], ["0SA0", 1.0, 1.5], ["the data loader", 1.5, 2.0], ["0F1", 2.0, 3.0],
     ["0RG0", 3.0, 5.5], ["0B0", 5.5, 7.0], ["0RG1", 7.0, 8.0], ["0B1", 8.0, 9.5],
     ["0S1", 9.5, 10.5]],
    [["1F0", 2.0, 3.0], ["1B0", 3.0, 5.5], ["1F1", 5.5, 6.5], ["1B1", 6.5, 9.0],
     ["1S1", 9.0, 10.0]],
]  # fmt: skip
STEPS = [[0.0, 10.0], [2.0, 10.0]]
ORIGIN = 1_700_000_000.0


def write_run(folder, metrics=METRICS):
    """Write a run as its two ranks would have left it."""
    for name in ("timeline", "events", "checkpoints/step-4"):
        (folder / name).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    summary = {"results": {"eval_loss": 4.125}}
    (folder / "summary.json").write_text(json.dumps(summary))
    for rank, (spans, (start, end)) in enumerate(zip(SPANS, STEPS, strict=True)):
        trace = {
            "format": 1,
            "rank": rank,
            "stage": rank,
            "first_step": 3,
            "device": "cpu",
            "steps": [[ORIGIN + start, ORIGIN + end]],
            "spans": [
                [text, ORIGIN + a, ORIGIN + b, (10 + rank + i) * MIB]
                for i, (text, a, b) in enumerate(spans)
            ],
        }
        (folder / "timeline" / f"rank_{rank:05d}.json").write_text(json.dumps(trace))
    events = [
        {"step": 2, "time": 10.0, "kind": "memory", "bytes": 64 * MIB},
        {"step": 3, "time": 11.0, "kind": "warning", "text": "<b>mind</b>", "source": "wavemare"},
        {"step": 4, "time": 12.0, "kind": "checkpoint", "tag": "step-4", "seconds": 2.5},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events" / "rank_00000.jsonl").write_text(lines)
    (folder / "checkpoints" / "step-4" / "weights.pt").write_bytes(b"12345")
    manifest = {
        "format": 2,
        "saved": "2026-01-02T03:04:09.123+00:00",
        "topology": {"world_size": 2, "data": 1, "pipe": 2, "model": 1, "zero_stage": 1},
        "files": {"weights.pt": {"bytes": 5, "xxh3": ""}},
    }
    (folder / "checkpoints" / "step-4" / "wavemare.json").write_text(json.dumps(manifest))
    (folder / "checkpoints" / "latest").write_text("step-4")
    return folder


@pytest.fixture(scope="session")
def sample():
    """What run folders are made of, for tests that make their own."""
    return SimpleNamespace(metrics=METRICS, sparse=SPARSE, write=write_run)


@pytest.fixture
def run_folder(tmp_path):
    return write_run(tmp_path / "one")


@pytest.fixture
def figures_of():
    """Read the figures of a page, by the heading above each."""

    def read(html):
        figures = json.loads(re.findall(r'id="figures">(.*?)</script>', html, re.DOTALL)[0])
        pattern = r"<h[23][^>]*>([^<]*)</h[23]>|id=\"figure-(\d+)\""
        found, heading = {}, ""
        for title, number in re.findall(pattern, html):
            if title:
                heading = unescape(title)
            else:
                found[heading] = figures[int(number)]
        return found

    return read
