# SPDX-License-Identifier: Apache-2.0
"""What a model gave for a short batch, filled up to the rows of a whole one."""

import torch

from wavemare.hf.stages import filled


def test_each_row_is_repeated_with_all_its_rows_of_routers():
    logits, routers = torch.arange(4.0).reshape(2, 2), torch.arange(6.0).reshape(6, 1)
    loss = torch.tensor(0.5)
    found = filled((loss, logits, (routers,)), 2, 3)
    assert found[0] is loss
    assert found[1].tolist() == [[0, 1], [2, 3], [0, 1]]
    assert found[2][0].flatten().tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_a_whole_batch_stays():
    values = torch.ones(3), torch.tensor(1.0), None
    assert all(one is other for one, other in zip(filled(values, 3, 3), values, strict=True))
