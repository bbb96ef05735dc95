"""The measurement policy of a record: its versions, and what older ones did not have."""

from __future__ import annotations

import pytest

from gemmcache.codec import Fields
from gemmcache.errors import IntegrityError
from gemmcache.records.interface import PROTOCOL, MeasurementPolicy

LATER = {
    1: {"decision_rounds", "prune_milli", "calm_rounds", "pause_ms", "heavy_us"},
    2: {"calm_rounds", "pause_ms", "heavy_us"},
    3: set(),
}


@pytest.mark.parametrize("version", sorted(LATER))
def test_a_version_is_written_and_read_without_what_came_later(version):
    policy = MeasurementPolicy(version=version)
    value = policy.to_value()
    assert set(MeasurementPolicy.__dataclass_fields__) - set(value) == LATER[version]
    assert all(getattr(policy, name) == 0 for name in LATER[version])
    assert MeasurementPolicy.from_fields(Fields(value, "policy")) == policy


@pytest.mark.parametrize("version", sorted(set(LATER) - {PROTOCOL}))
def test_a_field_that_came_later_is_unknown_to_an_older_version(version):
    value = MeasurementPolicy(version=version).to_value()
    with pytest.raises(IntegrityError, match="calm_rounds"):
        MeasurementPolicy.from_fields(Fields({**value, "calm_rounds": 5}, "policy"))


@pytest.mark.parametrize("version", [0, PROTOCOL + 1])
def test_a_version_that_is_not_known_is_refused(version):
    with pytest.raises(IntegrityError, match="version"):
        MeasurementPolicy.from_fields(Fields({**MeasurementPolicy().to_value(), "version": version}, "policy"))
