# SPDX-License-Identifier: Apache-2.0
"""Local steps: replicas step alone, and exchange the changes of their weights now and then.

In: the weights of a replica after each of its steps. Out: the common weights. Read `steps.py`
first; `wire.py` has the messages. `elastic.py` adds replicas that come and go, and asks `quorum.py`
who is there.
"""
