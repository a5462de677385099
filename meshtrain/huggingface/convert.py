"""Makes a workdir of a Hugging Face folder, or a Hugging Face folder of a run's newest checkpoint.

  meshtrain convert HF_FOLDER WORKDIR       from config.json and safetensors: parameters at step 0
  meshtrain convert WORKDIR HF_FOLDER       also of one checkpoint, WORKDIR/checkpoints/STEP

Bits are kept, unless --dtype says otherwise. TARGET is there when all of it is, and must not be before.
"""

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

from meshtrain import checkpoint, huggingface
from meshtrain.checkpoint import arrays, manifest
from meshtrain.cluster import distributed, environment, runtime
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

COMPANIONS = (*tokenizer.FILES, "tokenizer_config.json", "generation_config.json")
COMPANIONS += ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
COMPANIONS += ("chat_template.jinja",)
ORIGINAL = "huggingface.json"  # in a workdir: the config.json that its model came with
PREFIX = "params/"  # of parameters, in a checkpoint


def model_of(section: dict[str, Any]) -> Model:
    """Returns the model of a section; raises ConfigError with all that is wrong in it."""
    if section.get("build") != BUILD:
        raise ConfigError(f"model.build={section.get('build')}: only {BUILD} can be converted")
    options = {key: value for key, value in section.items() if key != "build"}
    build, faults = bind("model", options, resolve(BUILD, key="model.build"))
    if faults:
        raise ConfigError(*faults)
    return build()


def abstract_params(model: Model, dtype: np.dtype, rules: sharding.Rules, mesh: Any) -> Params:
    """Returns shapes and places of a model's parameters in one dtype."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    places = sharding.shardings(model.axes, shapes, rules, mesh)
    return jax.tree.map(
        lambda leaf, place: leaf.update(dtype=dtype, sharding=place), shapes, places
    )


def take_in(source: Path, target: Path, args: argparse.Namespace) -> str:
    """Makes a workdir of a Hugging Face folder, with a checkpoint of the parameters alone."""
    huggingface.check_sizes(source)
    section = huggingface.model_section(source)
    dtype = np.dtype(args.dtype or huggingface.dtype_of(source))
    if dtype == np.float16:
        if args.dtype:
            raise ConfigError("--dtype=float16: a run keeps float32 or bfloat16")
        dtype = np.dtype(np.float32)  # which has all values of float16
    config = run_config(args.config, section, dtype)
    mesh = make_mesh(fsdp=-1)
    abstract = abstract_params(model_of(section), dtype, config["rules"], mesh)
    huggingface.check(source, abstract, section)
    check_room(target, bytes_of(abstract))
    with distributed.raise_on_all_processes():
        params = huggingface.read(source, abstract, section)
    everywhere = NamedSharding(mesh, PartitionSpec())
    step = jax.make_array_from_callback((), everywhere, lambda _: np.int32(0))
    state = TrainState(step, params, opt_state=None)
    with appearing(target) as made, contextlib.closing(arrays.Arrays()) as writer:
        folder = made / checkpoint.FOLDER
        if distributed.process_id() == 0:
            copy_companions([source], made)
            shutil.copyfile(source / config_json.NAME, made / ORIGINAL)
            write_json(made / config_json.NAME, config)
            manifest.partial(folder, 0).mkdir(parents=True)
        distributed.barrier("convert")
        writer.save(manifest.partial(folder, 0), state)
        writer.wait()
        if distributed.process_id() == 0:
            facts = dict(config=config, mesh=dict(mesh.shape), arrays=arrays.shapes_of(state))
            facts |= dict(processes=distributed.num_processes(), versions=distributed.versions())
            facts |= dict(position=0, time=time.time(), metrics={}, watch={})
            manifest.commit(folder, 0, **facts)
    return f"step 0, a {huggingface.family_in(source).architecture} in {dtype}"


def run_config(path: str, section: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Returns the config in a file with this model in it."""
    config = configfile.load_config(path).to_dict()
    config["model"] = section
    config["train"]["param_dtype"] = config["optim"]["moment_dtype"] = dtype.name
    if "vocab_size" in config["data"]:
        config["data"]["vocab_size"] = section["vocab_size"]
    if config["data"].get("seq_len", 0) > section["max_seq_len"]:
        config["data"]["seq_len"] = section["max_seq_len"]
    return config


def give_out(source: Path, target: Path, args: argparse.Namespace) -> str:
    """Makes a Hugging Face folder of a checkpoint, parameter by parameter."""
    directory, saved = checkpoint.find(source, tell=functools.partial(print, file=sys.stderr))
    section = saved.config["model"]
    model = model_of(section)
    folders = companions_of(checkpoint.workdir_of(directory), saved.config)
    original = next(
        (folder / ORIGINAL for folder in folders if (folder / ORIGINAL).is_file()), None
    )
    config = config_json.to_config(section, original and config_json.read(original))
    kinds = {path: kind.rpartition(" ")[2] for path, kind in saved.arrays.items()}
    stored = jnp.result_type(*{kind for path, kind in kinds.items() if path.startswith(PREFIX)})
    dtype = np.dtype(args.dtype or stored)
    config |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    mesh = make_mesh(devices=jax.devices()[:1])
    abstract = abstract_params(model, stored, saved.config["rules"], mesh)
    check_room(target, count(abstract) * dtype.itemsize)

    def load(path: str) -> np.ndarray:
        read, _, _ = arrays.restore_params(directory, saved.arrays, abstract, [path])
        return np.asarray(functools.reduce(lambda tree, key: tree[key], path.split("/"), read))

    with appearing(target) as made:
        copy_companions(folders, made)
        write_json(made / config_json.NAME, config)
        huggingface.write(
            made,
            config_json.family_of(config),
            section,
            load,
            parameters=huggingface.paths(abstract),
            dtype=dtype,
            shard_bytes=round(args.max_shard_gb * 1e9),
        )
    return f"step {saved.step}, a {config['architectures'][0]} in {dtype}"


def companions_of(workdir: Path, config: dict[str, Any]) -> list[Path]:
    """Returns where a tokenizer may lie: in the workdir, or where its parameters or data came from."""
    init_from, data = config["checkpoint"]["init_from"], config["data"].get("path")
    others = [checkpoint.workdir_of(Path(init_from))] if init_from else []
    mixed = [Path(path) for path, _ in config["data"].get("mixture", ())]
    return [workdir, *others, *([Path(data)] if data else []), *mixed]


def copy_companions(folders: list[Path], target: Path) -> None:
    """Copies each file that belongs to a tokenizer from the first folder that has it."""
    for name in COMPANIONS:
        if found := next((folder / name for folder in folders if (folder / name).is_file()), None):
            shutil.copyfile(found, target / name)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def check_room(target: Path, size: int) -> None:
    there = next(folder for folder in target.parents if folder.is_dir())
    if (free := shutil.disk_usage(there).free) < size:
        raise ConfigError(f"{target}: {size / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free")


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Gives a folder to fill, which becomes `target` at the end; nothing is left if something fails."""
    made = target.with_name(target.name + manifest.PARTIAL)
    first = distributed.process_id() == 0
    if first:
        shutil.rmtree(made, ignore_errors=True)  # of one that was killed
        made.mkdir(parents=True)
    distributed.barrier("made")
    try:
        yield made
        distributed.barrier("filled")
        if first:
            os.rename(made, target)
    except BaseException:
        if first:
            shutil.rmtree(made, ignore_errors=True)
        raise


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    source, target = args.source.resolve(), args.target.absolute()
    if os.path.lexists(target):
        raise ConfigError(f"{args.target}: is there already; use another TARGET, or remove it")
    if not args.max_shard_gb > 0:
        raise ConfigError(f"--max_shard_gb={args.max_shard_gb}: use more than 0")
    ours = (source / checkpoint.FOLDER).is_dir() or (source / manifest.NAME).is_file()
    if not ours and not (source / config_json.NAME).is_file():
        raise ConfigError(
            f"{args.source}: neither a workdir ({checkpoint.FOLDER}/) nor a Hugging Face folder (config.json)"
        )
    if ours:
        jax.config.update("jax_platforms", "cpu")  # parameter by parameter, nothing to compute
    runtime.start(args)
    if ours and distributed.num_processes() > 1:
        raise ConfigError(f"{args.source}: one process is enough for a Hugging Face folder of it")
    try:
        told = (give_out if ours else take_in)(source, target, args)
    except OSError as error:
        raise ConfigError(f"{error.filename or args.target}: {error.strerror or error}") from error
    if distributed.process_id() == 0:
        print(f"{args.target}: {told}")
    return 0


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("source", type=Path, metavar="SOURCE")
    flags.add_argument("target", type=Path, metavar="TARGET")
    dtypes = ("float32", "bfloat16", "float16")
    flags.add_argument("--dtype", choices=dtypes, help="of the parameters (default: as they are)")
    flags.add_argument(
        "--max_shard_gb", type=float, default=5.0, metavar="GB", help="largest file (default: 5)"
    )
    flags.add_argument(
        "--config",
        default="configs/default.py",
        metavar="FILE",
        help="what a workdir's config has beside the model (default: %(default)s)",
    )
    environment.add_flags(flags)
