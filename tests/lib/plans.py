"""Plans for H100 GPUs."""

from meshtrain import hardware
from meshtrain.cli import app
from meshtrain.config.parse import parse
from meshtrain.configs import gemma2, gpt2, llama3, mixtral
from meshtrain.errors import ConfigError
from meshtrain.tools.plan import constraints, from_config, search
from meshtrain.tools.plan.cost import step_cost
from meshtrain.tools.plan.machine import Machine
from meshtrain.tools.plan.sizes import decoder

H100 = hardware.devices()["h100"]
SMALL = decoder(
    num_layers=32,
    d_model=4096,
    d_ff=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    gated=True,
    tied=False,
)


def cost(layout, *, per_host=8, seq_len=8192, work=SMALL, overlap=None):
    return step_cost(work, layout, Machine(H100, layout.num_devices, per_host), seq_len, overlap)


# ---- its arithmetic ----


CONFIGS = {"llama3": llama3, "gpt2": gpt2, "gemma2": gemma2, "mixtral": mixtral}


# ---- its choice ----


def plan_of(config, device, num, *, fixed=(), limit=0.9, per_host=8):
    cfg = parse(config)
    machine = Machine(hardware.devices()[device], num, per_host)
    size = limit * machine.device.memory
    values = constraints.values([("--fix", flag) for flag in fixed])
    if faults := constraints.fixed_faults(cfg, values, num):
        raise ConfigError(*faults)
    plan_input = from_config.plan_input(cfg, platform="gpu")
    found = search.search(plan_input, machine, limit=size, fixed=values)
    return plan_input, machine, found


# ---- its command ----


def run(*flags, config="llama3", batch=64):
    return app.main("plan", [f"--config={config}", f"--config.train.global_batch={batch}", *flags])
