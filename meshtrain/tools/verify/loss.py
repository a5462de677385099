"""Verifies a plain jax loss: on every mesh, its values and gradients must be those of one device.

For a loss of one's own, trained by a trainer of one's own: `meshtrain.verify_loss`. Everything is
computed in float64. What one device computes is the reference; its gradients are compared with
finite differences of the loss, because meshes cannot show an error that one device has as well.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.errors import ConfigError, choice_faults, did_you_mean
from meshtrain.parallel import sharding
from meshtrain.tools.verify import causes, certificate, held_meshes
from meshtrain.tools.verify.laws import model as model_laws
from meshtrain.tools.verify.pairwise import pairwise

STEPS = 2  # the second starts from parameters that a mesh has updated
UPDATE = 0.01  # norm of the first update, relative to that of the parameters
NOISE = 0.1  # added to the parameters, relative to the deviation of each

MAX_MESSAGE = 500  # characters of an error of the loss

# Allowed differences, relative to the largest value of a leaf, by the narrowest dtype inside.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}

# Mesh axes that shard the batch, unless `batch_spec` says so.
BATCH_AXES = ("data", "batch", "dp", "replica", "fsdp")
OPTIONAL = ("gradient", "masks")  # checks that `without` can leave out
FORMS = (
    "pass a tree of PartitionSpecs like the parameters (or a prefix of it), a list of "
    "(pattern, PartitionSpec), or a function (path, leaf) -> PartitionSpec"
)
SIMULATE = (
    "before jax is first used, simulate some: jax.config.update('jax_num_cpu_devices', 8), and "
    "JAX_PLATFORMS=cpu on a machine with a GPU"
)


class MeshResult(NamedTuple):
    """The result of one mesh."""

    mesh: str  # for example "data=4 x tensor=2"
    differences: dict[str, float]  # the largest relative difference of each kind of value
    fault: str | None  # the first difference above the tolerance, or an error


@dataclasses.dataclass(frozen=True)
class LossReport:
    """The result of `verify_loss`. `str(report)` has the table and all faults."""

    results: tuple[MeshResult, ...]
    broken_laws: tuple[str, ...]  # errors that one device has already
    notes: tuple[str, ...]  # what limits the comparison
    tolerance: float

    @property
    def passed(self) -> bool:
        return not self.broken_laws and all(result.fault is None for result in self.results)

    @property
    def table(self) -> str:
        """One line for each mesh: the largest differences from one device, and the verdict."""
        kinds = list(dict.fromkeys(kind for one in self.results for kind in one.differences))
        rows = [["mesh", *kinds, ""]]
        for result in self.results:
            figures = []
            for kind in kinds:
                has_kind = kind in result.differences
                figures.append(f"{result.differences[kind]:.1e}" if has_kind else "")
            verdict = f"FAILED {result.fault}" if result.fault else "ok"
            rows.append([result.mesh, *figures, verdict])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [f"FAILED on one device: {fault}" for fault in self.broken_laws]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, self.table] if self.results else lines)


class LossDiffers(AssertionError):
    """A loss that a mesh computes differently than one device; `report` has the table."""

    def __init__(self, report: LossReport):
        faults = [f"on one device: {fault}" for fault in report.broken_laws]
        faults += [f"{result.mesh}: {result.fault}" for result in report.results if result.fault]
        super().__init__(f"{faults[0]}\n\n{report}")
        self.report = report


def verify_loss(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    rules: Any,
    *,
    meshes: Any = None,
    batch_spec: Any = None,
    without: Iterable[str] = (),
) -> LossReport:
    """Compares loss, gradients and an SGD update on meshes with one device, in float64.

    `loss_fn(params, batch)` returns a scalar, a sum or a mean, or (scalar, aux), where aux has
    numbers that are compared as well. `params` and `batch` are pytrees. A loss may have its own
    `jax.shard_map`: each mesh is the ambient one (`jax.set_mesh`), replaces a mesh with the same
    axes that the function holds, and is passed to a parameter `mesh`, if there is one.

    `rules` says how the parameters are sharded: a tree of `PartitionSpec` like the parameters, or a
    prefix of it; a list of pairs (pattern, PartitionSpec), of which the first counts whose pattern
    `re.search` finds in the path, such as "layers/0/kernel"; or a function (path, leaf) ->
    PartitionSpec. Parameters without a rule are replicated. `batch_spec` has the same forms, for
    the batch; by default the first dim of each array is sharded over the mesh axes of BATCH_AXES,
    or else over those that shard no parameter.

    `meshes` is a list of `jax.sharding.Mesh`, or of dicts of axis sizes; an axis that one of the
    dicts lacks has size 1. By default they are meshes of all devices, with the axes of the rules,
    in which each pair of two sizes occurs. `without` leaves out "gradient", the finite differences,
    for a loss with `stop_gradient`; or "masks", a second batch with fewer ones in the arrays that
    hold only zeros and ones.

    Raises LossDiffers, an AssertionError, with leaf, mesh and both values. Raises ConfigError for
    arguments that do not fit.
    """
    without = list(without)
    faults = [fault for name in without for fault in choice_faults("without", name, OPTIONAL)]
    if faults:
        raise ConfigError(*faults)
    with jax.enable_x64(True):
        subject = _Subject(loss_fn, params, batch)
        layouts = _layouts(subject, rules, batch_spec, meshes)
        try:
            report = _report(subject, layouts, without)
        except _Fails as error:
            report = LossReport((), (str(error),), (), TOLERANCES["float64"])
            raise LossDiffers(report) from error.__cause__
    if not report.passed:
        raise LossDiffers(report)
    return report


# ---- the loss, with its arguments in float64 ----


class _Part:
    """The leaves of a pytree: arrays, with floats in float64, and others that stay as they are."""

    def __init__(self, name: str, tree: Any):
        self.name = name
        paths_and_leaves, self.tree = jax.tree.flatten_with_path(tree)
        self.leaves = [_wide(leaf) for _, leaf in paths_and_leaves]
        self.paths = [certificate.name_of(path) for path, _ in paths_and_leaves]
        numbers = [n for n, leaf in enumerate(self.leaves) if hasattr(leaf, "dtype")]
        self.numbers = numbers  # of the leaves that are arrays
        self.arrays = [self.leaves[number] for number in numbers]
        self.array_paths = [self.paths[number] for number in numbers]

    def merge(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with these arrays."""
        leaves = list(self.leaves)
        for number, array in zip(self.numbers, arrays, strict=True):
            leaves[number] = array
        return jax.tree.unflatten(self.tree, leaves)


def _wide(leaf: Any) -> Any:
    """Returns an array as numpy's, floats as float64; sizes, texts and functions as they are."""
    if isinstance(leaf, bool | int | str | bytes) or callable(leaf):
        return leaf
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.float64), jax.dtypes.prng_key):
        return leaf
    array = np.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(np.complex128)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(np.float64)
    return array if array.dtype.kind in "biu" else leaf


def _is_trained(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


class _Subject:
    """A loss as a function of lists of arrays."""

    def __init__(self, loss_fn: Callable[..., Any], params: Any, batch: Any):
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn={loss_fn!r}: pass a function (params, batch) -> loss")
        self.takes_mesh = _takes_mesh(loss_fn)
        self.on_mesh = functools.cache(lambda mesh: held_meshes.on_mesh(loss_fn, mesh))
        self.params, self.batch = _Part("params", params), _Part("batch", batch)
        self.trained = [n for n, array in enumerate(self.params.arrays) if _is_trained(array)]
        if not self.trained:
            raise ConfigError("params: no array of floats; pass the parameters of the loss")
        self.names = [self.params.array_paths[number] for number in self.trained]

    def loss(self, mesh: Mesh, arrays: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        """Returns loss and aux."""
        options = {"mesh": mesh} if self.takes_mesh else {}
        loss_fn = self.on_mesh(mesh)
        result = loss_fn(self.params.merge(arrays), self.batch.merge(batch), **options)
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if jnp.shape(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            kind = f"{jnp.result_type(loss)}{list(jnp.shape(loss))}"
            raise ConfigError(
                f"loss_fn returned {kind}; return a scalar of floats, or (scalar, aux)"
            )
        aux = [leaf for leaf in jax.tree.leaves(aux) if hasattr(leaf, "dtype")]
        return loss, aux

    def step(
        self, mesh: Mesh, arrays: Sequence[Any], batch: Sequence[Any], rate: Any
    ) -> dict[str, Any]:
        """Returns loss, aux, gradients and updated parameters of a step of SGD."""

        def loss_of_trained(trained):
            return self.loss(mesh, self.with_trained(arrays, trained), batch)

        trained = [arrays[number] for number in self.trained]
        (loss, aux), grads = jax.value_and_grad(loss_of_trained, has_aux=True)(trained)
        # The gradient of a complex parameter is the conjugate of the steepest ascent.
        updated = [one - rate * grad.conj() for one, grad in zip(trained, grads, strict=True)]
        return {"loss": loss, "aux": aux, "gradients": grads, "parameters": updated}

    def with_trained(self, arrays: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
        """Returns the arrays of the parameters with those that are trained replaced."""
        merged = list(arrays)
        for number, array in zip(self.trained, trained, strict=True):
            merged[number] = array
        return merged


def _takes_mesh(loss_fn: Callable[..., Any]) -> bool:
    try:
        return "mesh" in inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):  # a builtin
        return False


# ---- meshes and shardings ----


class _Layout(NamedTuple):
    """A mesh, and the specs of the arrays."""

    mesh: Mesh
    params: list[PartitionSpec]
    batch: list[PartitionSpec]

    @property
    def name(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1]
        return " x ".join(sizes) or "one device"

    def shardings(self, part: str) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, spec) for spec in getattr(self, part)]


def _layouts(subject: _Subject, rules: Any, batch_spec: Any, meshes: Any) -> list[_Layout]:
    """Returns the meshes with the shardings of all arrays; raises ConfigError."""
    specs = _specs("rules", rules, subject.params)
    batch_specs = None if batch_spec is None else _specs("batch_spec", batch_spec, subject.batch)
    axes = list(dict.fromkeys(axis for spec in (batch_specs or []) + specs for axis in _axes(spec)))
    if meshes is None:
        if batch_specs is None and not {*axes} & {*BATCH_AXES}:
            axes = ["data", *axes]
        candidates = _default_meshes(axes)
    else:
        candidates = _given_meshes(meshes, axes)
    layouts, faults = [], []
    for mesh in candidates:
        layout = _Layout(mesh, specs, batch_specs or _default_batch(subject, mesh, axes, specs))
        misfit = _misfit(layout, subject)
        if misfit:
            faults.append(misfit)
        else:
            layouts.append(layout)
    # Meshes that the user did not choose are left out if the sizes do not fit.
    if faults and (meshes is not None or not layouts):
        raise ConfigError(*dict.fromkeys(faults))
    return layouts


def _specs(key: str, rules: Any, part: _Part) -> list[PartitionSpec]:
    """Returns the spec of each array by the user's rules."""
    if isinstance(rules, PartitionSpec):
        return [rules if np.ndim(array) else PartitionSpec() for array in part.arrays]
    if callable(rules):
        pairs = zip(part.array_paths, part.arrays, strict=True)
        return [_spec(key, path, rules(path, array)) for path, array in pairs]
    if _is_list_of_pairs(rules):
        return _specs_by_pattern(key, rules, part)
    try:
        paths = jax.tree.unflatten(part.tree, part.paths)
        full = jax.tree.broadcast(rules, paths, is_leaf=_is_spec)
    except ValueError as error:
        if isinstance(rules, Mapping) and all(map(_is_spec, rules.values())):
            return _specs_by_pattern(key, list(rules.items()), part)
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{key}: no tree like {part.name} ({reason}); {FORMS}") from None
    leaves = jax.tree.leaves(full, is_leaf=_is_spec)
    return [_spec(key, part.paths[number], leaves[number]) for number in part.numbers]


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | NamedSharding)


def _is_list_of_pairs(rules: Any) -> bool:
    return isinstance(rules, list | tuple) and all(
        isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str | re.Pattern)
        for rule in rules
    )


def _specs_by_pattern(key: str, rules: Sequence[tuple], part: _Part) -> list[PartitionSpec]:
    """Returns the spec of the first pattern that is found in each path; else replicated."""
    for pattern, _ in rules:
        if not any(re.search(pattern, path) for path in part.array_paths):
            near = did_you_mean(pattern, part.array_paths)
            raise ConfigError(
                f"{key}: {pattern!r} is found in no path{near}; the paths are "
                f"{', '.join(part.array_paths[:8])}"
            )
    specs = []
    for path, array in zip(part.array_paths, part.arrays, strict=True):
        found = [spec for pattern, spec in rules if re.search(pattern, path)]
        # A scalar has nothing to shard.
        is_sharded = found and np.ndim(array)
        specs.append(_spec(key, path, found[0]) if is_sharded else PartitionSpec())
    return specs


def _spec(key: str, path: str, spec: Any) -> PartitionSpec:
    """Returns what a user gives as the spec of an array as a PartitionSpec."""
    if spec is None:
        return PartitionSpec()
    if isinstance(spec, NamedSharding):
        return spec.spec
    if isinstance(spec, tuple | list) and not isinstance(spec, PartitionSpec):
        return PartitionSpec(*spec)
    if not isinstance(spec, PartitionSpec):
        raise ConfigError(f"{key}: {path}: {spec!r} is no PartitionSpec; {FORMS}")
    return spec


def _entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dim."""
    entries = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]
    return [sharding.axes_of(entry) for entry in entries]


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in _entries(spec) for axis in entry]


def _default_batch(
    subject: _Subject, mesh: Mesh, axes: Sequence[str], specs: Sequence[PartitionSpec]
) -> list[PartitionSpec]:
    """Returns the specs of the batch if the user gives none; see `verify_loss`."""
    rows = tuple(axis for axis in mesh.axis_names if axis in BATCH_AXES)
    if not rows:
        used = {axis for spec in specs for axis in _axes(spec)}
        rows = tuple(axis for axis in mesh.axis_names if axis not in used)
    first = PartitionSpec(rows or None)
    return [first if np.ndim(array) else PartitionSpec() for array in subject.batch.arrays]


def _default_meshes(axes: Sequence[str]) -> list[Mesh]:
    """Returns meshes of all devices in which each possible pair of two sizes of axes occurs."""
    num = len(jax.devices())
    if num == 1:
        raise ConfigError(f"verify_loss compares meshes, and there is 1 device; {SIMULATE}")
    sizes = [size for size in range(1, num + 1) if num % size == 0]
    rows = []
    for row in itertools.product(sizes, repeat=len(axes)):
        if math.prod(row) == num:
            rows.append(dict(zip(axes, row, strict=True)))
    chosen = pairwise(rows, []) if len(axes) > 1 else rows
    # Those with few axes first: a fault is the easiest to locate there.
    chosen.sort(key=lambda row: sum(size > 1 for size in row.values()))
    return [_mesh(row) for row in chosen]


def _given_meshes(meshes: Any, axes: Sequence[str]) -> list[Mesh]:
    """Returns the user's meshes; raises ConfigError for those that are none."""
    if isinstance(meshes, Mesh | Mapping):
        meshes = [meshes]
    meshes = list(meshes)
    if not meshes:
        raise ConfigError("meshes=[]: pass meshes, or leave it out for all kinds of meshes")
    names = [name for mesh in meshes for name in (mesh.shape if _is_mesh(mesh) else mesh)]
    for axis in axes:
        if axis not in names:
            raise ConfigError(
                f"rules: {axis!r} is an axis of no mesh{did_you_mean(axis, names)}; add it to "
                f"meshes, whose axes are {', '.join(dict.fromkeys(names))}"
            )
    of_dicts = [name for mesh in meshes if not _is_mesh(mesh) for name in mesh]
    every = dict.fromkeys([*of_dicts, *axes], 1)
    made = []
    for number, mesh in enumerate(meshes):
        if _is_mesh(mesh):
            made.append(mesh)
            continue
        num, available = math.prod(mesh.values()), len(jax.devices())
        if num > available:
            raise ConfigError(
                f"meshes[{number}]={dict(mesh)} has {num} devices, but {available} "
                f"{'is' if available == 1 else 'are'} there; {SIMULATE}"
            )
        made.append(_mesh({**every, **mesh}))
    return made


def _is_mesh(mesh: Any) -> bool:
    return isinstance(mesh, Mesh)


def _mesh(sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the first devices. Axes are Auto, as those of `Mesh` are by default."""
    devices = jax.devices()[: math.prod(sizes.values())]
    return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes))


def _misfit(layout: _Layout, subject: _Subject) -> str | None:
    """Returns why an array cannot be sharded as its spec says."""
    sizes = layout.mesh.shape
    for part, specs in ((subject.params, layout.params), (subject.batch, layout.batch)):
        for path, array, spec in zip(part.array_paths, part.arrays, specs, strict=True):
            name, shape = f"{part.name} {path}".strip(), np.shape(array)
            if len(spec) > len(shape):
                return f"{name}: {spec} has {len(spec)} dims, but the array has {len(shape)}"
            for dim, axes in enumerate(_entries(spec)):
                unknown = [axis for axis in axes if axis not in sizes]
                if unknown:
                    return f"{name}: {spec} names {unknown[0]!r}, which the mesh lacks: {sizes}"
                if shape[dim] % math.prod(sizes[axis] for axis in axes):
                    over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
                    return (
                        f"{name}: dim {dim} of size {shape[dim]} is not divisible by {over}; "
                        "pass other meshes, or a size that they divide"
                    )
    return None


# ---- the comparison ----


class _Inputs(NamedTuple):
    """Arguments of the loss, and the steps on one device from there."""

    name: str
    params: list[Any]
    batch: list[Any]


def _report(subject: _Subject, layouts: Sequence[_Layout], without: Sequence[str]) -> LossReport:
    notes: list[str] = []
    # One device has a mesh too, with the axes of the mesh that is compared: a loss may name them.
    reference = _Reference(subject)
    first = layouts[0].mesh
    jaxpr = reference.jaxpr(first)
    narrowed = causes.narrowing(jaxpr)
    tolerance = TOLERANCES["float64"]
    if narrowed is not None:
        tolerance = max(TOLERANCES.get(name, 0.1) for name in causes.float_dtypes(jaxpr))
        notes.append(
            f"{narrowed}, so that differences up to {tolerance:g} pass, and gradients are not "
            "compared with finite differences; without the cast, errors down to 1e-10 are found"
        )
    faults = []
    changes = causes.nondeterminism(lambda: reference.jaxpr(first))
    if changes is not None:
        faults.append(changes)
    inputs = _inputs(subject, reference, first, without, notes)
    if "gradient" not in without and narrowed is None and not faults:
        fault = _slope_fault(subject, reference, first, inputs[0])
        if fault:
            stop = causes.place_of(jaxpr, "stop_gradient")
            if stop:
                fault += f"; if stop_gradient at {stop} is the reason, pass without=['gradient']"
            faults.append(f"gradient: {fault}")
    results = []
    if not changes:
        for layout in layouts:
            results.append(_compare(subject, reference, layout, inputs, tolerance))
    return LossReport(tuple(results), tuple(faults), tuple(notes), tolerance)


class _Reference:
    """The steps on one device."""

    def __init__(self, subject: _Subject):
        self.subject = subject
        self.programs: dict[Mesh, Any] = {}
        self.known: dict[Any, Any] = {}

    def mesh(self, mesh: Mesh) -> Mesh:
        """Returns a mesh of one device with the same axes."""
        device = np.array(jax.devices()[:1]).reshape([1] * len(mesh.axis_names))
        return Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)

    def jaxpr(self, mesh: Mesh) -> Any:
        """Returns the jaxpr of the loss; raises ConfigError for a loss that cannot be traced."""
        one, subject = self.mesh(mesh), self.subject
        try:
            with jax.set_mesh(one):
                return jax.make_jaxpr(lambda *arrays: subject.loss(one, *arrays)[0])(
                    subject.params.arrays, subject.batch.arrays
                )
        except ConfigError:
            raise
        except Exception as error:  # any error of the loss
            raise _Fails(_failure(error)) from error

    def step(self, mesh: Mesh, inputs: _Inputs, params: Any, rate: float) -> dict[str, Any]:
        """Returns the values of a step, as numpy arrays."""
        one = self.mesh(mesh)
        if one not in self.programs:
            self.programs[one] = jax.jit(lambda *args: self.subject.step(one, *args))
        try:
            with jax.set_mesh(one):
                return jax.device_get(self.programs[one](params, inputs.batch, rate))
        except ConfigError:
            raise
        except Exception as error:  # any error of the loss
            raise _Fails(_failure(error)) from error

    def steps(self, mesh: Mesh, inputs: _Inputs) -> tuple[float, list[dict[str, Any]]]:
        """Returns the rate of SGD and the values of STEPS steps, which are computed once."""
        key = self.mesh(mesh), inputs.name
        if key not in self.known:
            start = self.step(mesh, inputs, inputs.params, 0.0)
            norms = [_norm(start[kind]) for kind in ("parameters", "gradients")]
            rate = UPDATE * norms[0] / (norms[1] or 1.0)
            steps, params = [], inputs.params
            for _ in range(STEPS):
                steps.append(self.step(mesh, inputs, params, rate))
                params = self.subject.with_trained(params, steps[-1]["parameters"])
            self.known[key] = rate, steps
        return self.known[key]


def _norm(arrays: Sequence[Any]) -> float:
    return math.sqrt(sum(float((np.abs(array) ** 2).sum()) for array in arrays))


class _Fails(Exception):
    """The loss raises an error on one device."""


def _failure(error: Exception) -> str:
    """Returns the message about an error of the loss, in one line."""
    message = " ".join(str(error).split())[:MAX_MESSAGE]
    text = f"loss_fn raises {type(error).__name__}{causes.place_of_error(error)}: {message}"
    if "unbound axis" in message:
        text += "; call a collective in jax.shard_map, and give its axis in meshes"
    if "context mesh" in message or "ncompatible devices" in message:
        text += (
            "; the loss holds a mesh that verify_loss cannot replace: let it have a parameter "
            "mesh, or leave the mesh out of jax.shard_map, which then uses the ambient one"
        )
    return text


def _inputs(
    subject: _Subject,
    reference: _Reference,
    mesh: Mesh,
    without: Sequence[str],
    notes: list[str],
) -> list[_Inputs]:
    """Returns the inputs to compare: the user's with noise in the parameters; with other masks."""
    random = np.random.default_rng(0)
    params, batch = subject.params.arrays, subject.batch.arrays
    given = _Inputs("as given", params, batch)
    if not np.isfinite(reference.step(mesh, given, params, 0.0)["loss"]):
        raise ConfigError("loss_fn is not finite on one device; pass params and batch where it is")
    # An error in a bias of zero or a scale of one would not show.
    noisy = [_with_noise(array, random) if _is_trained(array) else array for array in params]
    start = _Inputs("noisy", noisy, batch)
    if not _is_finite(reference.step(mesh, start, noisy, 0.0)):
        start = given
    inputs = [start]
    rows = [array for array in batch if isinstance(array, np.ndarray) and array.ndim]
    if rows and all((array == array[:1]).all() for array in rows):
        notes.append("all rows of the batch are equal: an error in their order does not show")
    masked = [_with_fewer_ones(array, random) for array in batch]
    pairs = zip(masked, batch, strict=True)
    is_changed = any(a is not b and not np.array_equal(a, b) for a, b in pairs)
    if is_changed and "masks" not in without:
        other = _Inputs("with other masks", start.params, masked)
        if _is_finite(reference.step(mesh, other, start.params, 0.0)):
            inputs.append(other)
    return inputs


def _is_finite(values: dict[str, Any]) -> bool:
    leaves = [values["loss"], *values["gradients"]]
    return all(np.isfinite(leaf).all() for leaf in leaves)


def _with_noise(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return array + NOISE * (array.std() or 1.0) * random.normal(size=array.shape)


def _with_fewer_ones(array: Any, random: np.random.Generator) -> Any:
    """Returns an array of only zeros and ones with fewer ones, more in some rows than in others.

    With equal masks in all rows, the mean of the means of shards would be right.
    """
    if not isinstance(array, np.ndarray) or not array.ndim or not np.isin(array, (0, 1)).all():
        return array
    share = np.linspace(0.2, 1, len(array)).reshape(-1, *[1] * (array.ndim - 1))
    return np.where(random.random(array.shape) < share, array, np.zeros_like(array))


def _slope_fault(
    subject: _Subject, reference: _Reference, mesh: Mesh, inputs: _Inputs
) -> str | None:
    """Returns the first parameter whose gradient is not the central difference of the loss."""
    one = reference.mesh(mesh)
    real = [number for number in subject.trained if not np.iscomplexobj(inputs.params[number])]

    def loss(leaves):
        arrays = list(inputs.params)
        for number, leaf in zip(real, leaves, strict=True):
            arrays[number] = leaf
        return subject.loss(one, arrays, inputs.batch)[0]

    names = [subject.params.array_paths[number] for number in real]
    with jax.set_mesh(one):
        return model_laws.slope_fault(loss, [inputs.params[number] for number in real], names)


def _compare(
    subject: _Subject,
    reference: _Reference,
    layout: _Layout,
    inputs: Sequence[_Inputs],
    tolerance: float,
) -> MeshResult:
    """Runs the steps on one mesh and compares them with the steps on one device."""
    differences: dict[str, float] = {}
    expected = [reference.steps(layout.mesh, one) for one in inputs]
    try:
        fault = _first_fault(subject, layout, inputs, expected, tolerance, differences)
    except ConfigError:
        raise
    except Exception as error:  # XLA raises many types; each of them is a failure of the mesh
        fault = _failure(error)
    return MeshResult(layout.name, differences, fault)


def _first_fault(
    subject: _Subject,
    layout: _Layout,
    inputs: Sequence[_Inputs],
    expected: Sequence[tuple[float, list[dict[str, Any]]]],
    tolerance: float,
    differences: dict[str, float],
) -> str | None:
    """Adds the largest difference of each kind to `differences`; returns the first fault."""
    mesh = layout.mesh
    params_shardings, batch_shardings = layout.shardings("params"), layout.shardings("batch")
    trained_shardings = [params_shardings[number] for number in subject.trained]
    step = jax.jit(
        lambda *args: subject.step(mesh, *args),
        in_shardings=(params_shardings, batch_shardings, NamedSharding(mesh, PartitionSpec())),
        out_shardings={
            "loss": None,
            "aux": None,
            "gradients": trained_shardings,
            "parameters": trained_shardings,
        },
    )
    fault = None
    with jax.set_mesh(mesh):
        for one, (rate, expected_steps) in zip(inputs, expected, strict=True):
            params = jax.device_put(one.params, params_shardings)
            batch = jax.device_put(one.batch, batch_shardings)
            for number, wanted in enumerate(expected_steps):
                values = step(params, batch, rate)
                params = subject.with_trained(params, values["parameters"])
                found = _value_fault(subject, values, wanted, tolerance, differences)
                if found and fault is None:
                    when = [f"step {number}"] + [one.name] * (one is not inputs[0])
                    fault = f"{found} ({', '.join(when)})"
    return fault


def _value_fault(
    subject: _Subject,
    values: Mapping[str, Any],
    wanted: Mapping[str, Any],
    tolerance: float,
    differences: dict[str, float],
) -> str | None:
    """Returns the first difference in a step, of any copy of an array."""
    zero_gradients = certificate.zero_gradient_names(_by_name(subject, wanted)["gradients"])
    fault = None
    for copy in _copies(values):
        largest, found = certificate.compare(
            _by_name(subject, copy),
            _by_name(subject, wanted),
            tolerance=tolerance,
            zero_gradients=zero_gradients,
        )
        for kind, difference in largest.items():
            differences[kind] = max(difference, differences.get(kind, 0.0))
        fault = fault or found
    return fault


def _by_name(subject: _Subject, values: Mapping[str, Any]) -> certificate.Trees:
    """Returns the values by kind and name of the parameter."""
    trees: certificate.Trees = {"loss": {"": values["loss"]}}
    if values["aux"]:
        trees["aux"] = dict(enumerate(values["aux"]))
    for kind in ("gradients", "parameters"):
        trees[kind] = dict(zip(subject.names, values[kind], strict=True))
    return trees


def _copies(values: Any) -> list[Any]:
    """Returns the values as numpy arrays; and once more with the replicas that differ most, if any.

    Replicas differ if a `shard_map` without `check_vma` calls its result replicated.
    """
    leaves, tree = jax.tree.flatten(values)
    first = [np.asarray(leaf) for leaf in leaves]
    others = list(first)
    for number, leaf in enumerate(leaves):
        largest = 0.0
        for shard in leaf.addressable_shards:
            data, expected = np.asarray(shard.data), first[number][shard.index]
            if data.tobytes() == expected.tobytes():
                continue
            difference = np.nan_to_num(np.abs(data - expected), nan=math.inf).max()
            if difference > largest:
                largest = difference
                others[number] = first[number].copy()
                others[number][shard.index] = data
    copies = [first]
    if any(a is not b for a, b in zip(first, others, strict=True)):
        copies.append(others)
    return [jax.tree.unflatten(tree, copy) for copy in copies]
