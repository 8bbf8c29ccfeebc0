# SPDX-License-Identifier: Apache-2.0
"""A network of one rank, from which tests make others."""

from wavemare.comm.transport.base import Transport


class Alone(Transport):
    """A network of one rank."""

    name, rank, size, timeout_s, host = "none", 0, 1, 1.0, "here"
    world_ranks = (0,)

    def begin(self):
        return self

    def start(self):
        pass

    def wait(self):
        pass

    def reduces(self, dtype):
        return True

    def _all_reduce(self, flat):
        pass

    def split(self, colour):
        return self

    def close(self):
        pass
