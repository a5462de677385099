"""Converts a Hugging Face folder to a workdir, or a run's newest checkpoint to such a folder."""

import argparse
import contextlib
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain import console, foreign, object_store, storage
from meshtrain.checkpoint import arrays, find, manifest, run_tokenizer
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.cluster import distributed, runtime
from meshtrain.config import load as configfile
from meshtrain.config.bind import bind
from meshtrain.config.build import resolve
from meshtrain.config.schema import Config
from meshtrain.data import tokenizer
from meshtrain.errors import ConfigError, import_optional
from meshtrain.huggingface import (
    config_json,
    files,
    gguf_file,
    model_card,
    peft,
    start,
    text_files,
    weights,
)
from meshtrain.huggingface.families.base import BUILD, Section
from meshtrain.models.base import ROUTER_BIAS, STATS_KEY, Model, Params, is_measured
from meshtrain.models.lora_layer import adapted_layers
from meshtrain.parallel import sharding
from meshtrain.parallel.mesh import make_mesh
from meshtrain.state import TrainState, bytes_of, count


def run(
    args: argparse.Namespace, *, ends_of_replies: Callable[[tokenizer.Tokenizer], list[int]]
) -> int:
    """Converts a folder; returns the exit code.

    `ends_of_replies` returns the tokens that end a reply of a chat model.
    """
    source = args.source.resolve()
    target = args.target.absolute()
    is_export = (source / find.FOLDER).is_dir() or (source / manifest.NAME).is_file()
    if not is_export and not (source / config_json.NAME).is_file():
        raise ConfigError(
            f"{args.source}: neither a workdir ({find.FOLDER}/) nor a Hugging Face folder "
            f"(config.json)"
        )
    if target.parent.resolve().is_relative_to(source):
        raise ConfigError(f"{args.target}: is inside {args.source}; use a TARGET outside of it")
    if is_export or target.suffix == gguf_file.SUFFIX:
        jax.config.update("jax_platforms", "cpu")  # an export computes nothing
    runtime.start(args)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax also logs what it raises
    if is_export and distributed.num_processes() > 1:
        raise ConfigError(f"{args.source}: an export runs in one process; start only one")
    try:
        if target.suffix == gguf_file.SUFFIX:
            summary = export_gguf(source, target, args, ends_of_replies, is_run=is_export)
        elif is_export:
            summary = export_folder(source, target, args, ends_of_replies)
        else:
            summary = import_folder(source, target, args)
    except OSError as error:
        raise ConfigError(f"{error.filename or args.target}: {error.strerror or error}") from error
    except ValueError as error:
        # TensorStore raises it where Python raises an OSError, for example on a full disk.
        before, is_os_error, _ = str(error).partition(" [os_error_code=")
        if is_os_error:
            reason = before.rpartition(":")[2].strip()
            raise ConfigError(f"{args.target}: {reason}") from error
        raise
    if distributed.process_id() == 0:
        console.say(f"{args.target}: {summary}")
    return 0


# ---- Hugging Face folder to workdir ----

ORIGINAL = run_tokenizer.HUGGINGFACE_CONFIG

BASE = "base"  # in Manifest.identity of an import: the model's name

# In a workdir: the dtypes of the tensors that the run stores in another one.
DTYPES = "huggingface_dtypes.json"


def import_folder(source: Path, target: Path, args: argparse.Namespace) -> str:
    """Converts a Hugging Face folder to a workdir with a checkpoint of the parameters.

    Returns a summary.
    """
    # Everything is checked before anything is allocated or written.
    weights.check_sizes(source)
    section = weights.model_section(source)
    dtypes = weights.dtypes_in(source)
    trained_dtypes = [
        dtype for name, dtype in dtypes.items() if not name.endswith(weights.ROUTER_BIAS)
    ]
    dtype = start.stored_dtype(trained_dtypes, args.dtype)
    config = run_config(args.config, section, dtype)
    mesh = make_mesh(fsdp=-1)
    abstract = abstract_params(model_of(section), dtype, config["rules"], mesh)
    weights.check(source, abstract, section)
    check_free_space(target, bytes_of(abstract))

    with distributed.raise_on_all_processes():
        params = weights.read(source, abstract, section)
    replicated = NamedSharding(mesh, PartitionSpec())
    step = jax.make_array_from_callback((), replicated, lambda _: np.int32(0))
    state = TrainState(step, params, opt_state=None)

    with atomic_folder(target) as workdir, contextlib.closing(AsyncWriter()) as writer:
        folder = workdir / find.FOLDER
        partial = manifest.partial_folder(folder, 0)
        if distributed.process_id() == 0:
            run_tokenizer.copy_files([source], workdir, run_tokenizer.FILES)
            shutil.copyfile(source / config_json.NAME, workdir / ORIGINAL)
            changed = {
                name: str(original)
                for name, original in dtypes.items()
                if original != weights.written_dtype(name, dtype)
            }
            # With --dtype the user wants another dtype, also after the export.
            if changed and not args.dtype:
                write_json(workdir / DTYPES, changed)
            write_json(workdir / config_json.NAME, config)
            partial.mkdir(parents=True)
        # All processes write to the folder that the first one makes.
        distributed.barrier("convert")
        with console.progress("saving", 0):
            writer.save(partial / arrays.FOLDER, arrays.fields(state))
            writer.wait()
        if distributed.process_id() == 0:
            manifest.commit(
                folder,
                0,
                config=config,
                mesh=dict(mesh.shape),
                arrays=arrays.shapes_of(state),
                processes=distributed.num_processes(),
                versions=distributed.versions(),
                position=0,
                time=time.time(),
                metrics={},
                loss_statistics={},
                identity={"tokenizer": tokenizer.digest_of(source), BASE: start.name_of(source)},
            )
    left_out = weights.num_left_out(source)
    without = f", without {left_out} tensors of layers for further tokens" if left_out else ""
    return f"step 0, a {weights.family_in(source).architecture} in {dtype}{without}"


def run_config(path: str, section: Section, dtype: np.dtype) -> dict[str, Any]:
    """Returns the config in a file, with another `model` section and the keys that depend on it."""
    config = configfile.load_config(path)
    start.set_section(config, section)
    start.set_dtype(config, dtype)
    return config.to_dict()


# ---- checkpoint to Hugging Face folder ----

PREFIX = "params/"  # of parameter paths in a checkpoint


def export_folder(
    source: Path,
    target: Path,
    args: argparse.Namespace,
    ends_of_replies: Callable[[tokenizer.Tokenizer], list[int]],
) -> str:
    """Converts a checkpoint to a Hugging Face folder, one parameter at a time.

    Returns a summary.
    """

    def export(directory: Path, saved: manifest.Manifest) -> str:
        return _export_checkpoint(directory, saved, target, args, ends_of_replies)

    # One checkpoint has no older one in its place: what is read of it is verified while it is read.
    is_named = (source / manifest.NAME).is_file()
    return find.read_valid(
        source,
        export,
        log=functools.partial(console.say, stream="stderr"),
        verify=manifest.check if is_named else manifest.verify,
    )


def export_gguf(
    source: Path,
    target: Path,
    args: argparse.Namespace,
    ends_of_replies: Callable[[tokenizer.Tokenizer], list[int]],
    *,
    is_run: bool,
) -> str:
    """Converts a checkpoint or a Hugging Face folder to a GGUF file. Returns a summary."""
    if args.adapter:
        raise ConfigError("--adapter: a GGUF file has merged weights; leave out --adapter")
    import_optional("gguf", "gguf")
    if not is_run:
        return gguf_file.write(source, target, dtype=args.dtype)
    # By way of a Hugging Face folder, which takes disk space and no memory.
    folder = target.with_name(f"{target.name}.folder")
    shutil.rmtree(folder, ignore_errors=True)  # a conversion that was killed may have left one
    try:
        summary = export_folder(source, folder, args, ends_of_replies)
        return f"{summary}: {gguf_file.write(folder, target, dtype=args.dtype)}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _export_checkpoint(
    directory: Path,
    saved: manifest.Manifest,
    target: Path,
    args: argparse.Namespace,
    ends_of_replies: Callable[[tokenizer.Tokenizer], list[int]],
) -> str:
    """Converts a checkpoint to a Hugging Face folder and returns a summary."""
    workdir = find.workdir_of(directory)
    try:
        # A run of an earlier version lacks the keys that came later.
        section = config_json.SECTION_DEFAULTS | saved.config["model"]
        section = _with_trained_length(section, saved.config["data"])
        rules = saved.config["rules"]
        adapter = saved.config.get("adapter", {})
        model = model_of(section)
        folders = run_tokenizer.folders(workdir, saved.config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{directory}: the config in its manifest lacks {error!r}") from error

    # A run that began with an imported one has its config.json in the folder of that one.
    original_file = run_tokenizer.imported_config(workdir, saved.config)
    original = config_json.read(original_file) if original_file else None
    config = config_json.to_config(section, original)
    family = config_json.family_of(config)

    saved_dtypes = {
        entry.rpartition(" ")[2]
        for path, entry in saved.arrays.items()
        if path.startswith(PREFIX) and f"/{STATS_KEY}/" not in path
    }
    run_dtype = jnp.result_type(*saved_dtypes)
    dtype = np.dtype(args.dtype or run_dtype)
    # Trained parameters keep the dtype of the run, imported ones get back their own.
    keeps_dtypes = saved.step == 0 and not args.dtype
    dtypes = original_dtypes(workdir) if keeps_dtypes else {}
    if not dtypes:
        config |= {"dtype": dtype.name, "torch_dtype": dtype.name}

    mesh = make_mesh(devices=jax.devices()[:1])
    abstract = abstract_params(model, run_dtype, rules, mesh)
    check_free_space(target, count(abstract) * dtype.itemsize)
    with_adapter = peft.adapted(model, adapter)
    load_shapes = abstract_params(with_adapter, run_dtype, rules, mesh)
    load = _loader(directory, saved, load_shapes)
    base_model = base_model_of(saved.config)
    layers = adapted_layers(arrays.saved_params(saved.arrays))
    if args.adapter:
        with atomic_folder(target) as folder:
            peft.write(
                folder,
                family,
                section,
                load,
                shapes=weights.shapes_in_files(abstract, family),
                layers=layers,
                adapter=adapter,
                dtype=dtype,
                base_model=base_model,
            )
            model_card.write(
                folder,
                saved,
                architecture=family.architecture,
                num_params=count(load_shapes) - count(abstract),
                dtype=dtype.name,
                base_model=base_model,
                is_adapter=True,
            )
        trainable = saved.config.get("train", {}).get("trainable", "*")
        without = "" if trainable == "*" else f", without what train.trainable={trainable} trained"
        return f"step {saved.step}, an adapter of rank {adapter['rank']} in {dtype}{without}"

    # Without its bias the router would choose other experts.
    loses_bias = f"{PREFIX}{ROUTER_BIAS}" in saved.arrays and ROUTER_BIAS not in family.names
    if loses_bias and load(ROUTER_BIAS).any():
        raise ConfigError(
            f"{directory}: {ROUTER_BIAS} is not 0 (model.balance={section['balance']!r}), and "
            f"{family.architecture} has no such bias; train with another model.balance to export"
        )
    is_import = saved.step == 0 and (workdir / ORIGINAL).is_file()
    text = text_files.find(
        folders,
        saved.config,
        is_imported=is_import,
        ends_of_replies=ends_of_replies,
    )
    for note in text.notes:
        console.say(note, stream="stderr")
    config = text_files.with_token_ids(config, text, original_file)
    with atomic_folder(target) as folder:
        weights.write(
            folder,
            family,
            section,
            peft.merging(load, adapter, layers),
            shapes=weights.shapes_in_files(abstract, family),
            dtype=dtype,
            dtypes=dtypes,
            shard_bytes=round(args.max_shard_gb * 1e9),
        )
        text_files.write(folder, text)
        if not is_import:
            model_card.write(
                folder,
                saved,
                architecture=config["architectures"][0],
                num_params=count(abstract),
                dtype=dtype.name,
                base_model=base_model,
                is_adapter=False,
            )
        # Last: a folder without it is no model, whatever else is in it.
        write_json(folder / config_json.NAME, config)
    written = "the imported dtypes" if dtypes else dtype
    return f"step {saved.step}, a {config['architectures'][0]} in {written}"


def base_model_of(config: Mapping[str, Any]) -> str | None:
    """Returns the Hugging Face model whose parameters a run began with; None if it is unknown.

    `config` is that of the run. A run that began with an imported one has the name of that.
    """
    init_from = config.get("checkpoint", {}).get("init_from") or ""
    if folder := start.folder_of(init_from):
        return start.name_of(folder)
    if not init_from or object_store.is_url(init_from):
        return None
    try:
        _, saved = find.find_valid(Path(init_from), log=lambda line: None, verify=manifest.check)
    except ConfigError:
        return None
    return saved.identity.get(BASE) if saved.step == 0 else None


def export_faults(cfg: Config, workdir: str | Path | None) -> list[str]:
    """Returns why a run cannot export its model while it trains (`checkpoint.export`)."""
    key = f"checkpoint.export={cfg.checkpoint.export}"
    if not cfg.checkpoint.export:
        return []
    if not workdir:
        return [f"{key}: is written to WORKDIR/model; add --workdir=DIR, or leave it out"]
    if object_store.is_url(workdir):
        return [
            f"{key}: is written to a disk, and --workdir={workdir} is an object store; use a "
            f"folder, or leave it out"
        ]
    section: Section = {**cfg.model.options, "build": cfg.model.build}
    try:
        model_of(section)
        original = run_tokenizer.imported_config(Path(workdir), cfg.to_dict())
        config = config_json.to_config(section, config_json.read(original) if original else None)
        family = config_json.family_of(config)
    except ConfigError as error:
        return [f"{key}: {fault}" for fault in error.faults]
    if section.get("num_experts") and section.get("balance") == "bias":
        if ROUTER_BIAS not in family.names:
            return [
                f"{key}: {family.architecture} has no bias in the choice of experts; use another "
                f"model.balance than 'bias'"
            ]
    return []


def _with_trained_length(section: Section, data: Mapping[str, Any]) -> Section:
    """Returns a section whose max_seq_len is at least the length of the rows of the training.

    Without a table of positions the run did not use it, but readers of config.json do.
    """
    seq_len = data.get("seq_len") or 0
    has_table = section.get("positions") == "learned"
    # With a scaling, rope may depend on it.
    if has_table or section.get("rope_scaling") or seq_len <= section.get("max_seq_len", seq_len):
        return section
    return section | {"max_seq_len": seq_len}


def _loader(
    directory: Path, saved: manifest.Manifest, abstract: Params
) -> Callable[[str], np.ndarray]:
    """Returns the function that reads a parameter of a checkpoint by its path."""

    def load(path: str) -> np.ndarray:
        restored, _, _ = arrays.restore_params(directory, saved.arrays, abstract, [path])
        return np.asarray(functools.reduce(lambda tree, key: tree[key], path.split("/"), restored))

    return load


def original_dtypes(workdir: Path) -> dict[str, np.dtype]:
    """Returns the dtypes of the imported tensors that the run stores in another dtype."""
    path = workdir / DTYPES
    try:
        names = foreign.read_json(path)
        known = {str(dtype): dtype for dtype in files.DTYPES.values()}
        return {tensor: known[name] for tensor, name in names.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is damaged: {error!r}; use --dtype") from error


# ---- both ways ----


def model_of(section: Section) -> Model:
    """Returns the model of a section; raises ConfigError with a line for each fault."""
    if section.get("build") != BUILD:
        raise ConfigError(f"model.build={section.get('build')}: only {BUILD} can be converted")
    options = {key: value for key, value in section.items() if key != "build"}
    build, faults = bind("model", options, resolve(BUILD, key="model.build"))
    if faults:
        raise ConfigError(*faults)
    return build()


def abstract_params(model: Model, dtype: np.dtype, rules: sharding.Rules, mesh: Mesh) -> Params:
    """Returns the shapes and shardings of a model's parameters, with dtype `dtype`.

    Measured ones are not narrower than float32.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shardings = sharding.shardings(model.axes, shapes, rules, mesh)
    measured_dtype = jnp.promote_types(dtype, jnp.float32)

    def with_sharding(
        path: tuple, leaf: jax.ShapeDtypeStruct, leaf_sharding: NamedSharding
    ) -> jax.ShapeDtypeStruct:
        leaf_dtype = measured_dtype if is_measured(path) else dtype
        return leaf.update(dtype=leaf_dtype, sharding=leaf_sharding)

    return jax.tree.map_with_path(with_sharding, shapes, shardings)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def check_free_space(target: Path, size: int) -> None:
    existing = next(folder for folder in target.parents if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise ConfigError(f"{target}: {size:,} bytes needed, {free:,} bytes free")


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields a folder to fill.

    It is renamed to `target` at the end, or removed if the body raises.
    """
    folder = target.with_name(target.name + manifest.PARTIAL)
    is_first = distributed.process_id() == 0
    if is_first:
        # A conversion that was killed may have left one.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    distributed.barrier("folder created")
    try:
        yield folder
        distributed.barrier("folder filled")
        if is_first:
            # Otherwise a power loss may keep the rename, and not what the files hold.
            for path in (*folder.iterdir(), folder):
                storage.sync(path)
            os.rename(folder, target)
            storage.sync(target.parent)
    except BaseException:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
