"""Segment files: what was written comes back bit for bit, and damage is a typed error."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from slime_core.durable import storage_error
from slime_core.errors import StorageError
from slime_core.ledger import segments as module
from slime_core.ledger.segments import RecordPlace, Segments, read_array, segment_name
from slime_core.types import ArrayRef

pytestmark = pytest.mark.unit

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"]


@pytest.fixture
def store(tmp_path):
    segments = Segments(tmp_path / "segments")
    yield segments
    segments.close()


def failing(code, call, *args, **kwargs):
    with pytest.raises(StorageError) as caught:
        call(*args, **kwargs)
    assert caught.value.code == code, caught.value
    assert caught.value.where
    assert caught.value.exit_code == 7
    return caught.value


def test_records_come_back_and_lie_where_the_format_says(store):
    first = store.append([b"ab", b"cde"])
    second = store.append([b""])
    store.sync()
    assert store.read(first) == b"abcde"
    assert store.read(second) == b""
    # 8 bytes of file magic, then a frame of 16 bytes before each body
    assert first == RecordPlace(segment=1, offset=24, length=5, crc32=0x8587D865)
    assert second.offset == 24 + 5 + 16
    data = store.path(1).read_bytes()
    assert data[:8] == b"slimeSG1"
    assert data[8:24] == b"SLMR" + bytes.fromhex("65d88785") + bytes.fromhex("0500000000000000")


@settings(max_examples=60, deadline=None)
@given(
    array=st.sampled_from(DTYPES).flatmap(
        lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0, max_side=5))
    )
)
def test_arrays_come_back_bit_for_bit(tmp_path_factory, array):
    store = Segments(tmp_path_factory.mktemp("s"))
    ref = store.write_array(array)
    store.sync()
    for back in (store.read_array(ref), read_array(store.folder, ref)):
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert back.tobytes() == array.tobytes()
    assert ref.nbytes == array.nbytes
    store.close()


def test_big_endian_and_strided_arrays_are_stored_little_endian(store):
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    ref = store.write_array(array)
    assert ref.dtype == "int32"
    assert store.read_array(ref).tolist() == [[0, 2], [4, 6], [8, 10]]


def test_arrays_that_were_read_are_writable(store):
    back = store.read_array(store.write_array(np.zeros(3)))
    back[0] = 1
    assert back[0] == 1


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.zeros(2, "datetime64[s]")])
def test_only_numbers_are_stored(store, array):
    with pytest.raises(TypeError, match="are not stored"):
        store.write_array(array)


def test_every_start_writes_a_file_of_its_own(store):
    place = store.append([b"first life"])
    store.close()
    later = Segments(store.folder)
    again = later.append([b"second life"])
    assert (place.segment, again.segment) == (1, 2)
    assert later.read(place) == b"first life"
    later.close()


def test_a_full_file_is_followed_by_the_next(tmp_path):
    store = Segments(tmp_path, roll_bytes=100)
    places = [store.append([bytes([i]) * 30]) for i in range(6)]
    assert [p.segment for p in places] == [1, 1, 2, 2, 3, 3]
    assert all(store.read(p) == bytes([i]) * 30 for i, p in enumerate(places))
    big = store.append([b"x" * 1000])
    assert store.read(big) == b"x" * 1000, "a record beyond the size still fits in a file of its own"
    store.close()


def test_many_files_are_read_with_few_open(tmp_path):
    store = Segments(tmp_path, roll_bytes=40)
    places = [store.append([bytes([i]) * 20]) for i in range(40)]
    before = len(os.listdir("/proc/self/fd"))
    assert all(store.read(p) == bytes([i]) * 20 for i, p in enumerate(places))
    assert len(os.listdir("/proc/self/fd")) - before <= module.OPEN_FILES
    store.close()


def test_two_writers_of_one_folder_never_share_a_file(tmp_path):
    stores = [Segments(tmp_path) for _ in range(4)]
    places = {}

    def write(number):
        places[number] = [stores[number].append([bytes([number]) * 8]) for _ in range(20)]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({p[0].segment for p in places.values()}) == 4
    for number, mine in places.items():
        assert all(stores[(number + 1) % 4].read(p) == bytes([number]) * 8 for p in mine)
    for store in stores:
        store.close()


def test_a_writer_that_saw_an_old_listing_takes_no_file_of_another(tmp_path, monkeypatch):
    first, second = Segments(tmp_path), Segments(tmp_path)
    place = first.append([b"mine"])
    monkeypatch.setattr(Path, "glob", lambda *args: iter(()))
    assert second.append([b"yours"]).segment == place.segment + 1
    assert first.read(place) == b"mine"
    first.close()
    second.close()


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_other_bytes_than_were_written_are_refused(store, damage):
    place = store.append([b"precious payload"])
    store.sync()
    path = store.path(1)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[place.offset + 3] ^= 1
    path.write_bytes(data if damage == "flipped" else data[:-4])
    error = failing("STO112", store.read, place)
    assert str(path) in error.where
    assert f"bytes {place.offset} to" in error.where
    ref = ArrayRef(segment=path.name, offset=place.offset, dtype="uint8", shape=(16,), crc32=place.crc32)
    failing("STO112", read_array, store.folder, ref)


def test_a_segment_that_is_gone_is_named(store):
    error = failing("STO111", store.read, RecordPlace(segment=9, offset=24, length=1, crc32=0))
    assert segment_name(9) in error.where


def test_a_file_that_is_no_segment_is_refused(store):
    (store.folder / segment_name(5)).write_bytes(b"PK\x03\x04 something else")
    failing("STO112", store.read, RecordPlace(segment=5, offset=8, length=1, crc32=0))


@pytest.mark.parametrize(
    "change",
    [{"segment": "../secret"}, {"segment": "/etc/passwd"}, {"dtype": "object"}, {"offset": -1}, {"shape": (-1,)}],
    ids=["traversal", "absolute", "object dtype", "negative offset", "negative shape"],
)
def test_a_reference_from_elsewhere_opens_nothing(store, change):
    good = {"segment": "000001.seg", "offset": 24, "dtype": "int8", "shape": (1,), "crc32": 0}
    failing("STO112", store.read_array, ArrayRef(**{**good, **change}))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "STO109"),
        (errno.EDQUOT, "STO109"),
        (errno.EROFS, "STO110"),
        (errno.EACCES, "STO110"),
        (errno.EMFILE, "STO120"),
        (errno.EIO, "STO121"),
    ],
    ids=errno.errorcode.get,
)
def test_errors_of_the_system_have_codes_and_fixes(tmp_path, number, code):
    error = storage_error(OSError(number, os.strerror(number)), tmp_path, "it failed")
    assert error.code == code
    assert error.fix


def test_a_full_disk_loses_nothing_that_was_written_before(store):
    """A device that takes no byte stands for the disk that is full."""
    place = store.append([b"kept"])
    store.sync()
    store._abandon()
    store._fd, store._number = os.open("/dev/full", os.O_RDWR), 2
    failing("STO109", store.append, [b"lost"])
    assert store.read(place) == b"kept"
    again = store.append([b"space again"])
    assert store.read(again) == b"space again"
    assert again.segment != place.segment, "the file that failed is never written again"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        Segments(tmp_path / "file" / "segments")
    assert "segment folder" in caught.value.what
