"""Training an imported model changes it as AdamW in torch changes the model of transformers."""

import jax
import numpy as np
import pytest

from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.source import Source
from meshtrain.huggingface import weights
from meshtrain.huggingface.families import FAMILIES as DESCRIPTIONS
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.hf import FAMILIES, GOLDEN

NUM_STEPS = 10


def test_each_description_has_a_folder():
    described = {family.architecture for family in DESCRIPTIONS}
    assert {weights.family_in(GOLDEN / name).architecture for name in FAMILIES} == described


def torch_losses(folder, batches, rate):
    """Returns the losses of AdamW in torch, a float32 model of transformers, one a batch."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    # Otherwise the token that pads rows, which some families have by default, is not trained.
    model.get_input_embeddings().padding_idx = None
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        is_vector = parameter.ndim < 2 or name.endswith("bias")
        groups[is_vector].append(parameter)
    decays = [
        {"params": groups[False], "weight_decay": 0.1},
        {"params": groups[True], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(decays, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for batch in batches:
        logits = model(torch.tensor(batch.tokens, dtype=torch.long)).logits.flatten(0, 1)
        targets = torch.tensor(batch.targets.reshape(-1), dtype=torch.long)
        nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        token_weights = torch.tensor(batch.weights.reshape(-1))
        loss = (nll * token_weights).sum() / token_weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def config_of(folder, rate):
    c = tiny_config()
    section = weights.model_section(folder)
    c.model.update({key: value for key, value in section.items() if value != ()})
    c.model.dropout = 0.0  # the model of transformers is in eval mode, without it
    # transformers adds no loss of the router unless it is asked for, and leaves its bias as it is.
    c.model.balance_weight = 0.0
    if section["balance"] != "bias":
        c.model.balance = "none"
    c.data.update(vocab_size=section["vocab_size"])
    c.train.steps, c.eval.batches = NUM_STEPS, 0
    c.mesh.update(data=2, fsdp=2, tensor=2)
    c.optim.learning_rate = rate
    c.optim.schedule = "constant"
    c.checkpoint.init_from = str(folder)
    return c


# The logits of Granite are divided by 6.
RATES = {"granite": 3e-2}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_training_steps_equal_those_of_torch(family, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    rate = RATES.get(family, 3e-3)
    c = config_of(GOLDEN / family, rate)
    source = build(parse(c, num_devices=8)).train_data
    batches = {}

    def read(indices):
        batches[int(indices[0])] = batch = source.read(indices)
        return batch

    rows = []
    with jax.default_matmul_precision("highest"):
        train(c, workdir=tmp_path / "run", data=Source(read, size=None), on_metrics=rows.append)
    losses = [row["loss"] for row in rows if "loss" in row]
    size = c.train.global_batch
    in_order = [batches[size * step] for step in range(NUM_STEPS)]
    expected, untrained = (
        np.array(torch_losses(GOLDEN / family, in_order, of_torch)) for of_torch in (rate, 0.0)
    )
    assert len(losses) == NUM_STEPS and np.abs(expected - untrained).max() > 0.02
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)
