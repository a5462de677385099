"""Manifests describe checkpoints, of this and older formats, and show any corruption of a file."""

import dataclasses
import json
import random
import shutil
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from meshtrain.checkpoint import arrays, find, manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint
from meshtrain.config.parse import parse
from meshtrain.train import train
from tests.lib.checkpoints import checkpoints, flip, largest_file, noise, rewrite, saving
from tests.lib.compare import assert_bit_equal
from tests.lib.rows import events, losses


def test_a_manifest_describes_its_checkpoint(finished_run):
    one = manifest.verify(checkpoints(finished_run) / "4")
    assert (one.step, one.position, one.processes, one.mesh["data"]) == (4, 64, 1, 8)
    assert one.metrics["loss"] == losses(finished_run)[3]
    assert one.config["model"]["d_model"] == 32 and one.versions["jax"] == jax.__version__
    assert one.arrays["params/final_norm/scale"] == "(32,) float32"
    on_disk = {
        p.relative_to(checkpoints(finished_run) / "4").as_posix()
        for p in (checkpoints(finished_run) / "4").rglob("*")
        if p.is_file()
    }
    assert on_disk == {*one.files, manifest.NAME}
    saves = events(finished_run, "save")
    assert [row["step"] for row in saves] == [2, 4, 6]
    assert all(0 < row["blocked_seconds"] <= row["seconds"] for row in saves)


def mutate(directory, draw):
    """Corrupts one file of a checkpoint; returns the kind of corruption and the file."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    path = draw.choice(files)
    kind = draw.choice(["flip", "noise", "truncate", "delete", "swap", "append"])
    if kind == "flip" and path.stat().st_size:
        flip(path, draw.randrange(path.stat().st_size))
    elif kind == "noise" and path.stat().st_size:
        noise(path, draw)
    elif kind == "truncate" and path.stat().st_size:
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    elif kind == "swap":
        other = draw.choice([p for p in files if p.read_bytes() != path.read_bytes()])
        a, b = path.read_bytes(), other.read_bytes()
        path.write_bytes(b)
        other.write_bytes(a)
    elif kind == "append":
        path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 9)))
    else:
        path.unlink()
    return kind, path.relative_to(directory)


@pytest.mark.slow
def test_300_random_corruptions_are_all_detected(finished_run, tmp_path):
    draw = random.Random(0)
    valid = checkpoints(finished_run) / "4"
    for trial in range(300):
        directory = shutil.copytree(valid, tmp_path / str(trial) / "4")
        corruption = mutate(directory, draw)
        try:
            found = manifest.verify(directory)
        except CorruptCheckpoint:
            continue
        # An undetected change is harmless only if all content is equal, as after adding a final
        # space, or if it is in bytes of the arrays' files that nothing reads.
        assert found == manifest.read(valid), corruption
        for path, (_, crc) in found.files.items():
            if (directory / path).read_bytes() != (valid / path).read_bytes():
                assert not crc, corruption
                assert_bit_equal(arrays.as_numpy(directory), arrays.as_numpy(valid))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: replace_by_link(largest_file(d)), "arrays/.* is not a file"),
        (lambda d: replace_by_link(d / manifest.NAME), "MANIFEST.json is not a file"),
        (lambda d: replace_by_link(d / "arrays" / "d"), "arrays/d is not a folder"),
        (lambda d: (d / manifest.NAME).unlink(), "MANIFEST.json is missing"),
        (lambda d: (d / manifest.NAME).write_text("{}"), "MANIFEST.json is damaged"),
        (lambda d: (d / manifest.NAME).write_text("[" * 10**5), "MANIFEST.json is damaged"),
        (lambda d: shutil.rmtree(d / "arrays"), "is missing"),
        (lambda d: rewrite(d, files={"../../../LOCK": [1, "0"]}), "points outside the checkpoint"),
        (lambda d: rewrite(d, files={"/etc/passwd": [1, "0"]}), "points outside the checkpoint"),
        (lambda d: rewrite(d, files={"a": 1}), "MANIFEST.json is damaged"),
        (lambda d: rewrite(d, position="x"), "MANIFEST.json is damaged"),
    ],
)
def test_a_corrupt_checkpoint_is_rejected_with_the_reason(workdir, change, message):
    directory = checkpoints(workdir) / "4"
    change(directory)
    with pytest.raises(CorruptCheckpoint, match=message):
        manifest.verify(directory)


def replace_by_link(path):
    """Moves a file or folder elsewhere, and leaves a link to it."""
    path.symlink_to(path.rename(path.parents[3] / f"moved {path.name}"))


def of_format_1(directory):
    """Writes a checkpoint's arrays again as before format 2: without checksums of chunks."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        folder = (directory / "arrays").absolute()
        saved = orbax.metadata(folder).item_metadata.tree
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        state = orbax.restore(folder, args=ocp.args.PyTreeRestore(restore_args=on_host))
        orbax.save(folder, args=ocp.args.PyTreeSave(state), force=True)
    found = manifest.read(directory)
    files = manifest._measure(directory, [*manifest._files(directory)], sync=False)
    del files[manifest.NAME]
    manifest.write(directory, dataclasses.replace(found, files=files, format=1))


def test_checkpoints_of_format_1_are_read_and_verified(workdir):
    before = arrays.as_numpy(checkpoints(workdir) / "6")
    for step in (4, 6):
        of_format_1(checkpoints(workdir) / str(step))
    assert_bit_equal(before, arrays.as_numpy(checkpoints(workdir) / "6"))
    assert train(saving(6), workdir=workdir).step == 6
    assert events(workdir, "restore")[-1]["step"] == 6
    flip(largest_file(checkpoints(workdir) / "6"))
    with pytest.raises(CorruptCheckpoint, match="arrays/.* fails its checksum"):
        manifest.verify(checkpoints(workdir) / "6")
    assert train(saving(5), workdir=workdir).step == 5
    assert events(workdir, "restore")[-1]["step"] == 4
    assert manifest.verify(checkpoints(workdir) / "5").format == manifest.FORMAT


def test_a_manifest_of_an_older_or_newer_version_is_read(workdir):
    """Manifests had a field `config_crc32` until it was removed, without a new format number."""
    directory = checkpoints(workdir) / "6"
    expected = manifest.verify(directory)
    assert "config_crc32" not in json.loads((directory / manifest.NAME).read_text())
    rewrite(directory, config_crc32=manifest.checksum(expected.config), a_field_of_the_future=[1])
    assert "config_crc32" in json.loads((directory / manifest.NAME).read_text())
    assert manifest.verify(directory) == expected
    assert train(saving(6), workdir=workdir).step == 6
    assert events(workdir, "restore")[-1]["step"] == 6 and not events(workdir, "quarantine")


def test_a_setting_that_json_does_not_have_is_written_as_text(workdir):
    """A config file may have a path, or a type."""
    directory = checkpoints(workdir) / "6"
    saved = manifest.verify(directory)
    config = {**saved.config, "own": {"path": directory, "steps": 3}}
    manifest.write(directory, dataclasses.replace(saved, config=config))
    assert manifest.verify(directory).config["own"] == {"path": str(directory), "steps": 3}


def test_a_checksum_covers_all_blocks_of_a_file(tmp_path):
    content = random.Random(0).randbytes(2 * manifest.BLOCK_BYTES + 1)
    (tmp_path / "a").write_bytes(content)
    measured = manifest._measure(tmp_path, ["a"], sync=False)
    assert measured == {"a": (len(content), f"{zlib.crc32(content):08x}")}


# What a restore needs: gone before the commit, as by an rmtree that races it.
NEEDED = {
    "the index": "arrays/manifest.ocdbt",
    "Orbax's tree": "arrays/_METADATA",
    "all arrays": "arrays",
    "the nodes of the index": "arrays/d",
    "the chunks": "arrays/ocdbt.process_0/d",
}


def removed(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("what", NEEDED)
def test_a_checkpoint_without_what_a_restore_needs_is_not_committed(what, workdir):
    directory = checkpoints(workdir) / "6"
    fields = dataclasses.asdict(manifest.read(directory))
    for name in ("step", "files", "chunks"):
        del fields[name]
    partial = directory.rename(manifest.partial_folder(checkpoints(workdir), 6))
    (partial / manifest.NAME).unlink()
    shutil.copytree(partial, saved := workdir / "saved")
    removed(partial / NEEDED[what])
    with pytest.raises(OSError, match="incomplete, .* is missing"):
        manifest.commit(checkpoints(workdir), 6, **fields)
    assert partial.is_dir() and not directory.exists()
    shutil.rmtree(partial)
    shutil.copytree(saved, partial)
    assert manifest.commit(checkpoints(workdir), 6, **fields) == manifest.verify(directory)


@pytest.mark.parametrize("what", NEEDED)
def test_an_incomplete_checkpoint_that_was_committed_is_corrupt(what, workdir, finished_run):
    """Older versions listed the files that happened to be there."""
    directory = checkpoints(workdir) / "6"
    removed(directory / NEEDED[what])
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*")}
    files = json.loads((directory / manifest.NAME).read_text())["files"]
    rewrite(directory, files={name: files[name] for name in there & files.keys()}, format=2)
    with pytest.raises(CorruptCheckpoint, match="is missing"):
        manifest.verify(directory)
    with pytest.raises(CorruptCheckpoint, match="is missing|cannot be read|fails its checksum"):
        manifest.read(directory)  # the manifest itself is valid
        with manifest.reading_chunks(directory):
            arrays.as_numpy(directory)
    saved = manifest.read(checkpoints(finished_run) / "4")
    assert train(saving(4), workdir=workdir).step == 4
    assert [row["step"] for row in events(workdir, "quarantine")] == [6]
    assert events(workdir, "restore")[-1]["step"] == saved.step


@pytest.mark.parametrize("kind", ["(32,) float16", "(31,) float32", None])
def test_an_array_of_another_kind_than_the_manifest_says_is_corrupt(kind, workdir):
    directory = checkpoints(workdir) / "6"
    named = dict(manifest.read(directory).arrays)
    path = "params/final_norm/scale" if kind else "params/absent"
    named[path] = kind or "(32,) float32"
    rewrite(directory, arrays=named)
    with pytest.raises(CorruptCheckpoint, match=r"arrays/params\.(final_norm\.scale|absent) is "):
        manifest.verify(directory)


def test_retention_does_not_count_a_checkpoint_whose_files_are_gone(workdir):
    shutil.rmtree(checkpoints(workdir) / "6" / "arrays")
    settings = dataclasses.replace(parse(saving(6)).checkpoint, keep_last=1)
    find.remove_old_checkpoints(checkpoints(workdir), settings)
    assert find.steps(checkpoints(workdir)) == [6, 4]
    assert find.find_valid(workdir)[1].step == 4


def exchange_chunks(directory):
    """Exchanges two chunks of equal size in the files of the arrays."""
    base = tensorstore.KvStore.open({"driver": "file", "path": f"{directory}/arrays/"}).result()
    version = tensorstore.ocdbt.dump(base).result()["versions"][-1]
    node = tensorstore.ocdbt.dump(base, node=version["root"]["location"]).result()
    places = {}
    for entry in node["entries"]:
        if value := entry.get("indirect_value"):
            _, folder, file, start, size = value.split(":")
            place = directory / "arrays" / folder / file, int(start), int(size)
            content = place[0].read_bytes()[place[1] : place[1] + place[2]]
            for other_content, other in places.values():
                if len(other_content) == len(content) and other_content != content:
                    write_at(place, other_content)
                    write_at(other, content)
                    return
            places[entry["key"]] = content, place
    raise AssertionError("no two chunks have the same size")


def write_at(place, content):
    path, start, _ = place
    data = bytearray(path.read_bytes())
    data[start : start + len(content)] = content
    path.write_bytes(data)


def test_a_chunk_cannot_stand_in_for_another_one(workdir):
    """Each of them has the checksum that its own content ends with."""
    one = manifest.read(checkpoints(workdir) / "6")
    assert one.chunks.keys() == one.arrays.keys()
    assert sum(map(len, one.chunks.values())) >= len(one.arrays)
    before = arrays.as_numpy(checkpoints(workdir) / "6")
    exchange_chunks(checkpoints(workdir) / "6")
    after = arrays.as_numpy(checkpoints(workdir) / "6")
    assert any(before[path].tobytes() != after[path].tobytes() for path in before)
    for verify in (manifest.check, manifest.verify):
        with pytest.raises(CorruptCheckpoint, match="arrays/.*/c/.* fails its checksum"):
            verify(checkpoints(workdir) / "6")
    assert train(saving(6), workdir=workdir).step == 6
    assert events(workdir, "restore")[-1]["step"] == 4


def test_checkpoints_of_format_2_are_read_and_verified(workdir, finished_run):
    """Their manifests do not list the checksums of chunks."""
    for step in ("4", "6"):
        rewrite(checkpoints(workdir) / step, format=2, chunks={})
    assert manifest.verify(checkpoints(workdir) / "6").chunks == {}
    assert train(saving(6), workdir=workdir).step == 6
    flip(largest_file(checkpoints(workdir) / "6"))
    with pytest.raises(CorruptCheckpoint, match="arrays/.* fails its checksum"):
        manifest.verify(checkpoints(workdir) / "6")
    assert train(saving(5), workdir=workdir).step == 5
    assert events(workdir, "restore")[-1]["step"] == 4
    assert manifest.verify(checkpoints(workdir) / "5").format == manifest.FORMAT == 3


@pytest.mark.parametrize("chunks", [{}, {"a": {"c": "00000000"}}])
def test_a_manifest_of_format_3_lists_every_chunk(chunks, workdir):
    rewrite(checkpoints(workdir) / "6", chunks=chunks)
    with pytest.raises(CorruptCheckpoint, match="fails its checksum"):
        manifest.check(checkpoints(workdir) / "6")
