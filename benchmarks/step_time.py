"""Step time of the trainer's own step beside a bare, hand-written jax step with the same maths.

  python benchmarks/step_time.py [--rounds=30] [--output=FILE.json]

A 6 M-parameter float32 Llama-style model on one CPU device, synthetic batch. Both steps are run in
turn, first one then the other leading, from the same initial parameters; what counts is the ratio
of the medians. The losses of both are compared first: a fast step with other maths is no peer.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import default
from meshtrain import config, optim, state
from meshtrain.data.source import Batch
from meshtrain.program import assemble

LAYERS, D, HEADS, KV_HEADS, F, VOCAB, SEQ, ROWS = 6, 256, 8, 4, 1024, 256, 256, 8


def settings():
    c = default.get_config()
    c.train.global_batch, c.data.seq_len = ROWS, SEQ
    c.model.num_layers, c.model.d_model, c.model.num_heads, c.model.num_kv_heads = (
        LAYERS,
        D,
        HEADS,
        KV_HEADS,
    )
    c.model.d_ff, c.model.vocab_size, c.data.build = F, VOCAB, "meshtrain.data.synthetic:build"
    return config.parse(c, num_devices=1)


def trainer_step(cfg):
    """Returns the compiled step of the trainer and its initial state."""
    program = assemble(cfg, cfg.model)
    rows = batch(program.mesh)
    with program.active():
        return program.compile(rows), program.start(0), rows


def batch(places):
    rows = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
    where = jax.sharding.NamedSharding(places, jax.P())
    arrays = Batch(rows[:, :-1], rows[:, 1:], np.ones((ROWS, SEQ), np.float32))
    return jax.device_put(arrays, where)


def bare_step(cfg, params, *, scan: bool = False, flat: bool = False):
    """The same maths as one would write it for a single model and a single device."""
    schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
    c = cfg.build_optimizer.keywords

    def rms(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    def rotate(x, sin, cos):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(x, p, sin, cos, mask):
        h = rms(x, p["attention_norm"]["scale"])
        q, k, v = (
            jnp.einsum("bsd,dhk->bshk", h, p["attention"][n]["kernel"])
            for n in ("query", "key", "value")
        )
        q, k = rotate(q, sin, cos), rotate(k, sin, cos)
        q = q.reshape(ROWS, SEQ, KV_HEADS, HEADS // KV_HEADS, D // HEADS)
        scores = jnp.einsum("bsgrk,btgk->bgrst", q, k) * (D // HEADS) ** -0.5
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
        out = jnp.einsum("bgrst,btgk->bsgrk", probs, v).reshape(ROWS, SEQ, HEADS, D // HEADS)
        x = x + jnp.einsum("bshk,hkd->bsd", out, p["attention"]["out"]["kernel"])
        h = rms(x, p["mlp_norm"]["scale"])
        h = h.reshape(-1, D) if flat else h
        gated = jax.nn.silu(h @ p["mlp"]["gate"]["kernel"]) * (h @ p["mlp"]["up"]["kernel"])
        return x + (gated @ p["mlp"]["down"]["kernel"]).reshape(x.shape)

    def loss(params, tokens, targets):
        half = D // HEADS // 2
        angle = jnp.arange(SEQ)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
        sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
        mask = jnp.tril(jnp.ones((SEQ, SEQ), bool))
        x = params["tokens"]["embedding"][tokens]
        if scan:
            x, _ = jax.lax.scan(
                lambda x, p: (layer(x, p, sin, cos, mask), None), x, params["layers"]
            )
        else:
            for i in range(LAYERS):
                x = layer(x, jax.tree.map(lambda p, i=i: p[i], params["layers"]), sin, cos, mask)
        logits = rms(x, params["final_norm"]["scale"]) @ params["output"]["kernel"]
        return jnp.mean(
            jax.nn.logsumexp(logits, -1)
            - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        )

    def decayed(tree):
        return jax.tree.map_with_path(lambda path, _: path[-1].key != "scale", tree)

    adamw = optax.adamw(
        schedule, c["b1"], c["b2"], c["epsilon"], weight_decay=c["weight_decay"], mask=decayed
    )
    optimizer = optax.chain(optax.clip_by_global_norm(cfg.optim.clip_norm), adamw)

    def train_step(carry, tokens, targets):
        params, opt_state = carry
        value, grad = jax.value_and_grad(loss)(params, tokens, targets)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return jax.jit(train_step, donate_argnums=0), (params, optimizer.init(params))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output")
    args = parser.parse_args()

    cfg = settings()
    ours, our_state, data = trainer_step(cfg)
    copy = lambda: jax.tree.map(jnp.array, jax.device_get(our_state.params))  # noqa: E731
    peers = {
        "bare, scan": bare_step(cfg, copy(), scan=True),
        "bare, unrolled": bare_step(cfg, copy()),
        "bare, unrolled, feed-forward on (B S, D)": bare_step(cfg, copy(), flat=True),
    }
    num_params = state.count(our_state.params)
    runs = {"meshtrain": (lambda carry: ours(carry, data), our_state)}
    for name, (train_step, carry) in peers.items():
        runs[name] = (lambda carry, f=train_step: f(carry, data.tokens, data.targets), carry)

    carries = {name: carry for name, (_, carry) in runs.items()}
    times, losses = {name: [] for name in runs}, {name: [] for name in runs}
    for round_ in range(args.rounds + 3):  # the first three compile and warm up
        for name in list(runs)[:: 1 if round_ % 2 else -1]:
            began = time.perf_counter()
            carries[name], report = runs[name][0](carries[name])
            jax.block_until_ready((carries[name], report))
            times[name].append(time.perf_counter() - began)
            losses[name].append(float(report["loss"] if name == "meshtrain" else report))
    medians = {name: statistics.median(values[3:]) for name, values in times.items()}
    for name, values in losses.items():
        print(
            f"{name:>40}: loss {values[0]:.5f} -> {values[-1]:.5f}, median step {medians[name] * 1e3:.1f} ms"
        )
        np.testing.assert_allclose(values[:5], losses["meshtrain"][:5], rtol=1e-4)
    ratio = medians["meshtrain"] / min(medians[name] for name in peers)
    print(f"{num_params:,} parameters, {ROWS} x {SEQ} tokens: {ratio:.3f} x the fastest bare step")
    if args.output:
        record = {
            "jax": jax.__version__,
            "python": sys.version.split()[0],
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "parameters": num_params,
            "ratio": ratio,
            "seconds": {name: values[3:] for name, values in times.items()},
        }
        Path(args.output).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
