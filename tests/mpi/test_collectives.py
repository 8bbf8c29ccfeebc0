# SPDX-License-Identifier: Apache-2.0
"""The collectives on real ranks, over MPI and torch, against sums made one element at a time."""

import json

import pytest

SHORT = (
    "reductions",
    "reductions.chunks",
    "partitions.reduce_scatters",
    "partitions.allgathers",
    "rows",
    "side_by_side.handles",
    "side_by_side.counters",
    "side_by_side.two_communicators",
    "side_by_side.nodes",
    "side_by_side.one_node",
    "side_by_side.unnamed",
    "side_by_side.selection",
    "side_by_side.calibrated",
    "refusals.refusals",
    "refusals.unusual",
    "refusals.closing",
    "disagreements",
)
MANY = (
    "reductions",
    "reductions.chunks",
    "partitions.reduce_scatters",
    "partitions.allgathers",
    "rows",
)
SMALL_WORLD = tuple(name for name in SHORT if name not in {"side_by_side.nodes", "disagreements"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("proofs")


@pytest.fixture
def found(start, folders):
    """Run proofs in one start of all ranks, and return what each rank found, by proof."""

    def run(kind, ranks, sizes, names):
        folder = folders / f"{kind}-{ranks}-{sizes}".replace(",", "")
        if not (folder / "output").exists():
            folder.mkdir()
            job = start("proofs.py", kind, sizes, *names, ranks=ranks, timeout=280, folder=folder)
            (folder / "output").write_text(f"exit code {job.code}\n{job.output}")
        output = (folder / "output").read_text()[-6000:]
        files = [folder / f"rank_{rank}.json" for rank in range(ranks)]
        missing = [file.name for file in files if not file.exists()]
        assert not missing, f"without {missing}: {output}"
        return [json.loads(file.read_text()) for file in files], output

    return run


@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", ["mpi", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHORT)
def test_four_ranks(found, kind, name):
    _check(*found(kind, 4, "4", SHORT), name)


@pytest.mark.slow
@pytest.mark.world_size(5)
@pytest.mark.parametrize("name", MANY)
def test_groups_of_one_to_five_ranks_over_mpi(found, name):
    _check(*found("mpi", 5, "1,2,3,5", MANY), name)


@pytest.mark.slow
@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", MANY)
def test_groups_of_one_to_three_ranks_over_torch(found, name):
    _check(*found("torch", 3, "1,2,3", MANY), name)


@pytest.mark.slow
@pytest.mark.world_size(1)
@pytest.mark.parametrize("kind", ["mpi", "torch"])
@pytest.mark.parametrize("name", SMALL_WORLD)
def test_a_world_of_one(found, kind, name):
    _check(*found(kind, 1, "1", SMALL_WORLD), name)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_split_transport_gives_back_all_that_it_had(found):
    _check(*found("mpi", 2, "2", ["side_by_side.in_turn"]), "side_by_side.in_turn")


def _check(ranks, output, name):
    for rank, result in enumerate(ranks):
        assert name in result, f"rank {rank} did not get to it: {output}"
        assert result[name]["failures"] == [], f"rank {rank}: {result[name]['failures'][:5]}"
        assert result[name]["count"] > 0
