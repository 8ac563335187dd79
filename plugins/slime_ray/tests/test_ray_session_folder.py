"""Where a cluster of a run's own keeps its sockets, whose names must be short."""

import tempfile

import pytest

pytest.importorskip("ray", reason="not proven: Ray is not installed")

from slime_ray.joining import session_folder


@pytest.mark.parametrize(("length", "expected"), [(39, {}), (40, {"_temp_dir": "/tmp/ray"})])
def test_a_long_folder_for_temporary_files_is_not_rays(monkeypatch, length, expected):
    socket = "/ray/session_2026-11-22_10-35-04_123456_4194304/sockets/plasma_store"
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (length - 1))
    assert session_folder() == expected
    assert (length + len(socket) > 107) is bool(expected)
