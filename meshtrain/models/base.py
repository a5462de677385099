"""The model interface: pure functions over a nested dict of arrays, whose dims have logical names.

Only this file and from_modules.py split Flax modules into functions and arrays. All other code sees
plain functions and dicts, so checkpoints contain no Flax classes, and a step uses only `jax.*`
transforms.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen, nnx

from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.models import lora_layer, trees

Params = Any  # nested dict of arrays

Axes = Any  # the same nested dict; each leaf is a tuple of logical names, one per dim

# Name of the dicts in the parameters whose leaves no optimizer trains, see `Model.measure`.
STATS_KEY = "measured"

# Path of the bias that balances the load of experts. It is trained, but by no gradient.
ROUTER_BIAS = f"layers/mlp/{STATS_KEY}/bias"

# Name of the parameters of the layers that `Model.embed` runs before the stack, by number.
FIRST_LAYERS_KEY = "first_layers"

# Name of a layer's number, among the constants of a stack with dropout.
LAYER_NUMBER_KEY = "layer_number"


class CacheState(NamedTuple):
    """The state of a key/value cache of T positions before a call."""

    start: jax.Array  # () int32, number of positions that earlier calls filled
    segments_BT: jax.Array  # (B, T) int32, a token attends only to its own segment


@dataclass(frozen=True)
class Model:
    """A model as pure functions: embed, block and head of a stack of blocks, or loss.

    In a stack, `params["layers"]` holds the parameters of all blocks with a leading `layers` dim,
    and `block` gets the slice of one layer. The trainer runs the stack, so models need no code for
    remat or pipelines. `constants` are untrained arrays that differ between layers, also with a
    leading `layers` dim; `block` gets their slices together with its parameters.
    """

    init: Callable[[jax.Array], Params]  # PRNG key -> params
    axes: Axes

    # Of a model that is one loss: (params, batch, key) -> sums; key is None in evaluation.
    loss: Callable[[Params, Any, jax.Array | None], Metrics] | None = None

    # Of a stack: the activations x are an array or a pytree of arrays.
    embed: Callable[[Params, Any], Any] | None = None  # (params, batch) -> x
    block: Callable[[Params, Any, Any], Any] | None = None  # (layer, x, batch) -> x
    head: Callable[[Params, Any, Any], Metrics] | None = None  # (params, x, batch) -> sums
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)

    # Of generation, with a key/value cache.
    logits: Callable[[Params, Any], jax.Array] | None = None  # (params, x) -> logits
    # (rows, length, dtype) -> (cache of embed, cache with a leading `layers` dim)
    empty_cache: Callable[[int, int, Any], tuple[Any, Any]] | None = None
    # (params, batch, cache of embed, past) -> (x, updated cache)
    cached_embed: Callable[[Params, Any, Any, CacheState], tuple[Any, Any]] | None = None
    # (layer, x, batch, cache of the layer, past) -> (x, updated cache)
    cached_block: Callable[[Params, Any, Any, Any, CacheState], tuple[Any, Any]] | None = None

    # What the trainer needs to know of the model.
    # Names that the blocks mark with `checkpoint_name`, for train.remat="names:..."; (): unknown.
    saved_names: tuple[str, ...] = ()
    # Sequence length -> FLOPs, forward and backward.
    flops_per_token: Callable[[int], float] | None = None
    # (sequence length, dtype, whether rows hold several documents) -> text to log: the attention
    # implementation. ConfigError if unsupported.
    attention: Callable[[int, str, bool], str] | None = None
    # Whether `mesh.context` may shard sequences: only `ops.attention` mixes tokens, and positions
    # are those of the batch or of `context.positions`.
    shards_sequences: bool = False
    # (params, means) -> params with the leaves in dicts named STATS_KEY updated, and arrays to log.
    # `means` are the gradients per unit of weight of the global batch, without leaves that are
    # frozen. These leaves stay out of clipping, norm and optimizer.
    measure: Callable[[Params, Params], tuple[Params, dict[str, jax.Array]]] | None = None
    # Raises ConfigError for a batch, on the host, whose numbers jax would clamp silently.
    check_batch: Callable[[Any], None] | None = None
    num_inactive: int = 0  # parameters that a token does not use: those of other experts
    # Path of a parameter -> whether it is trained or measured, see lora.py; None: all are.
    is_trained: Callable[[str], bool] | None = None
    # Paths of the linear layers that may get an adapter, each with the number of dims of its input.
    linears: Mapping[str, int] = field(default_factory=dict)
    # Those of them that get one only by a pattern that ends with their own name.
    named_linears: tuple[str, ...] = ()
    # Paths of kernels (experts, in, out) that may get one for each expert.
    expert_linears: tuple[str, ...] = ()
    # Whether the train step adds a key for each row to the batch (a dict or a Batch), for
    # `meshtrain.dropout`: see ops/dropout.py. A block gets its number as one of the `constants`.
    row_keys: bool = False

    @property
    def trained_axes(self) -> Axes:
        """The axes of the parameters that have gradients."""
        return trained_part(self.axes, self.is_trained)

    def stack(self, layers: Params) -> Params:
        """Returns the inputs of the blocks: `layers` and the constants, each (layers, ...)."""
        return {**layers, **self.constants} if self.constants else layers


def trained_part(tree: Any, is_trained: Callable[[str], bool] | None) -> Any:
    """Returns the part of a tree like the parameters that has gradients.

    `is_trained` is `Model.is_trained`.
    """
    return tree if is_trained is None else trees.matching(tree, is_trained)


def check_model(model: Any) -> None:
    """Raises ConfigError if the caller passes something that is not a Model."""
    if not isinstance(model, Model | None):
        raise ConfigError(
            f"model={name_of(model)}: make a Model of it with meshtrain.from_nnx or "
            "meshtrain.from_linen"
        )


# What metrics.jsonl says of every step itself.
OWN_NAMES = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "skipped",
    "loss_scale",
    "tokens",
    "step_time",
    "predicted_step_time",
    "data_wait",
    "tokens_per_second",
    "mfu",
    "eval_loss",
    "peak_memory",
    "host_memory",
    "peak_host_memory",
)


def check_metrics(metrics: Any, origin: str) -> None:
    """Raises ConfigError if this is no Metrics, or an extra would replace one of OWN_NAMES.

    `origin` says in messages what has returned it.
    """
    if not isinstance(metrics, Metrics):
        kind = type(metrics).__name__
        raise ConfigError(
            f"{origin} returned {kind}; return meshtrain.weighted(loss of each example)"
        )
    for name in metrics.extra:
        if name in OWN_NAMES:
            raise ConfigError(
                f"{origin} returned a metric named {name!r}, which every row has already; give it "
                "another name"
            )


def is_measured(path: tuple) -> bool:
    """Returns whether a parameter with this path is in a dict named STATS_KEY."""
    return any(getattr(entry, "key", None) == STATS_KEY for entry in path)


@dataclass(frozen=True)
class Functional:
    """An NNX module as pure functions: init, bind, and the logical names of its parameters.

    `bind(params, key)` returns the module; dropout is off if the key is None. `bind(params)` is for
    the parts of a stack, which get no key: the use of a random number in them raises ConfigError.
    """

    init: Callable[[jax.Array], Params]
    axes: Axes
    bind: Callable[..., nnx.Module]
    shapes: Params = None  # the parameters as jax.ShapeDtypeStruct, of an NNX module
    dropouts: tuple[str, ...] = ()  # paths of the dropout layers that are on
    linears: Mapping[str, int] = field(default_factory=dict)  # see `Model.linears`
    kind: type = object  # class of the module


NO_KEYS = (
    "embed, block and head get no random keys; use meshtrain.dropout(x, batch, rate=..., "
    "site=...), whose masks are the same on every mesh, and dropout rate 0 here"
)


class _NoKeys(nnx.RngStream):
    """The random stream of a module in a stack."""

    def __call__(self) -> jax.Array:
        raise ConfigError(
            f"model: a layer of a stack draws from the random stream {self.tag!r}, and {NO_KEYS}"
        )


def functional(build: Callable[..., nnx.Module], origin: str = "model") -> Functional:
    """Returns `build(rngs) -> nnx.Module` as pure functions.

    `build` may take `rngs` by name only. `origin` says in messages what `build` is.

    The `out_sharding` metadata of a parameter (`nnx.with_partitioning`) holds its logical names.
    Arrays that are plain attributes, such as tables and masks, are constants: `build` makes them
    again wherever the module is used, from the same random key. Raises ConfigError if `build` is no
    such function, or the module has state other than parameters and random streams, such as
    BatchNorm's.
    """
    build = _constructor(build, origin)
    kinds: list[type] = []
    dropouts: list[str] = []
    linears: dict[str, int] = {}
    constant_names: list[tuple] = []

    def split(key):
        # Otherwise Flax would shard each variable immediately, as if its logical names were mesh
        # axes.
        with nnx.use_eager_sharding(False):
            module = build(nnx.Rngs(key))
            kinds[:] = [type(module)]
            dropouts[:] = _active_dropouts(module)
            linears.update(lora_layer.linears(module))
            constant_names[:] = _take_constants(module)
            return nnx.split(module, nnx.Param, nnx.RngState, ...)

    # An abstract key: to build a model starts no backend, which would hold memory of the GPUs.
    key = jax.eval_shape(jax.random.key, 0)
    graph, params, streams, rest = jax.eval_shape(split, key)
    for path, variable in nnx.to_flat_state(rest):
        raise ConfigError(
            f"model state {'/'.join(map(str, path))} is a {type(variable).__name__}: meshtrain "
            "trains parameters only; use a layer without running state (LayerNorm or GroupNorm "
            "instead of BatchNorm), and for a constant a plain array"
        )

    shapes = _text_keys(nnx.to_pure_dict(params))

    def init(key):
        return _text_keys(nnx.to_pure_dict(split(key)[1]))

    def bind(values, *keys):
        """`keys` is empty in a stack, else the key, or None in evaluation."""
        is_stacked, is_evaluation = not keys, keys == (None,)
        values, adapters = lora_layer.take(values)
        state = jax.tree.map(lambda leaf: leaf, params)  # a copy: the next line overwrites it
        nnx.replace_by_pure_dict(state, {name: values[name] for name in shapes})
        leaves, tree = jax.tree.flatten(streams)
        base = jax.random.key(0) if is_stacked or is_evaluation else keys[0]
        # Each stream needs its own key, or all layers would drop the same units.
        stream_leaves = [_stream_leaf(leaf, base, n) for n, leaf in enumerate(leaves)]
        module = nnx.merge(graph, state, jax.tree.unflatten(tree, stream_leaves))
        if constant_names:
            # Its parameters are not used, so XLA does not compute them.
            with nnx.use_eager_sharding(False):
                built = build(nnx.Rngs(jax.random.key(0)))
            _put_constants(module, _take_constants(built))
        lora_layer.attach(module, adapters)
        if is_stacked and leaves:
            for _, node in nnx.iter_graph(module):
                if isinstance(node, nnx.RngStream):
                    node.__class__ = _NoKeys
        if is_evaluation:
            module.eval()
            for _, layer in nnx.iter_modules(module):
                if isinstance(layer, nnx.Dropout):
                    layer.rate = 0.0  # even if its caller passes deterministic=False
        return module

    names = {}
    for path, variable in nnx.to_flat_state(params):
        names[tuple(map(str, path))] = variable.get_metadata().get("out_sharding")
    return Functional(
        init=init,
        axes=_axes_tree(shapes, names),
        bind=bind,
        shapes=shapes,
        dropouts=tuple(dropouts),
        linears=linears,
        kind=kinds[0],
    )


def _constructor(build: Any, origin: str) -> Callable[[nnx.Rngs], nnx.Module]:
    """Returns `build` as a function of its random streams; see `functional`."""
    if isinstance(build, nnx.Pytree):
        raise ConfigError(
            f"{origin} is a {type(build).__name__} that is made already; pass its class, or a "
            f"function of rngs that makes it: lambda rngs: {type(build).__name__}(..., rngs=rngs)"
        )
    if not callable(build):
        raise ConfigError(f"{origin} is a {type(build).__name__}; pass a function rngs -> module")
    name = name_of(build)
    parameters = _signature(build).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    required = []
    for parameter in parameters.values():
        is_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_any:
            required.append(parameter.name)
    by_name = "rngs" in parameters or kinds == {inspect.Parameter.VAR_KEYWORD}
    others = [one for one in required if one != "rngs"] if by_name else required[1:]
    if not parameters or others:
        fault = f"also needs {', '.join(others)}" if others else "has no parameter rngs"
        given = [f"{one}=..." for one in others] + ["rngs=rngs"] * by_name
        arguments = ", ".join(given)
        raise ConfigError(
            f"{origin}: {name} {fault}; pass a function of rngs alone: lambda rngs: "
            f"{name}({arguments})"
        )

    def construct(rngs: nnx.Rngs) -> nnx.Module:
        module = build(rngs=rngs) if by_name else build(rngs)
        if not isinstance(module, nnx.Pytree):
            raise ConfigError(
                f"{origin}: {name} returned a {type(module).__name__}, which is no nnx.Module"
            )
        return module

    return construct


def _text_keys(tree: Any) -> Any:
    """Returns nested dicts whose keys are texts: those of the parts of a list are numbers."""
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): _text_keys(value) for key, value in tree.items()}


def _signature(build: Callable) -> inspect.Signature:
    """Returns the signature of a function, or of a class, which NNX's metaclass hides."""
    if isinstance(build, type):
        return inspect.signature(functools.partial(build.__init__, None))
    if isinstance(build, functools.partial) and isinstance(build.func, type):
        init = build.func.__init__
        return inspect.signature(functools.partial(init, None, *build.args, **build.keywords))
    return inspect.signature(build)


def _take_constants(module: nnx.Module) -> dict[tuple, Any]:
    """Removes the arrays that are attributes of the parts; returns them by path and name."""
    constants = {}
    for path, part in _parts(module):
        for name, value in [*vars(part).items()]:
            if isinstance(value, jax.Array | np.ndarray):
                constants[*path, name] = value
                setattr(part, name, None)
    return constants


def _parts(module: nnx.Module) -> list[tuple[tuple, nnx.Pytree]]:
    """Returns a module, and the modules and lists in it, with their paths."""
    return [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]


def _put_constants(module: nnx.Module, constants: Mapping[tuple, Any]) -> None:
    """Sets the attributes that `_take_constants` has removed."""
    parts = dict(_parts(module))
    for (*path, name), value in constants.items():
        setattr(parts[tuple(path)], name, value)


def _active_dropouts(module: nnx.Module) -> Iterator[str]:
    """Yields the paths of dropout layers and attention with dropout, except where it is off."""
    for path, layer in nnx.iter_modules(module):
        rate = layer.rate if isinstance(layer, nnx.Dropout) else getattr(layer, "dropout_rate", 0.0)
        if rate and getattr(layer, "deterministic", None) is not True:
            name = "/".join(map(str, path)) or "the module"
            yield f"{name}, a {type(layer).__name__} with rate {rate}"


def stack(block: Functional, num_layers: int) -> tuple[Callable[[jax.Array], Params], Axes]:
    """Returns init and axes of `num_layers` blocks, stacked on a leading `layers` dim."""
    if block.dropouts:
        raise ConfigError(f"model: {block.dropouts[0]}, is inside a stack: {NO_KEYS}")
    axes = jax.tree.map(
        lambda names: ("layers", *names), block.axes, is_leaf=lambda x: isinstance(x, tuple)
    )

    def init(key: jax.Array) -> Params:
        return jax.vmap(block.init)(jax.random.split(key, num_layers))

    return init, axes


def is_linen(build: Any) -> bool:
    """Returns whether this is a Linen module or the class of one."""
    return isinstance(build, linen.Module) or (
        isinstance(build, type) and issubclass(build, linen.Module)
    )


def name_of(build: Any) -> str:
    """Returns the name of a class or function, or that of the class of an object."""
    return getattr(build, "__name__", type(build).__name__)


def check_loss(loss: Any, origin: str, first: str) -> None:
    """Raises ConfigError if `loss` cannot be called as loss(`first`, batch)."""
    if callable(loss):
        try:
            inspect.signature(loss).bind(None, None)
            return
        except TypeError:
            pass
    raise ConfigError(
        f"{origin}: loss is {name_of(loss)}; pass a function loss({first}, batch) that returns "
        "meshtrain.weighted(loss of each example)"
    )


def from_nnx(
    build: Callable[[nnx.Rngs], nnx.Module], loss: Callable[[nnx.Module, Any], Metrics]
) -> Model:
    """Returns a Model from an NNX module of yours.

    The arguments are `build(rngs) -> module`, which may be its class, and `loss(module, batch) ->
    Metrics`. Raises ConfigError for other arguments.
    """
    if is_linen(build):
        raise ConfigError(f"from_nnx: {name_of(build)} is a Linen module; use meshtrain.from_linen")
    pure = functional(build, "from_nnx: build")
    check_loss(loss, "from_nnx", "module")
    return Model(
        init=pure.init,
        axes=pure.axes,
        loss=lambda params, batch, key: loss(pure.bind(params, key), batch),
        linears=named(pure.linears),
    )


def named(linears: Mapping[str, int]) -> dict[str, int]:
    """Returns `linears` without that of a module which is itself a linear layer, without a path."""
    return {path: num_in for path, num_in in linears.items() if path}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _stream_leaf(leaf: Any, base: jax.Array, number: int) -> jax.Array:
    """Returns the key or the count of a random stream.

    Those of layers that nnx.vmap stacked have a leading dim.
    """
    if not _is_key(leaf):
        return jax.numpy.zeros(leaf.shape, leaf.dtype)
    key = jax.random.fold_in(base, number)
    return jax.random.split(key, leaf.shape) if leaf.shape else key


def _axes_tree(shapes: Any, names: dict) -> Axes:
    """Returns the names as a tree like `shapes`; a parameter without names stays replicated."""

    def names_of(path: tuple, leaf: Any) -> tuple:
        keys = tuple(entry.key for entry in path)
        return tuple(names[keys] or (None,) * leaf.ndim)

    return jax.tree.map_with_path(names_of, shapes)
