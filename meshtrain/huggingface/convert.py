"""Converts a Hugging Face folder to a workdir, or a run's newest checkpoint to a Hugging Face folder."""

import argparse
import contextlib
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain import checkpoint, console, huggingface
from meshtrain.checkpoint import arrays, manifest, run_tokenizer
from meshtrain.cluster import distributed, runtime
from meshtrain.config import files as configfile
from meshtrain.config.bind import bind
from meshtrain.config.build import resolve
from meshtrain.data import tokenizer
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json
from meshtrain.huggingface.families import BUILD
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding
from meshtrain.parallel.mesh import make_mesh
from meshtrain.state import TrainState, bytes_of, count

ORIGINAL = run_tokenizer.HUGGINGFACE_CONFIG
PREFIX = "params/"  # of parameter paths in a checkpoint


def model_of(section: dict[str, Any]) -> Model:
    """Returns the model of a section; raises ConfigError with a line for each fault."""
    if section.get("build") != BUILD:
        raise ConfigError(f"model.build={section.get('build')}: only {BUILD} can be converted")
    options = {key: value for key, value in section.items() if key != "build"}
    build, faults = bind("model", options, resolve(BUILD, key="model.build"))
    if faults:
        raise ConfigError(*faults)
    return build()


def abstract_params(model: Model, dtype: np.dtype, rules: sharding.Rules, mesh: Any) -> Params:
    """Returns the shapes and shardings of a model's parameters, all with dtype `dtype`."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shardings = sharding.shardings(model.axes, shapes, rules, mesh)
    return jax.tree.map(lambda x, s: x.update(dtype=dtype, sharding=s), shapes, shardings)


def import_folder(source: Path, target: Path, args: argparse.Namespace) -> str:
    """Converts a Hugging Face folder to a workdir with a checkpoint of the parameters; returns a summary."""
    huggingface.check_sizes(source)
    section = huggingface.model_section(source)
    dtype = np.dtype(args.dtype or huggingface.dtype_of(source))
    if dtype == np.float16:
        if args.dtype:
            raise ConfigError(
                "--dtype=float16: a run stores parameters in float32 or bfloat16; use one of them"
            )
        dtype = np.dtype(np.float32)  # represents every float16 exactly
    config = run_config(args.config, section, dtype)
    mesh = make_mesh(fsdp=-1)
    abstract = abstract_params(model_of(section), dtype, config["rules"], mesh)
    huggingface.check(source, abstract, section)
    check_free_space(target, bytes_of(abstract))
    with distributed.raise_on_all_processes():
        params = huggingface.read(source, abstract, section)
    replicated = NamedSharding(mesh, PartitionSpec())
    step = jax.make_array_from_callback((), replicated, lambda _: np.int32(0))
    state = TrainState(step, params, opt_state=None)
    with atomic_folder(target) as workdir, contextlib.closing(arrays.AsyncWriter()) as writer:
        folder = workdir / checkpoint.FOLDER
        if distributed.process_id() == 0:
            run_tokenizer.copy_files([source], workdir, run_tokenizer.FILES)
            shutil.copyfile(source / config_json.NAME, workdir / ORIGINAL)
            write_json(workdir / config_json.NAME, config)
            manifest.partial_folder(folder, 0).mkdir(parents=True)
        distributed.barrier("convert")
        with console.progress("saving", 0):
            writer.save(manifest.partial_folder(folder, 0), state)
            writer.wait()
        if distributed.process_id() == 0:
            facts = dict(config=config, mesh=dict(mesh.shape), arrays=arrays.shapes_of(state))
            facts |= dict(processes=distributed.num_processes(), versions=distributed.versions())
            facts |= dict(position=0, time=time.time(), metrics={}, watch={})
            facts |= dict(identity={"tokenizer": tokenizer.digest_of(source)})
            manifest.commit(folder, 0, **facts)
    return f"step 0, a {huggingface.family_in(source).architecture} in {dtype}"


def run_config(path: str, section: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Returns the config in a file, with its `model` section and the keys that depend on it replaced."""
    config = configfile.load_config(path).to_dict()
    config["model"] = section
    config["train"]["param_dtype"] = config["optim"]["moment_dtype"] = dtype.name
    if "vocab_size" in config["data"]:
        config["data"]["vocab_size"] = section["vocab_size"]
    if config["data"].get("seq_len", 0) > section["max_seq_len"]:
        config["data"]["seq_len"] = section["max_seq_len"]
    return config


def export_folder(source: Path, target: Path, args: argparse.Namespace) -> str:
    """Converts a checkpoint to a Hugging Face folder, one parameter at a time; returns a summary."""
    directory, saved = checkpoint.find_valid(source, log=functools.partial(print, file=sys.stderr))
    section = saved.config["model"]
    model = model_of(section)
    folders = run_tokenizer.folders(checkpoint.workdir_of(directory), saved.config)
    original = next(
        (folder / ORIGINAL for folder in folders if (folder / ORIGINAL).is_file()), None
    )
    config = config_json.to_config(section, original and config_json.read(original))
    dtypes = {path: entry.rpartition(" ")[2] for path, entry in saved.arrays.items()}
    stored = jnp.result_type(*{name for path, name in dtypes.items() if path.startswith(PREFIX)})
    dtype = np.dtype(args.dtype or stored)
    config |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    mesh = make_mesh(devices=jax.devices()[:1])
    abstract = abstract_params(model, stored, saved.config["rules"], mesh)
    check_free_space(target, count(abstract) * dtype.itemsize)

    def load(path: str) -> np.ndarray:
        restored, _, _ = arrays.restore_params(directory, saved.arrays, abstract, [path])
        return np.asarray(functools.reduce(lambda tree, key: tree[key], path.split("/"), restored))

    with atomic_folder(target) as folder:
        run_tokenizer.copy_files(folders, folder, run_tokenizer.FILES)
        write_json(folder / config_json.NAME, config)
        huggingface.write(
            folder,
            config_json.family_of(config),
            section,
            load,
            parameters=huggingface.paths(abstract),
            dtype=dtype,
            shard_bytes=round(args.max_shard_gb * 1e9),
        )
    return f"step {saved.step}, a {config['architectures'][0]} in {dtype}"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def check_free_space(target: Path, size: int) -> None:
    existing = next(folder for folder in target.parents if folder.is_dir())
    if (free := shutil.disk_usage(existing).free) < size:
        raise ConfigError(f"{target}: {size / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free")


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields a folder to fill. It is renamed to `target` at the end, or removed if the body raises."""
    folder = target.with_name(target.name + manifest.PARTIAL)
    is_first = distributed.process_id() == 0
    if is_first:
        shutil.rmtree(folder, ignore_errors=True)  # left by a conversion that was killed
        folder.mkdir(parents=True)
    distributed.barrier("folder created")
    try:
        yield folder
        distributed.barrier("folder filled")
        if is_first:
            os.rename(folder, target)
    except BaseException:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def run(args: argparse.Namespace) -> int:
    """Converts a folder; returns the exit code."""
    source, target = args.source.resolve(), args.target.absolute()
    if os.path.lexists(target):
        raise ConfigError(f"{args.target}: exists already; use another TARGET, or remove it")
    if not args.max_shard_gb > 0:
        raise ConfigError(f"--max_shard_gb={args.max_shard_gb}: use more than 0")
    is_export = (source / checkpoint.FOLDER).is_dir() or (source / manifest.NAME).is_file()
    if not is_export and not (source / config_json.NAME).is_file():
        raise ConfigError(
            f"{args.source}: neither a workdir ({checkpoint.FOLDER}/) nor a Hugging Face folder (config.json)"
        )
    if is_export:
        jax.config.update("jax_platforms", "cpu")  # an export computes nothing
    runtime.start(args)
    if is_export and distributed.num_processes() > 1:
        raise ConfigError(f"{args.source}: an export runs in one process; start only one")
    try:
        convert = export_folder if is_export else import_folder
        summary = convert(source, target, args)
    except OSError as error:
        raise ConfigError(f"{error.filename or args.target}: {error.strerror or error}") from error
    if distributed.process_id() == 0:
        print(f"{args.target}: {summary}")
    return 0
