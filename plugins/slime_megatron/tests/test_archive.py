"""One tensor as torch.save writes it: torch reads ours, we read torch's, and damage is an error with numbers."""

import io
import zipfile

import pytest
import torch

from slime_core.errors import DataError
from slime_megatron.convert.archive import LARGEST, archive, frame, locate

pytestmark = pytest.mark.unit

SHAPES = [(2, 3), (1, 7, 2), (5,), (300, 1000), (1, 1, 4, 4), (70000, 2)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8]


def bytes_of(tensor):
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()).cast("B")


def packed(tensor):
    data = bytes_of(tensor)
    return b"".join(archive(tuple(tensor.shape), tensor.dtype, [data[:10], data[10:]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_reads_what_was_written_and_its_length_was_known(shape, dtype):
    tensor = (torch.randn(shape) * 50).to(dtype)
    data = packed(tensor)
    assert len(data) == frame(shape, dtype).total
    read = torch.load(io.BytesIO(data), weights_only=True)
    assert read.dtype == dtype
    assert torch.equal(read, tensor)
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None  # the sums are right


def test_the_record_of_a_tensor_is_torchs_own():
    """But for memo marks, which nothing here refers to."""
    tensor, theirs = torch.randn(3, 300, 70000 // 300), io.BytesIO()
    torch.save(tensor, theirs)
    ours, other = (zipfile.ZipFile(io.BytesIO(data)) for data in (packed(tensor), theirs.getvalue()))
    import pickletools

    def calls(text):
        return [(op.name, arg) for op, arg, _ in pickletools.genops(text) if op.name not in ("BINPUT", "MARK")]

    found, meant = calls(ours.read("archive/data.pkl")), calls(other.read("archive/data.pkl"))
    assert [arg for _, arg in found if arg is not None] == [arg for _, arg in meant if arg is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torchs"])
def test_elements_are_found_in_the_middle_of_a_file(tmp_path, dtype, ours):
    tensor, theirs = (torch.randn(7, 9) * 50).to(dtype), io.BytesIO()
    torch.save(tensor, theirs)
    data = packed(tensor) if ours else theirs.getvalue()
    (tmp_path / "f").write_bytes(b"before" + data + b"after")
    begin, record = locate(tmp_path / "f", 6, len(data), "t")
    assert (record.shape, record.dtype) == ((7, 9), dtype)
    raw = (tmp_path / "f").read_bytes()[begin : begin + tensor.nbytes]
    assert raw == bytes(bytes_of(tensor))


def test_a_view_into_a_larger_storage_is_found_at_its_offset(tmp_path):
    base, data = torch.arange(100.0), io.BytesIO()
    torch.save(base[40:60].view(4, 5), data)
    (tmp_path / "f").write_bytes(data.getvalue())
    begin, record = locate(tmp_path / "f", 0, len(data.getvalue()), "t")
    assert record.offset == 40
    assert torch.frombuffer(bytearray((tmp_path / "f").read_bytes()[begin : begin + 80]), dtype=torch.float32)[0] == 40


def test_elements_begin_at_a_multiple_of_64_bytes():
    for shape in SHAPES:
        assert len(frame(shape, torch.bfloat16).head) % 64 == 0


@pytest.mark.parametrize("cut", [1, 100, 500])
def test_an_archive_that_was_cut_short_is_told_with_its_place(tmp_path, cut):
    data = packed(torch.randn(5, 5))
    (tmp_path / "f").write_bytes(data[:-cut])
    with pytest.raises(DataError) as caught:
        locate(tmp_path / "f", 0, len(data), "tensor x at [0, 0]")
    assert caught.value.code == "TOK201"
    assert "tensor x at [0, 0]" in str(caught.value)


def test_bytes_that_are_no_archive_are_told(tmp_path):
    (tmp_path / "f").write_bytes(bytes(1000))
    with pytest.raises(DataError, match="TOK201"):
        locate(tmp_path / "f", 0, 1000, "t")


def test_big_endian_numbers_are_refused(tmp_path):
    data = packed(torch.randn(2, 2)).replace(b"little", b"big...")
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(DataError, match="TOK201"):
        locate(tmp_path / "f", 0, len(data), "t")


def test_more_than_such_a_zip_holds_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        frame((LARGEST + 1,), torch.uint8)
