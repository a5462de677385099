"""Megatron-LM's .bin and .idx files: read and written to the byte; a corrupt one is reported."""

import os
import subprocess

import numpy as np
import pytest

from meshtrain.data import indexed
from meshtrain.errors import ConfigError
from tests.lib.documents import SIZES, build, documents, write


def test_an_index_equals_megatrons_byte_for_byte(tmp_path):
    """The expected bytes follow the layout of megatron-core 0.16's IndexedDataset."""
    found = indexed.pack_index(np.array([3, 1, 2]), np.dtype("uint16"))
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    head += (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    lengths = b"".join(n.to_bytes(4, "little") for n in (3, 1, 2))
    pointers = b"".join(n.to_bytes(8, "little") for n in (0, 6, 8))
    assert found == head + lengths + pointers + b"".join(n.to_bytes(8, "little") for n in range(4))


MEGATRON = os.environ.get("MEGATRON")  # path of a Python with torch and megatron-core 0.16


@pytest.mark.skipif(not MEGATRON, reason="needs MEGATRON=PATH, a Python with megatron-core")
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_megatron_reads_our_files_and_writes_the_same_bytes(tmp_path, dtype):
    write(tmp_path / "meshtrain", documents(), dtype)
    program = f"""
import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
dataset = IndexedDataset({str(tmp_path / "meshtrain")!r})
builder = IndexedDatasetBuilder({str(tmp_path / "megatron.bin")!r}, dtype=numpy.{dtype})
for i in range(len(dataset)):
    builder.add_document(dataset[i].tolist(), [len(dataset[i])])
builder.finalize({str(tmp_path / "megatron.idx")!r})
"""
    subprocess.run([MEGATRON, "-c", program], check=True, capture_output=True)
    for kind in ("bin", "idx"):
        written, expected = (tmp_path / f"{name}.{kind}" for name in ("meshtrain", "megatron"))
        assert written.read_bytes() == expected.read_bytes()


def test_a_document_longer_than_the_longest_sequence_is_stored_as_several(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "MAX_SEQUENCE_LENGTH", 8)
    docs = documents((8, 30, 1, 0, 16))
    shard = indexed.load(write(tmp_path / "a", docs))
    assert shard.starts[:].tolist() == [0, 8, 38, 39, 39, 55]
    num_sequences = 1 + 4 + 1 + 1 + 2
    assert (tmp_path / "a.idx").read_bytes()[18:26] == num_sequences.to_bytes(8, "little")


def test_the_dtype_is_the_smallest_that_holds_the_vocabulary():
    sizes = (256, 257, 1 << 16, (1 << 16) + 1)
    assert [indexed.smallest_dtype(n).name for n in sizes] == ["uint8", "uint16", "uint16", "int32"]


@pytest.mark.parametrize("name", ["a", "a.bin", "a.idx"])
def test_a_prefix_and_both_of_its_files_name_the_same_data(tmp_path, name):
    write(tmp_path / "a", documents())
    assert build(tmp_path / name).size == (sum(SIZES) - 1) // 8


@pytest.mark.parametrize(
    ("at", "new", "expected"),
    [
        (0, b"X", "at byte 0: begins with"),
        (9, b"\x02", "at byte 9: version 2"),
        (17, b"\x07", "at byte 17: dtype 7"),
        (18, b"\xff", "at byte 18: 255 sequences"),
        (25, b"\xff", "at byte 18"),
        (34 + 8 + 3, b"\x80", "at byte 42: length -2147483647"),
        (34 + 4, b"\x29", "at byte 110: pointer 86 is not where sequence 2"),
        (34 + 60 + 8, b"\x00", "at byte 102: pointer 0"),
        (34 + 60 + 120 + 16, b"\x77", "document indices do not increase from 0 to 15"),
        (34 + 60 + 120 + 120, b"\x01", "document indices do not increase"),
        (None, b"", "at byte 18"),  # the last byte is missing
    ],
)
def test_the_error_for_a_corrupt_index_names_file_and_offset(tmp_path, at, new, expected):
    write(tmp_path / "a", documents())
    index = (tmp_path / "a.idx").read_bytes()
    index = index[:-1] if at is None else index[:at] + new + index[at + len(new) :]
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ConfigError, match="a.idx.*" + expected):
        build(tmp_path / "a")


def test_a_truncated_or_empty_bin_is_rejected(tmp_path):
    write(tmp_path / "a", documents())
    with open(tmp_path / "a.bin", "r+b") as file:
        file.truncate(335)
    with pytest.raises(ConfigError, match="a.bin has 335 bytes, but its .idx lists 336"):
        build(tmp_path / "a")
    write(tmp_path / "b", [np.zeros(0)])
    with pytest.raises(ConfigError, match="b.bin has 0 bytes"):
        build(tmp_path / "b")
