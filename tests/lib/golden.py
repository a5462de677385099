"""The table of what the step of a tiny model costs on each mesh: time and memory, not values.

  UPDATE_GOLDEN=1 python -m pytest -n0 -m "slow or not slow" tests/test_golden.py

writes tests/golden/programs.json: collectives, memory, donated bytes and compilations of five steps
of `train`, with evaluations and saves. What XLA decides is stored by version of jax; of another
version only what the package decides is compared.
"""

import collections
import json
import os
import re
import tempfile
from unittest import mock

import jax

from meshtrain import state as states
from meshtrain.program import Program
from meshtrain.tools.hlo import collective_ops, hlo, memory
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT

FILE = ROOT / "tests" / "golden" / "programs.json"
VERSION = "jax " + ".".join(jax.__version__.split(".")[:2])
STEPS = 5
# Decided by the package, whatever the version of XLA.
OF_THE_PACKAGE = (
    "parameter_bytes",
    "state_bytes",
    "donated_bytes",
    "compilations",
    "compiled_late",
)
WARM_STEPS = 3  # after them, and an evaluation and a save, everything is compiled
PEAK_TOLERANCE = 0.03

# Mesh, `train`, `pipeline` and `model` of each row.
ROWS = {
    "data 8": ({"data": 8}, {}, {}, {}),
    "fsdp 8, zero 3": ({"fsdp": 8}, {"zero_stage": 3}, {}, {}),
    "fsdp 2 x tensor 2 x context 2": ({"fsdp": 2, "tensor": 2, "context": 2}, {}, {}, {}),
    "pipeline 4 x data 2, 1f1b": (
        {"pipeline": 4, "data": 2},
        {"num_microbatches": 4},
        {"schedule": "1f1b"},
        {},
    ),
    "pipeline 2 x fsdp 2 x tensor 2, interleaved": (
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
        {"num_microbatches": 4},
        {"schedule": "interleaved", "num_chunks": 2},
        {},
    ),
    "expert 4 x data 2": ({"expert": 4, "data": 2}, {}, {}, {"num_experts": 4, "d_expert": 16}),
}


def measured(name):
    """Returns the figures of a row, from a run of `train`."""
    mesh, of_train, of_pipeline, of_model = ROWS[name]
    c = tiny_config()
    c.mesh.update({"data": 1, **mesh})
    c.model.update(num_layers=4, **of_model)
    c.train.update(steps=STEPS, **of_train)
    c.pipeline.update(of_pipeline)
    c.eval.update(every=2, batches=1)
    c.checkpoint.every = 2
    kept, names, late = [], collections.Counter(), collections.Counter()
    steps = []  # compiled, each time that `train` asks for it
    compile_step = Program.compile

    def compile_and_keep(program, batch):
        kept[:] = [program, CountedStep(compile_step(program, batch))]
        steps.append(kept[1])
        return kept[1]

    def count(event, duration, *, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            name = fun_name.removeprefix("jit_").removeprefix("jit(").removesuffix(")")
            names[name] += 1
            if kept and kept[1].num_calls > WARM_STEPS:
                late[name] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        with (
            mock.patch.object(Program, "compile", compile_and_keep),
            tempfile.TemporaryDirectory() as workdir,
        ):
            train(c, workdir=workdir)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    return figures(*kept) | {
        # The tests' own cache of programs hides that the same step is compiled again.
        "compilations": {"train_step": len(steps), "eval_step": names["eval_step"]},
        "compiled_late": dict(sorted(late.items())),
    }


class CountedStep:
    """A compiled step that counts its calls."""

    def __init__(self, compiled):
        self.compiled, self.num_calls = compiled, 0

    def __call__(self, *args):
        self.num_calls += 1
        return self.compiled(*args)

    def __getattr__(self, name):
        return getattr(self.compiled, name)


def figures(program, compiled):
    """Returns what the compiled step of a program sends, keeps and calls, per device."""
    module = hlo.parse(compiled.as_text())
    found = collective_ops.find_collectives(module, dict(program.mesh.shape))
    sent, runs = collections.Counter(), collections.Counter()
    for one in found:
        key = f"{one.kind} over {' x '.join(one.axes or ('?',))}"
        sent[key] += one.bytes
        runs[key] += one.count
    targets = re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())
    state = program.abstract_state
    return {
        "parameter_bytes": states.bytes_per_device(state.params),
        "state_bytes": states.bytes_per_device(state),
        "donated_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "peak_bytes": memory.memory_of(program, compiled, module=module).peak,
        "collectives": {
            key: {"tensors": round(runs[key]), "bytes": round(sent[key])} for key in sorted(sent)
        },
        "custom_calls": dict(sorted(collections.Counter(targets).items())),
    }


def differences(name, found, table):
    """Returns a line for each figure of a row that is not as in the table: what it was and is."""
    stored = table.get(VERSION, {}).get(name)
    compared = found.keys()
    if stored is None:
        compared = OF_THE_PACKAGE
        stored = next(iter(table.values()))[name]
    lines = []
    for key in compared:
        was, now = stored[key], found[key]
        if key == "peak_bytes":
            if abs(now / was - 1) > PEAK_TOLERANCE:
                lines.append(f"{name}: {key} was {was:,}, is {now:,}")
        elif isinstance(now, dict):
            for part in sorted(was.keys() | now.keys()):
                before, after = was.get(part, 0), now.get(part, 0)
                if before != after:
                    lines.append(f"{name}: {key}: {part} was {before}, is {after}")
        elif was != now:
            lines.append(f"{name}: {key} was {was:,}, is {now:,}")
    return lines


def stored_table():
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def update(name, found):
    """Writes the figures of a row."""
    table = stored_table()
    table.setdefault(VERSION, {})[name] = found
    FILE.write_text(json.dumps(table, indent=2) + "\n")


IS_UPDATE = bool(os.environ.get("UPDATE_GOLDEN"))
