# SPDX-License-Identifier: Apache-2.0
"""The choice of an executor from measured rates.

In: masks and the rates of this network. Out: the executor with the lowest predicted time. Read
`cost.py` first.
"""
