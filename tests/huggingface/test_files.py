"""Files of parameters: a damaged one is reported by name, and safetensors reads ours."""

import json
import os
import struct

import jax
import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.huggingface import files
from tests.lib.hf import BF16, GOLDEN, arrays, load, run, save


def change_header(data, **fields):
    """Returns the bytes of a file with changed header fields of its first tensor."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name] |= fields
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def file_bytes(text, data=b""):
    return struct.pack("<Q", len(text)) + text + data


DAMAGE = {
    "empty": lambda data: b"",
    "truncated in the length": lambda data: data[:5],
    "truncated in the header": lambda data: data[:100],
    "truncated in the tensors": lambda data: data[:-1],
    "extra byte": lambda data: data + b"\0",
    "huge header": lambda data: struct.pack("<Q", 1 << 60) + data[8:],
    "invalid JSON": lambda data: data[:8] + b"x" + data[9:],
    "a list": lambda data: file_bytes(b"[]"),
    "a number": lambda data: file_bytes(b'{"a": 1}'),
    "no offsets": lambda data: file_bytes(b'{"a": {"dtype": "F32", "shape": []}}'),
    "duplicate name": lambda data: file_bytes(
        b'{"a": %s, "a": %s}' % (2 * (b'{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}',)),
        b"x",
    ),
    "deeply nested": lambda data: file_bytes(b"[" * 100_000),
    "not UTF-8": lambda data: file_bytes(b"\xff\xfe"),
    "unknown dtype": lambda data: change_header(data, dtype="F4"),
    "a gap": lambda data: change_header(data, shape=[1], data_offsets=[4, 8]),
    "an overlap": lambda data: change_header(data, shape=[1], data_offsets=[0, 4]),
    "another shape": lambda data: change_header(data, shape=[3]),
    "a negative shape": lambda data: change_header(data, shape=[-1, -61]),
    "a float": lambda data: change_header(data, shape=[1.0]),
    "long numbers": lambda data: change_header(data, shape=[10**4000] * 3000),
    "an unknown dtype of long numbers": lambda data: change_header(
        data, dtype="X", shape=[1 << 62] * 20
    ),
    "no text as the dtype": lambda data: change_header(data, dtype=[]),
    "no list as the shape": lambda data: change_header(data, shape={}),
    "beyond the end": lambda data: change_header(
        data, shape=[1], data_offsets=[1 << 70, (1 << 70) + 4]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_reported_by_name(damage, folder_of, tmp_path):
    folder = folder_of("llama3")
    path = folder / "model.safetensors"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(ConfigError, match="exit code 2: .*model.safetensors: is damaged"):
        run(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.partial").exists()


def test_files_are_compatible_with_the_safetensors_package(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, BF16)}
    tensors["ü/\u4e2d"] = np.ones((2, 1, 2), np.float16)
    numpy.save_file(tensors, tmp_path / files.SINGLE_FILE)
    assert {name: x.tobytes() for name, x in arrays(tmp_path).items()} == {
        name: x.tobytes() for name, x in tensors.items()
    }
    save(tmp_path, tensors)
    for name, x in numpy.load_file(tmp_path / files.SINGLE_FILE).items():
        assert x.dtype == tensors[name].dtype and (x == tensors[name]).all()


@pytest.mark.parametrize("shard_bytes", [1000, 1500, 2048, 4096])
def test_a_file_with_its_header_is_not_larger_than_the_limit(shard_bytes, tmp_path):
    """And the first tensor of the next file would not have fitted."""
    rng = np.random.default_rng(0)
    tensors = {
        f"layer.{number}.{'x' * number}": np.ones(rng.integers(1, 60), np.float32)
        for number in range(40)
    }
    tensors["layer.17.a larger tensor"] = np.ones(2000, np.float32)
    save(tmp_path, tensors, shard_bytes=shard_bytes)
    paths = sorted(tmp_path.glob("*.safetensors"))
    contents = [files.read_header(path) for path in paths]
    for number, (path, content) in enumerate(zip(paths, contents, strict=True)):
        assert path.stat().st_size <= shard_bytes or len(content) == 1
        if number + 1 < len(paths):
            names = [*content, next(iter(contents[number + 1]))]
            specs = [files.TensorSpec(n, tensors[n].shape, tensors[n].dtype) for n in names]
            files.write_file(tmp_path / "both", specs, [tensors[name] for name in names])
            assert (tmp_path / "both").stat().st_size > shard_bytes
    assert arrays(tmp_path).keys() == tensors.keys()


INDEXES = {
    "invalid JSON": ("{", "is damaged"),
    "no weight_map": ("{}", "is damaged"),
    "a list": ('{"weight_map": []}', "is damaged"),
    "numbers": ('{"weight_map": {"a": 1}}', "is damaged"),
    "a file outside": ('{"weight_map": {"a": "../x.safetensors"}}', "not the name of a file"),
    "a missing file": (
        '{"weight_map": {"a": "x.safetensors"}}',
        "x.safetensors: No such",
    ),
    "a missing tensor": ('{"weight_map": {"a": "one.safetensors"}}', "has no tensor a,"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_damaged_index_is_reported_by_name(case, folder_of):
    text, message = INDEXES[case]
    folder = folder_of("llama3")
    (folder / files.SINGLE_FILE).rename(folder / "one.safetensors")
    (folder / files.INDEX).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_a_fifo_is_not_waited_for(folder_of):
    folder = folder_of("llama3")
    (folder / files.SINGLE_FILE).unlink()
    os.mkfifo(folder / "x.safetensors")
    (folder / files.INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(ConfigError, match="x.safetensors: .*a pipe, not a file"):
        load(folder)


@pytest.mark.parametrize("left", ["nothing", "a folder", "a link to nowhere", "a link to itself"])
def test_a_folder_without_parameters_is_reported(left, folder_of, tmp_path):
    path = folder_of("llama3") / files.SINGLE_FILE
    path.unlink()
    if left == "a folder":
        path.mkdir()
    elif left != "nothing":
        path.symlink_to(path if "itself" in left else "nowhere")
    with pytest.raises(ConfigError, match="exit code 2: .*has neither model.safetensors nor"):
        run(path.parent, tmp_path / "run")


def test_a_link_to_a_file_elsewhere_is_followed_as_in_the_cache_of_the_hub(folder_of, tmp_path):
    path = folder_of("llama3") / files.SINGLE_FILE
    path.rename(tmp_path / "blob")
    path.symlink_to("../blob")
    _, params = load(path.parent)
    jax.tree.map(np.testing.assert_array_equal, params, load(GOLDEN / "llama3")[1])


def test_pickled_parameters_are_not_read(folder_of):
    folder = folder_of("llama3")
    (folder / files.SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pytorch_model.bin can run code"):
        load(folder)
