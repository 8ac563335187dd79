"""Bundles share an NVLink domain where one has room."""

import pytest

pytest.importorskip("ray", reason="not proven: Ray is not installed")

from slime_ray.domains import LABELS, selectors

OURS, THEIRS = LABELS
RACK, OTHER = {OURS: "rack-1"}, {OURS: "rack-2"}
MACHINES = {name: {"GPU": 4.0} for name in "abcdefgh"}
PLACED = {**dict.fromkeys("abc", RACK), **dict.fromkeys("de", OTHER), "f": {}}


def bundles(*gpus):
    return [{"GPU": float(count)} for count in gpus]


@pytest.mark.parametrize(
    ("wanted", "ranks", "expected"),
    [
        (bundles(4, 4), 1, [OTHER, OTHER]),  # the smallest that holds them
        (bundles(4, 4, 4), 2, [RACK, RACK, RACK]),  # one holds all
        (bundles(4, 4, 4, 4), 2, [OTHER, OTHER, {}, {}]),  # one holds the trainer; engines go where there is room
        (bundles(4, 4, 4, 4), 4, []),  # none holds the trainer: Ray packs by machine
        (bundles(2, 2), 1, []),  # they share a machine
    ],
)
def test_bundles_share_the_smallest_domain_with_room(wanted, ranks, expected):
    assert selectors(wanted, ranks, MACHINES, PLACED) == expected


def test_machines_without_a_label_are_packed_as_ray_packs_them():
    assert selectors(bundles(4, 4), 1, MACHINES, {}) == []


def test_rays_own_label_counts_before_that_of_the_operator():
    labels = {"a": {OURS: "one", THEIRS: "x"}, "b": {OURS: "one", THEIRS: "y"}}
    two = {name: {"GPU": 4.0} for name in "ab"}
    assert selectors(bundles(4, 4), 1, two, labels) == [{OURS: "one"}] * 2
    assert selectors(bundles(4, 4), 1, two, {name: {THEIRS: "y"} for name in "ab"}) == [{THEIRS: "y"}] * 2


def test_engines_alone_share_a_domain_too():
    assert selectors(bundles(4, 4), 0, MACHINES, PLACED) == [OTHER, OTHER]
