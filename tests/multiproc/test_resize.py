# SPDX-License-Identifier: Apache-2.0
"""A checkpoint loads at other sizes: ranks, stages, schedule and ZeRO stage, ours and stock's."""

import hashlib
from itertools import product

import pytest
import torch

SAVED = ["1/1/-/fp32/AdamW", "2/0/zbv/fp32/AdamW", "2/1/1f1b/fp32/SOAP", "1/3/-/bf16/AdamW"]
LOADED = {
    2: [
        "1/1/-/fp32/AdamW:2/0/zbv/fp32/AdamW",
        "2/0/zbv/fp32/AdamW:1/3/-/fp32/AdamW",
        "1/3/-/bf16/AdamW:2/1/1f1b/bf16/AdamW",
        "2/1/1f1b/fp32/SOAP:1/2/-/fp32/SOAP",
        "1/3/-/bf16/AdamW:1/3/-/fp32/AdamW",
    ],
    1: [
        "2/0/zbv/fp32/AdamW:1/1/-/fp32/AdamW",
        "2/1/1f1b/fp32/SOAP:1/0/-/fp32/SOAP",
        "1/1/-/fp32/AdamW:1/0/-/fp32/AdamW",
    ],
}
ENGINES = ["1/0/-", "1/1/-", "1/2/-", "1/3/-", "2/0/zbv", "2/1/1f1b", "2/1/zb-h1"]
PLAIN = [f"{engine}/{precision}/AdamW" for engine in ENGINES for precision in ("fp32", "bf16")]
PLAIN.remove("1/0/-/bf16/AdamW")  # its states in DeepSpeed's wrapper have other functions
MATRICES = [f"{each}/fp32/SOAP" for each in ENGINES if each != "1/3/-"]
PIPELINES = [f"{each}/fp32/Muon" for each in ENGINES if each.startswith("2")]
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


class Matrix:
    """Saves cells and loads them at other sizes, from one folder."""

    def __init__(self, launch, tmp_path):
        self.launch, self.tmp_path = launch, tmp_path
        self.folder = tmp_path / "checkpoints"
        self.whole = {}

    def run(self, action, ranks, cells, side="ours"):
        results = self.tmp_path / f"{action}-{side}-{ranks}-{len(list(self.tmp_path.iterdir()))}"
        results.mkdir()
        words = ("resize.py", self.folder, action, side, *cells)
        done = self.launch(*words, ranks=ranks, folder=results).check()
        return {cell: [done.result(rank)[cell] for rank in range(ranks)] for cell in cells}

    def save(self, ranks, cells, side="ours"):
        self.whole |= self.run("save", ranks, cells, side)

    def compare(self, pair, found):
        """Compare the states after a load, and the losses from there, with those of the save."""
        saved = pair.split(":")[0]
        whole = self.whole[saved]
        for each in found:
            assert "losses" in each, (pair, each)
        if "Adam" in saved:
            assert joined(found) == joined(whole) != {}, pair
        assert found[0]["rates"] == whole[0]["rates"]
        right = pytest.approx(whole[0]["losses"], rel=TOLERANCE[saved.split("/")[3]])
        assert found[0]["losses"] == right, pair

    def digests(self):
        """Return the checksum of each file of the checkpoints, by its path."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


FROZEN = {
    2: ["2/0/1f1b-frozen/fp32/AdamW:1/2/--frozen/fp32/AdamW"],
    1: [
        "2/0/1f1b-frozen/fp32/AdamW:1/0/--frozen/fp32/AdamW",
        "1/2/--frozen/fp32/AdamW:1/0/--frozen/fp32/AdamW",
    ],
}


def joined(results):
    """Return the states of all weights, which the ranks of a pipeline share out."""
    states = {}
    for result in results:
        for name, own in result["states"].items():
            assert states.setdefault(name, own) == own, name
    return states


def same(one, other):
    """Return whether two contents of files are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def optimizer_of(folder):
    """Return what the ranks' optimizers have saved, by file."""
    found = {path.name: path for path in (folder / "tag").glob("*optim_states.pt")}
    assert found
    states = {name: torch.load(path, weights_only=False) for name, path in found.items()}
    kept = ("base_optimizer_state", "single_partition_of_fp32_groups")
    return {name: {k: s["optimizer_state_dict"][k] for k in kept} for name, s in states.items()}


@pytest.mark.world_size(4)
def test_replicas_that_are_cut_apart_go_on_and_come_from_one_cut(launch, tmp_path):
    """All that have a weight have the same bits of it, before and after."""
    apart, alike, zero = (
        f"2/{z}/{s}/fp32/AdamW" for z, s in ((0, "1f1b-apart"), (0, "zb-h1"), (1, "1f1b"))
    )
    matrix = Matrix(launch, tmp_path)
    matrix.save(4, [apart, alike])
    pairs = [f"{apart}:{apart}", f"{apart}:{zero}", f"{alike}:{apart}"]
    for pair, found in matrix.run("load", 4, pairs).items():
        matrix.compare(pair, found)
    assert joined(matrix.whole[apart]).keys() == joined(matrix.whole[alike]).keys()


@pytest.mark.world_size(2)
def test_a_checkpoint_goes_on_at_other_sizes(launch, tmp_path):
    matrix = Matrix(launch, tmp_path)
    matrix.save(2, SAVED)
    before = matrix.digests()
    for ranks, pairs in LOADED.items():
        for pair, found in matrix.run("load", ranks, pairs).items():
            matrix.compare(pair, found)
    after = matrix.digests()
    assert {path: after[path] for path in before} == before
    # The states of matrices have come back to the bit.
    there, back = "1/2/-/fp32/SOAP", "2/1/1f1b/fp32/SOAP"
    again = f"{back}-{there}-2".replace("/", "_")
    assert "losses" in matrix.run("load", 2, [f"{again}:{back}"])[f"{again}:{back}"][0]
    first = optimizer_of(matrix.folder / back.replace("/", "_"))
    last = optimizer_of(matrix.folder / f"{again}-{back}-2".replace("/", "_"))
    assert same(first, last)


@pytest.mark.world_size(2)
def test_frozen_weights_have_no_states_at_any_size(launch, tmp_path):
    matrix = Matrix(launch, tmp_path)
    matrix.save(2, sorted({pair.split(":")[0] for pairs in FROZEN.values() for pair in pairs}))
    for ranks, pairs in FROZEN.items():
        for pair, found in matrix.run("load", ranks, pairs).items():
            matrix.compare(pair, found)


@pytest.mark.world_size(2)
def test_stock_checkpoints_go_on_at_other_sizes_and_a_lost_file_is_named(launch, tmp_path):
    matrix = Matrix(launch, tmp_path)
    matrix.save(2, ["1/2/-/fp32/AdamW"], side="stock")
    (name,) = matrix.whole
    pairs = [f"{name}:2/1/1f1b/fp32/AdamW", f"{name}:1/1/-/fp32/AdamW"]
    for pair, found in matrix.run("load", 2, pairs).items():
        matrix.compare(pair, found)
    lost = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (matrix.folder / name.replace("/", "_") / "tag" / lost).unlink()
    pairs.append(f"{name}:{name}")
    for pair, results in matrix.run("load", 2, pairs).items():
        for found in results:
            assert found["key"] == "checkpoint", pair
            assert "optim_states of data rank 1" in found["reason"], pair


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cells", [PLAIN, MATRICES, PIPELINES], ids=["AdamW", "SOAP", "Muon"])
def test_all_sizes_go_on_at_all_others(launch, tmp_path, cells):
    matrix = Matrix(launch, tmp_path)
    matrix.save(2, cells)
    for ranks in (2, 4):
        pairs = [
            f"{saved}:{loaded}"
            for saved, loaded in product(cells, cells)
            if saved.split("/")[3] == loaded.split("/")[3]
        ]
        for pair, found in matrix.run("load", ranks, pairs).items():
            matrix.compare(pair, found)
