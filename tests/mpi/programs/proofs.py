# SPDX-License-Identifier: Apache-2.0
"""Run the named proofs over MPI or torch: FOLDER TRANSPORT SIZES NAME..."""

import sys

from common import World, run_proofs


def main():
    kind, sizes, names = sys.argv[2], [int(size) for size in sys.argv[3].split(",")], sys.argv[4:]
    world = World(kind)
    sizes = [size for size in sizes if size <= world.size]
    proofs = {}
    for name in names:
        module, _, function = name.partition(".")
        proof = getattr(__import__(module), function or module)
        proofs[name] = lambda world, checks, proof=proof: proof(world, checks, sizes)
    run_proofs(world, proofs)


main()
