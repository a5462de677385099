"""The baseline in torch: a step in the style of nanoGPT, with the maths of meshtrain's model.

It uses scaled_dot_product_attention, fused AdamW, autocast for bfloat16 and, optionally,
`torch.compile`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# B batch, S sequence, D model, H heads, G key/value heads, K head dim, V vocabulary


class Norm(nn.Module):
    def __init__(self, c: Mapping[str, Any]):
        super().__init__()
        self.epsilon, D = c["norm_epsilon"], c["d_model"]
        self.scale = nn.Parameter(torch.ones(D))
        self.bias = nn.Parameter(torch.zeros(D)) if c["norm"] == "layer" and c["bias"] else None
        self.layer = c["norm"] == "layer"

    def forward(self, x):
        if self.layer:
            return F.layer_norm(x, x.shape[-1:], self.scale, self.bias, self.epsilon)
        return F.rms_norm(x, x.shape[-1:], self.scale, self.epsilon)


class Block(nn.Module):
    def __init__(self, c: Mapping[str, Any]):
        super().__init__()
        D, F_, self.H, self.G = c["d_model"], c["d_ff"], c["num_heads"], c["num_kv_heads"]
        K = self.K = c["head_dim"] or D // self.H
        self.attention_norm, self.mlp_norm = Norm(c), Norm(c)
        bias = c["bias"]
        self.qkv = nn.Linear(D, (self.H + 2 * self.G) * K, bias)
        self.out = nn.Linear(self.H * K, D, bias)
        self.gated = c["mlp"] == "swiglu"
        self.up = nn.Linear(D, 2 * F_ if self.gated else F_, bias)  # gate first, then up
        self.down = nn.Linear(F_, D, bias)

    def forward(self, x, rotation):
        B, S, _ = x.shape
        H, G, K = self.H, self.G, self.K
        qkv = self.qkv(self.attention_norm(x)).view(B, S, H + 2 * G, K).transpose(1, 2)
        q, k, v = qkv.split([H, G, G], 1)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G)
        x = x + self.out(out.transpose(1, 2).reshape(B, S, H * K))
        h = self.up(self.mlp_norm(x))
        if self.gated:
            gate, up = h.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(h, approximate="tanh"))


def rotate(x, sin, cos):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Transformer(nn.Module):
    def __init__(self, c: Mapping[str, Any], padded_vocab: int, seq_len: int):
        super().__init__()
        D, self.V = c["d_model"], c["vocab_size"]
        self.tokens = nn.Embedding(padded_vocab, D)
        learned = c["positions"] == "learned"
        self.positions = nn.Embedding(c["max_seq_len"], D) if learned else None
        self.layers = nn.ModuleList(Block(c) for _ in range(c["num_layers"]))
        self.final_norm = Norm(c)
        self.output = nn.Linear(D, padded_vocab, bias=False)
        if c["tie_embeddings"]:
            self.output.weight = self.tokens.weight
        K = self.layers[0].K
        angle = np.arange(seq_len)[:, None] * c["rope_theta"] ** (-np.arange(0, K, 2) / K)
        self.register_buffer("sin", torch.tensor(np.sin(angle), dtype=torch.float32), False)
        self.register_buffer("cos", torch.tensor(np.cos(angle), dtype=torch.float32), False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        rotation = (self.sin, self.cos) if self.positions is None else None
        if self.positions is not None:
            x = x + self.positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, rotation)
        logits = self.output(self.final_norm(x))
        if logits.shape[-1] != self.V:
            logits = logits[..., : self.V]
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def load(self, params: Mapping[str, Any]) -> None:
        """Copies the initial parameters of meshtrain's transformer into this model.

        They are a tree of numpy arrays.
        """
        self.tokens.weight.data.copy_(tensor(params["tokens"]["embedding"]))
        if self.positions is not None:
            self.positions.weight.data.copy_(tensor(params["positions"]["embedding"]))
        if "output" in params:
            self.output.weight.data.copy_(tensor(params["output"]["kernel"].T))
        for i, layer in enumerate(self.layers):
            p = params["layers"]
            D = p["mlp"]["down"]["kernel"].shape[-1]
            heads = [
                p["attention"][name]["kernel"][i].reshape(D, -1)
                for name in ("query", "key", "value")
            ]
            layer.qkv.weight.data.copy_(tensor(np.concatenate(heads, 1).T))
            layer.out.weight.data.copy_(tensor(p["attention"]["out"]["kernel"][i].reshape(-1, D).T))
            up = [p["mlp"][name]["kernel"][i] for name in ("gate", "up") if name in p["mlp"]]
            layer.up.weight.data.copy_(tensor(np.concatenate(up, 1).T))
            layer.down.weight.data.copy_(tensor(p["mlp"]["down"]["kernel"][i].T))
            for linear in (layer.qkv, layer.out, layer.up, layer.down):
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)


def tensor(array: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(array, np.float32))


def make_step(
    section: Mapping[str, Any],
    params: Mapping[str, Any],
    *,
    optim: Mapping[str, Any],
    seq_len: int,
    device: str,
    dtype: str,
    compile: str | None,
) -> Callable:
    """Returns a step (tokens_BS, targets_BS) -> loss tensor.

    `compile` is a mode of torch.compile. None means eager.
    """
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    # Random initialization, overwritten below, is fast on the device.
    with torch.device(device):
        model = Transformer(section, params["tokens"]["embedding"].shape[0], seq_len)
    model.load(params)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    not_decayed = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": optim["weight_decay"]}]
    groups += [{"params": not_decayed, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(
        groups,
        lr=optim["learning_rate"],
        betas=(optim["b1"], optim["b2"]),
        eps=optim["epsilon"],
        fused=True,
    )
    run = torch.compile(model, mode=compile) if compile else model
    mixed = torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")

    def train_step(tokens, targets):
        with mixed:
            loss = run(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim["clip_norm"])
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.detach()

    return train_step
