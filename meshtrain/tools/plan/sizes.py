"""The sizes of a model that its cost depends on."""

from dataclasses import dataclass

BYTES = 2  # of an element of an activation, a gathered parameter and a sent gradient

# T tokens


@dataclass(frozen=True)
class ModelWork:
    """The sizes of a stack of equal layers.

    A model that is one loss is one layer without a head.
    """

    num_layers: int
    d_model: int
    products: tuple[tuple[float, int], ...]  # of a layer, (n, k) of each product (T, k) x (k, n)
    vocab_size: int  # of the output head; 0: none
    layer: int  # weights of a layer, all experts included
    others: int  # weights outside of the layers
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    width: float = 0  # of the hidden layer of the MLP
    window: float = (
        1.0  # mean number of positions that a token may attend to, as a part of the sequence
    )
    num_experts: int = 0
    is_gated: bool = True  # the MLP multiplies its hidden layer by a gate
    unroll: int = 1  # most layers that the compiled program has one after the other, without a loop
    # Bytes that the optimizer reads and writes of a parameter: AdamW's four arrays in float32, the
    # gradient once more for its norm, and the parameter in the compute dtype.
    update_bytes: float = 34
    # (remat, bytes that a layer keeps for each token: of arrays as wide as the residual stream, of
    # others)
    kept: tuple[tuple[str, float, float], ...] = ()

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding: there is no second matrix of its size."""
        return self.others < 1.5 * self.vocab_size * self.d_model

    def kept_bytes(self, remat: str) -> tuple[float, float]:
        """Returns the bytes that a layer keeps for a token.

        They are two numbers: what `tensor` does not shard, and what it does.
        """
        return next((wide, other) for name, wide, other in self.kept if name == remat)


def decoder(
    *,
    num_layers: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    gated: bool,
    tied: bool,
) -> ModelWork:
    """Returns the work of a dense decoder of these sizes."""
    D, attention = d_model, num_heads * head_dim
    projections = (attention + 2 * num_kv_heads * head_dim, D), (D, attention)
    mlp = ((2 if gated else 1) * d_ff, D), (D, d_ff)
    return ModelWork(
        num_layers,
        D,
        (*projections, *mlp),
        vocab_size,
        layer=sum(n * k for n, k in (*projections, *mlp)),
        others=D * vocab_size * (1 if tied else 2),
        heads=num_heads,
        kv_heads=num_kv_heads,
        head_dim=head_dim,
        width=d_ff,
        is_gated=gated,
    )
