"""One implementation of the training step in its own process: meshtrain, bare jax or torch.

  python benchmarks/lib/implementation.py NAME FILE

comparison.py starts it. FILE is the config, as JSON. For bare jax and torch there is initial.npz in
the same folder, which the NAME "initial" writes. After its first step the process prints a line of
JSON; then it reads numbers of steps from stdin, runs them, and prints a line of JSON for each. The
NAME "ceiling" measures the rates of the device instead.
"""

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

IMPLEMENTATIONS = {
    "meshtrain": {},
    "bare jax, scan": dict(unroll=False, flat=False),
    "bare jax, unrolled": dict(unroll=True, flat=False),
    "bare jax, unrolled, matrices flat": dict(unroll=True, flat=True),
    "torch eager": dict(compile=None),
    "torch compiled": dict(compile="default"),
    "torch compiled, max-autotune": dict(compile="max-autotune-no-cudagraphs"),
}
INITIAL = "initial.npz"  # the initial parameters, next to the config
FUSED = "__cudnn$fmha"  # custom call of fused attention in a compiled program


def prepare(name: str, file: Path):
    """Returns a function that runs a step, a dict of facts, and one for the memory used.

    The first function returns the loss of its step.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    rows, length = config["train"]["global_batch"], config["data"]["seq_len"]
    shape = rows, length + 1
    # As often as the words of a text: Zipf's law. The gradients of a frequent token's embedding are
    # added up.
    frequency = 1 / np.arange(1, config["model"]["vocab_size"] + 1)
    tokens = np.random.default_rng(0).choice(len(frequency), shape, p=frequency / frequency.sum())
    if name == "meshtrain":
        return prepare_meshtrain(file, np.int32(tokens))
    params, count = read_initial(file.with_name(INITIAL))
    prepare_baseline = prepare_torch if name.startswith("torch") else prepare_bare
    step, facts, memory = prepare_baseline(config, params, tokens, **IMPLEMENTATIONS[name])
    return step, facts | {"parameters": count}, memory


def prepare_meshtrain(file: Path, tokens: np.ndarray):
    import jax

    from benchmarks.lib import devices
    from meshtrain import state
    from meshtrain.cluster import runtime
    from meshtrain.config import load as configfile
    from meshtrain.config.build import build
    from meshtrain.config.parse import parse
    from meshtrain.config.schema import AXES
    from meshtrain.data.source import Batch
    from meshtrain.parallel import sharding
    from meshtrain.program import assemble

    runtime.setup()  # as train() does
    c = configfile.load_config(str(file))
    # Without a mesh in the settings (data=-1), the step runs on one device, as those of the others.
    mesh_devices = jax.devices()[: max(1, math.prod(c.mesh[axis] for axis in AXES))]
    cfg = parse(c, num_devices=len(mesh_devices))
    parts = build(cfg)
    program = assemble(cfg, parts, devices=mesh_devices)
    weights = np.ones((tokens.shape[0], tokens.shape[1] - 1), np.float32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], weights)
    spec = sharding.spec_for(("batch",), weights.shape[:1], cfg.rules, program.mesh.shape)
    batch = jax.device_put(batch, jax.sharding.NamedSharding(program.mesh, spec))
    with program.active():
        carry = program.initial_state(0)
        began = time.perf_counter()
        compiled = program.compile(batch)
    facts = {"compile_seconds": time.perf_counter() - began}
    facts["parameters"] = state.count(program.abstract_state.params)
    facts["mfu_at_most"] = devices.mfu_at_most(program, compiled, c)

    def step():
        nonlocal carry
        carry, metrics = compiled(carry, batch)
        return metrics["loss"]

    return step, facts | fused(compiled), lambda: bytes_of(compiled)


def prepare_bare(config: dict[str, Any], params: dict, tokens: np.ndarray, **options: bool):
    import jax

    from benchmarks.lib import jax_step

    optimizer = jax_step.make_optimizer(config["optim"])
    params = jax.device_put(params)
    carry = params, optimizer.init(params)
    batch = jax.device_put((np.int32(tokens[:, :-1]), np.int32(tokens[:, 1:])))
    train_step = jax_step.make_step(
        config["model"], optimizer, dtype=config["train"]["dtype"], **options
    )
    began = time.perf_counter()
    compiled = jax.jit(train_step, donate_argnums=0).lower(carry, *batch).compile()
    facts = {"compile_seconds": time.perf_counter() - began}

    def step():
        nonlocal carry
        carry, loss = compiled(carry, *batch)
        return loss

    return step, facts | fused(compiled), lambda: bytes_of(compiled)


def prepare_torch(config: dict[str, Any], params: dict, tokens: np.ndarray, compile: str | None):
    import torch

    from benchmarks.lib import torch_step

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    on_gpu = torch.cuda.is_available() and os.environ.get("JAX_PLATFORMS") != "cpu"
    device = "cuda" if on_gpu else "cpu"
    step = torch_step.make_step(
        config["model"],
        params,
        optim=config["optim"],
        seq_len=config["data"]["seq_len"],
        device=device,
        dtype=config["train"]["dtype"],
        compile=compile,
    )
    pair = [torch.tensor(part, device=device) for part in (tokens[:, :-1], tokens[:, 1:])]
    memory = torch.cuda.max_memory_allocated if on_gpu else lambda: None
    return lambda: step(*pair), {"compile_seconds": None}, memory


def fused(compiled: Any) -> dict[str, bool]:
    return {"fused_attention": FUSED in compiled.as_text()}


def bytes_of(compiled: Any) -> int:
    """Returns the peak memory of a compiled jax step, including the state."""
    m = compiled.memory_analysis()
    arguments_and_results = (
        m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    )
    return arguments_and_results + m.temp_size_in_bytes


def read_initial(file: Path) -> tuple[dict[str, Any], int]:
    """Returns the initial parameters as nested dicts, and their number."""
    params, count = {}, 0
    with np.load(file) as arrays:
        for path in arrays.files:
            *parents, name = path.split("/")
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = arrays[path]
            count += node[name].size
    return params, count


def write_initial(file: Path) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from meshtrain.config import load as configfile
    from meshtrain.config.build import build
    from meshtrain.config.parse import parse
    from meshtrain.program import assemble

    cfg = parse(configfile.load_config(str(file)), num_devices=1)

    parts = build(cfg)
    program = assemble(cfg, parts, devices=jax.devices()[:1])
    with program.active():  # parameters only: without optimizer state
        params = jax.jit(program.init_params)(jax.random.key(0))
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    np.savez(file.with_name(INITIAL), **named)


def ceiling() -> dict[str, Any]:
    """Returns the FLOP/s of a 16-bit matrix product, and the bytes/s that a copy moves.

    These are the bytes that it reads and those that it writes.
    """
    import jax
    import jax.numpy as jnp

    from benchmarks.lib import devices

    def seconds(compute, *args):
        compute = jax.jit(compute)
        jax.block_until_ready(compute(*args))
        times = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready([compute(*args) for _ in range(10)])
            times.append((time.perf_counter() - began) / 10)
        return statistics.median(times)

    found = devices.describe()
    side, copied = (8192, 1 << 30) if found.is_gpu else (64, 1 << 16)
    # Random numbers, because the power that a product draws, and with it the clock rate, depends on
    # the data.
    a, b = jax.random.normal(jax.random.key(0), (2, side, side), found.dtype)
    x = jnp.ones(copied // 4, jnp.float32)
    return {
        "matmul_flops": 2 * side**3 / seconds(jnp.matmul, a, b),
        "copy_bytes": 2 * copied / seconds(lambda x: x + 1, x),
    }


def serve(name: str, file: Path) -> None:
    step, facts, memory = prepare(name, file)
    float(step())
    reply(facts)
    for line in sys.stdin:
        began = time.perf_counter()
        losses = [step() for _ in range(int(line))]
        losses = [float(loss) for loss in losses]  # waits for all steps
        seconds = (time.perf_counter() - began) / len(losses)
        losses = [loss if math.isfinite(loss) else None for loss in losses]
        reply({"seconds": seconds, "losses": losses, "bytes": memory()})


def reply(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)


def main():
    name, file = sys.argv[1], Path(sys.argv[2])
    try:
        if name == "initial":
            write_initial(file)
            reply({})
        elif name == "ceiling":
            reply(ceiling())
        else:
            serve(name, file)
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"[:300]})
        raise


if __name__ == "__main__":
    main()
