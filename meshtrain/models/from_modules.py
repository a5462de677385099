"""Models of Linen modules, and stacks of blocks of a user's own modules."""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import errors, linen, nnx

from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.models import base, lora_layer, trees
from meshtrain.models.base import LAYER_NUMBER_KEY, Functional, Model
from meshtrain.ops.dropout import at_layer

Part = Callable[[nnx.Rngs], nnx.Module] | linen.Module


def from_blocks(
    *,
    embed: Part,
    block: Part,
    head: Part,
    num_layers: int,
    shards_sequences: bool = False,
    example: Any = None,
) -> Model:
    """Returns a Model of `num_layers` blocks of your own between an embedding and a head.

    Each part is a function `rngs -> nnx.Module`, or a Linen module. They are called as
    `embed(batch) -> x`, `block(x, batch) -> x` and `head(x, batch) -> Metrics`, with the
    activations x an array or a pytree of arrays whose first dim are the rows. The batch is a dict
    or a `meshtrain.Batch`; in training it also has the keys for `meshtrain.dropout`, under the name
    "row_keys". `shards_sequences`: see `Model`. `example` is a batch, of which only shapes and
    dtypes matter; Linen modules need it. Raises ConfigError for parts that a stack does not
    support.
    """
    if num_layers < 1:
        raise ConfigError(f"from_blocks: num_layers={num_layers}: use 1 or more")
    embedding = _functional("embed", embed, (example,))
    # Blocks and head are called with what the embedding returns.
    inputs = (None,)
    if example is not None:
        inputs = jax.eval_shape(_run_with_initial(embedding), example), example
    layer = _functional("block", block, inputs)
    output = _functional("head", head, inputs)
    init_layers, layer_axes = base.stack(layer, num_layers)
    linears = {}
    for name, part in (("embed", embedding), ("layers", layer), ("head", output)):
        for path, num_in in part.linears.items():
            linears["/".join(filter(None, (name, path)))] = num_in

    def init(key: jax.Array) -> base.Params:
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        return {
            "embed": embedding.init(embed_key),
            "head": output.init(head_key),
            "layers": init_layers(layers_key),
        }

    def run_head(params: base.Params, x: Any, batch: Any) -> Metrics:
        # Numbers of layers are below: the masks of the head differ from theirs, and from those of
        # the embedding.
        metrics = output.bind(params["head"])(x, at_layer(batch, num_layers))
        base.check_metrics(metrics, "from_blocks: the head")
        return metrics

    def run_embed(params: base.Params, batch: Any) -> Any:
        return embedding.bind(params["embed"])(batch)

    def run_block(params: base.Params, x: Any, batch: Any) -> Any:
        y = layer.bind(params)(x, at_layer(batch, params[LAYER_NUMBER_KEY]))
        if _kinds(y) != _kinds(x):
            raise ConfigError(
                f"from_blocks: the block returned {_kinds(y)} for x of {_kinds(x)}; return "
                "activations of the same structure, shapes and dtypes"
            )
        return y

    return Model(
        init=init,
        axes={"embed": embedding.axes, "head": output.axes, "layers": layer_axes},
        embed=run_embed,
        block=run_block,
        head=run_head,
        constants={LAYER_NUMBER_KEY: np.arange(num_layers, dtype=np.int32)},
        shards_sequences=shards_sequences,
        linears=linears,
        row_keys=True,
    )


def from_linen(
    module: linen.Module, loss: Callable[[Callable, Any], Metrics], *, example: Any
) -> Model:
    """Returns a Model from a Linen module of yours.

    `loss(apply, batch) -> Metrics` gets a function `apply(*inputs)` that calls the module.

    `example` is one input (an array, or a tuple of arrays); only its shape and dtype matter. Raises
    ConfigError for other arguments.
    """
    if not isinstance(module, linen.Module):
        name = base.name_of(module)
        way_out = "use meshtrain.from_nnx, or pass a Linen module"
        if base.is_linen(module):
            way_out = f"pass a module: {name}(...)"
        raise ConfigError(f"from_linen: module is {name}, which is no Linen module; {way_out}")
    base.check_loss(loss, "from_linen", "apply")
    _check_example(example)
    # A NamedTuple, such as a meshtrain.Batch, is one input.
    has_fields = hasattr(example, "_fields")
    inputs = example if isinstance(example, tuple) and not has_fields else (example,)
    way_out = "pass inputs like those that the loss passes to apply"
    if has_fields or (isinstance(example, Mapping) and example):
        first = f"batch.{example._fields[0]}" if has_fields else f"batch[{next(iter(example))!r}]"
        way_out += f", such as {first}"
    init, axes, linears = _linen_init(
        module, *inputs, origin="from_linen: example", way_out=way_out
    )

    def run(params, batch, key):
        own, adapters = lora_layer.take(params)

        def apply(*inputs, **options):
            rngs = {} if key is None else {"dropout": key}
            with lora_layer.attached_to_linen(adapters):
                return module.apply({"params": own}, *inputs, rngs=rngs, **options)

        dropout = contextlib.nullcontext()
        if key is None:
            dropout = linen.intercept_methods(_without_dropout)
        try:
            with dropout:
                return loss(apply, batch)
        except errors.InvalidRngError as error:
            raise ConfigError(
                f"model: {str(error).partition(' (http')[0]}; a Linen model gets only the stream "
                "'dropout', none in evaluation, where linen.Dropout is off"
            ) from error

    return Model(init, axes, loss=run, linears=base.named(linears))


def _check_example(example: Any) -> None:
    """Raises ConfigError if an example input holds something else than numbers."""
    leaves = jax.tree.leaves(example)
    dtypes = [getattr(leaf, "dtype", np.asarray(leaf).dtype) for leaf in leaves]
    if not leaves or any(getattr(dtype, "kind", "") in TEXTS_AND_OBJECTS for dtype in dtypes):
        raise ConfigError(
            f"from_linen: example={type(example).__name__}: pass an array like the input of the "
            "module, or a tuple of arrays if it has several"
        )


TEXTS_AND_OBJECTS = ("U", "S", "O")  # kinds of numpy's dtypes


def _linen_init(
    module: linen.Module, *example: Any, origin: str, way_out: str
) -> tuple[Callable[[jax.Array], base.Params], base.Axes, dict[str, int]]:
    """Returns init, axes and `Model.linears` of a Linen module for inputs of these shapes.

    The inputs are pytrees of arrays. Raises ConfigError if the module cannot be called with them,
    from `origin` and with a `way_out`, or has other variables than parameters, such as BatchNorm's.
    """

    def variables(key):
        zeros = jax.tree.map(jax.numpy.zeros_like, example)
        # Without a mesh: `linen.with_partitioning` would take its logical names for mesh axes.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return module.init({"params": key, "dropout": key}, *zeros)

    called: dict[str, tuple[int, int]] = {}
    try:
        with lora_layer.finding_linen_layers(called):
            boxed = jax.eval_shape(variables, jax.random.key(0))
    except ConfigError:
        raise
    except Exception as error:
        kinds = ", ".join(str(_kinds(one)) for one in example)
        raise ConfigError(
            f"{origin}: {type(module).__name__} cannot be called with {kinds}: "
            f"{_first_line(error)}; {way_out}"
        ) from error
    for collection in boxed.keys() - {"params"}:
        raise ConfigError(
            f"model state {collection!r}: meshtrain trains parameters only; use a layer without "
            "running state (LayerNorm or GroupNorm instead of BatchNorm)"
        )
    shapes = _unboxed(boxed).get("params", {})
    specs = linen.get_partition_spec(boxed).get("params", {})
    names = {path: tuple(spec) or None for path, spec in jax.tree.leaves_with_path(specs)}
    axes = jax.tree.map_with_path(lambda path, leaf: names[path] or (None,) * leaf.ndim, shapes)

    ndims = {trees.name_of(path): leaf.ndim for path, leaf in jax.tree.leaves_with_path(shapes)}
    linears = {}
    for path, (num_in, num_out) in called.items():
        # Kernels that `linen.scan` or `linen.vmap` stacked have a dim more.
        if ndims.get(f"{path}/kernel".lstrip("/")) == num_in + num_out:
            linears[path] = num_in

    def init(key):
        return _unboxed(variables(key)).get("params", {})

    return init, axes, linears


NO_MESH = jax.sharding.AbstractMesh((), ())


def _unboxed(variables: Any) -> Any:
    """Returns the variables without the boxes that hold their logical names."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return linen.unbox(variables)


def _without_dropout(run: Callable, args: tuple, options: dict, context: Any) -> Any:
    return args[0] if isinstance(context.module, linen.Dropout) else run(*args, **options)


def _first_line(error: Exception) -> str:
    """Returns kind and first line of an error of a user's module, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    first_line = str(error).partition("\n")[0].partition(" (http")[0]
    return f"{type(error).__name__}: {first_line}{place}"


def _is_library(file: str) -> bool:
    return "site-packages" in file or Path(file).is_relative_to(Path(__file__).parents[1])


def _kinds(x: Any) -> Any:
    """Returns dtype and shape of each activation, to compare them and for messages."""

    def kind(leaf):
        sizes = ", ".join(map(str, jax.numpy.shape(leaf)))
        return f"{jax.numpy.result_type(leaf)}[{sizes}]"

    return jax.tree.map(kind, x)


def _functional(name: str, part: Part, inputs: tuple) -> Functional:
    """Returns the part `name` as pure functions.

    `inputs` are the arguments of its calls, from which a Linen module gets its shapes.
    """
    if isinstance(part, linen.Module):
        _check_call(name, type(part))
        return _functional_of_linen(part, inputs)
    if base.is_linen(part):
        raise ConfigError(
            f"from_blocks: {name} is a class of Linen modules; pass a module: "
            f"{name}={base.name_of(part)}(...)"
        )
    pure = base.functional(part, f"from_blocks: {name}")
    _check_call(name, pure.kind)
    return pure


ARGUMENTS = {"embed": ("batch",), "block": ("x", "batch"), "head": ("x", "batch")}


def _check_call(name: str, kind: type) -> None:
    """Raises ConfigError if modules of this class cannot be called as the part `name` is."""
    arguments = ARGUMENTS[name]
    try:
        inspect.signature(kind.__call__).bind(None, *arguments)
    except TypeError as error:
        call = f"{name}({', '.join(arguments)})"
        message = f"from_blocks: {kind.__name__} cannot be called as {call}: {error}"
        raise ConfigError(message) from error


def _functional_of_linen(part: linen.Module, inputs: tuple) -> Functional:
    """Returns a Linen module as pure functions; see `_functional`."""
    if inputs[-1] is None:
        raise ConfigError(
            f"from_blocks: {type(part).__name__} is a Linen module, whose parameters have the "
            "shapes of its first call; pass example=BATCH"
        )
    init, axes, linears = _linen_init(
        part,
        *inputs,
        origin="from_blocks",
        way_out="example must be a batch as the data yields it",
    )

    def bind(params: base.Params) -> Callable:
        params, adapters = lora_layer.take(params)
        own = {name: tree for name, tree in params.items() if name in axes}

        def run(*args: Any) -> Any:
            try:
                with lora_layer.attached_to_linen(adapters):
                    return part.apply({"params": own}, *args)
            except errors.InvalidRngError as error:
                raise ConfigError(
                    f"model: {type(part).__name__} draws random numbers, and {base.NO_KEYS}"
                ) from error

        return run

    return Functional(init, axes, bind, linears=linears, kind=type(part))


def _run_with_initial(part: Functional) -> Callable:
    """Returns the function inputs -> result of a part with initial parameters, for its shapes."""
    return lambda *inputs: part.bind(part.init(jax.random.key(0)))(*inputs)
