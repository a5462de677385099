"""The small float32 Llama-style model that several benchmarks use, sized by their flags."""

import argparse
import contextlib
from typing import Any

import jax
from ml_collections import ConfigDict

from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.config.schema import Config
from meshtrain.configs import default
from meshtrain.data.loader import Loader
from meshtrain.program import Program, assemble

SIZES = {"layers": 8, "width": 256, "seq-len": 256}  # 8.0 M parameters
# For scripts that compile many programs and measure no times: LLVM optimizations do not change the
# bytes.
QUICK_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def add_numbers(parser: argparse.ArgumentParser, **numbers: int) -> None:
    """Adds a flag with a default for each of `numbers` and of SIZES."""
    for name, value in {**numbers, **SIZES}.items():
        parser.add_argument(f"--{name}", type=int, default=value)


def settings(args: argparse.Namespace, **sections: dict[str, Any]) -> ConfigDict:
    """Returns the config of the model, updated with these sections."""
    c = default.get_config()
    c.model.update(num_layers=args.layers, d_model=args.width, d_ff=4 * args.width)
    c.model.update(num_heads=8, num_kv_heads=4, vocab_size=256)
    c.data.update(seq_len=args.seq_len, build="meshtrain.data.synthetic:build")
    for name, keys in sections.items():
        c[name].update(keys)
    return c


def program_of(c: ConfigDict, devices: list[jax.Device]) -> tuple[Config, Program, Any]:
    """Returns the settings, the program built from them for these devices, and the first batch."""
    cfg = parse(c, num_devices=len(devices))
    parts = build(cfg)
    program = assemble(cfg, parts, devices=devices)
    size = cfg.train.global_batch
    with contextlib.closing(
        Loader(parts.train_data, program.mesh, cfg.rules, global_batch=size)
    ) as loader:
        return cfg, program, loader.read(0)


def name_of(args: argparse.Namespace) -> str:
    """Returns the model's name in records, with its layers and width: llama-8x256."""
    return f"llama-{args.layers}x{args.width}"
