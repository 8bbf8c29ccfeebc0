# SPDX-License-Identifier: Apache-2.0
"""What may be asked of ``wavemare bench wave``."""

from typing import Any

import pytest

from wavemare.bench.wave.request import WaveRequest
from wavemare.errors import ConfigError


def test_defaults_are_valid_and_travel_as_json() -> None:
    for request in (
        WaveRequest(),
        WaveRequest(exposed=(0,), trace="/a.json", links="/folder"),
    ):
        request.check()
        assert WaveRequest.from_json(request.to_json()) == request


def test_links_are_needed_for_exposed_communication_alone() -> None:
    assert WaveRequest().shaped
    assert not WaveRequest(exposed=(0,)).shaped


def test_a_collective_sums_hidden_states_in_fp32() -> None:
    request = WaveRequest(batch=2, sequence=3, hidden=10, heads=2)
    assert request.carry_bytes == 2 * 3 * 10 * 4


@pytest.mark.parametrize(
    ("values", "option", "named"),
    [
        ({"ranks": 1}, "--ranks", "2 or more"),
        ({"exposed": ()}, "--exposed", "0 to 80"),
        ({"exposed": (10, 81)}, "--exposed", "0 to 80"),
        ({"exposed": (-1,)}, "--exposed", "0 to 80"),
        ({"micro_batches": 1}, "--micro-batches", "2 or more"),
        ({"rounds": 0}, "--rounds", "1 or more"),
        ({"warmups": -1}, "--warmups", "0 or more"),
        ({"patience": -1}, "--patience", "0 or more"),
        ({"layers": 0}, "--layers", "1 or more"),
        ({"vocabulary": 0}, "--vocabulary", "1 or more"),
        ({"sequence": 1}, "--sequence", "2 or more"),
        ({"batch": 0}, "--batch", "1 or more"),
        ({"batch": 3}, "--batch", "even"),
        ({"heads": 3, "hidden": 6}, "--heads", "multiple of --ranks"),
        ({"hidden": 30}, "--hidden", "multiple of --heads"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], option: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WaveRequest(**values).check()
    assert caught.value.key == option
    assert named in str(caught.value)
