"""Generates text from a trained model.

python -m meshtrain.generate --workdir=runs/quickstart --prompt="def "
"""

import argparse
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import checkpoint, cli, grads
from meshtrain.checkpoint import arrays
from meshtrain.config import Config, parse
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.mesh import AXES
from meshtrain.models.base import Model, Params
from meshtrain.program import assemble

# S sequence, V vocabulary, D model


def generate(
    model: Model,
    params: Params,
    prompt: np.ndarray,
    *,
    seq_len: int,
    length: int,
    temperature: float,
    seed: int = 0,
) -> np.ndarray:
    """Returns `length` tokens drawn one after the other from the model, given a prompt of 1 or more.

    The model sees the last `seq_len` tokens and runs over them anew for each: simple, and fast
    enough for a sample. Temperature 0 takes the likeliest token.
    """
    prompt = np.asarray(prompt, np.int32)[-seq_len:]
    window_S = np.zeros(seq_len, np.int32)
    window_S[: len(prompt)] = prompt
    keys = jax.random.split(jax.random.key(seed), length)
    draw = jax.jit(functools.partial(_draw, model, temperature=temperature))
    return np.asarray(draw(params, jnp.asarray(window_S), jnp.int32(len(prompt)), keys))


def _draw(model: Model, params: Params, window_S, used, keys, *, temperature: float) -> jax.Array:
    def next_token(carry, key):
        window_S, used = carry
        # Causal: what stands behind the last token in use has no say.
        batch = Batch(window_S[None], window_S[None], jnp.ones((1, window_S.size), jnp.float32))
        x_1SD = grads.run_blocks(
            model.block, model.stack(params["layers"]), model.embed(params, batch), batch
        )
        x_11D = jax.lax.dynamic_slice_in_dim(x_1SD, used - 1, 1, axis=1)
        logits_V = model.logits(params, x_11D)[0, 0].astype(jnp.float32)
        drawn = (
            jax.random.categorical(key, logits_V / temperature)
            if temperature
            else jnp.argmax(logits_V)
        )
        full = used == window_S.size
        window_S = jnp.where(full, jnp.roll(window_S, -1), window_S)
        used = jnp.where(full, used, used + 1)
        return (window_S.at[used - 1].set(drawn), used), drawn

    return jax.lax.scan(next_token, (window_S, used), keys)[1]


def restore(workdir: Path) -> tuple[Config, Params]:
    """Returns the config and the newest parameters of a run, on one device."""
    try:
        raw = json.loads((workdir / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"--workdir={workdir}: no run there (config.json is missing)") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--workdir={workdir}: config.json cannot be read: {error}") from error
    cfg = parse({**raw, "mesh": dict.fromkeys(AXES, 1)}, num_devices=1, own=["data"])
    program = assemble(cfg, cfg.model, devices=jax.devices()[:1])
    directory, found = checkpoint.find(workdir, tell=functools.partial(print, file=sys.stderr))
    return cfg, arrays.restore_params(directory, found.arrays, program.abstract_state.params)[0]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = cli.plain_parser("generate", __doc__)
    parser.add_argument(
        "--workdir", type=Path, required=True, metavar="DIR", help="of a run on bytes of text"
    )
    parser.add_argument("--prompt", default="\n", metavar="TEXT")
    parser.add_argument("--length", type=int, default=400, metavar="N", help="bytes to generate")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    return cli.told(lambda: write(parser.parse_args(argv)))


def write(args: argparse.Namespace) -> int:
    """Prints a text as the flags want it."""
    if not args.prompt or args.length < 1 or args.temperature < 0:
        raise ConfigError("--prompt must not be empty, --length 1 or more, --temperature 0 or more")
    cfg, params = restore(args.workdir)
    if cfg.model.logits is None or cfg.raw["model"]["vocab_size"] > 256:
        raise ConfigError(f"--workdir={args.workdir}: its model is no language model over bytes")
    prompt = np.frombuffer(args.prompt.encode(), np.uint8)
    sampling = dict(length=args.length, temperature=args.temperature, seed=args.seed)
    tokens = generate(cfg.model, params, prompt, seq_len=cfg.raw["data"]["seq_len"], **sampling)
    print(args.prompt + bytes(tokens.astype(np.uint8)).decode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
