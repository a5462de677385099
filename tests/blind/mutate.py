"""Small changes of source code, of kinds that no author chose, at places that a seed chooses.

cosmic-ray 8.7 and mutmut 3.8 were looked at first. Both change operators, comparisons and numbers;
neither has an axis, a dtype, a reduction or swapped arguments, half of the kinds below. mutmut
keeps all mutants of a function in the imported module and switches between them by an environment
variable: here the switch would run while jax traces, and a test whose trace is cached would never
see it. It also mutates texts, and has no sample. cosmic-ray keeps its work in a database by
position in the file, starts one command for each mutant, which imports jax again, and cannot sample
by statement. What remains of either is a walk over a syntax tree, so this is one, over `ast`.

A mutant replaces one expression, or drops one statement. Not changed: docstrings, annotations,
texts of errors and logs, `__repr__`, assertions, decorators, imports.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.blind.contexts import AREAS, files_of_area

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),  # codespell:ignore notin
    ast.NotIn: (ast.In,),  # codespell:ignore notin
}
DTYPES = {
    "float64": "float32",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "float16": "float32",
    "int64": "int32",
    "int32": "int16",
    "uint64": "uint32",
    "uint32": "uint16",
    "int8": "uint8",
    "uint8": "int8",
}
REDUCTIONS = {
    "sum": "mean",
    "mean": "sum",
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "minimum": "maximum",
    "any": "all",
    "all": "any",
    "argmax": "argmin",
    "argmin": "argmax",
    "prod": "sum",
    "pmax": "psum",
    "pmean": "psum",
    "psum": "pmean",
}
# Calls that return something like their first argument if they are left out.
DROPPED_REDUCTIONS = {*REDUCTIONS, "psum_scatter", "cumsum", "all_gather", "ppermute", "all_to_all"}
# Most of these fail at once with another shape or type, which any test finds: they are drawn less.
LOUD_KINDS = {"call", "arguments"}
AXIS_KEYWORDS = {"axis", "dim", "axis_name", "axes", "split_axis", "concat_axis", "dimension"}
AXIS_CALLS = DROPPED_REDUCTIONS | {
    "concatenate",
    "stack",
    "split",
    "take",
    "moveaxis",
    "swapaxes",
    "expand_dims",
    "squeeze",
    "repeat",
    "roll",
    "flip",
}
DTYPE_KEYWORDS = {"dtype", "preferred_element_type"}
# Without these a mutant fails at once, or nothing changes.
KEPT_CALLS = set(
    """len range zip enumerate isinstance getattr hasattr list tuple dict set iter next open str
    repr int float bool type super partial map filter Path cast""".split()
)
LOG_CALLS = set("log say print warn warning info debug error exception urgent".split())
LEFT_ALONE = set("body orelse finalbody handlers cases annotation returns decorator_list".split())
REPRESENTATIONS = ("__repr__", "__str__")


class Mutant(NamedTuple):
    area: str
    file: str  # from the root of the repository
    line: int  # first of the statement
    end_line: int  # last of the statement; of its header, if it has a body
    function: tuple[int, int]  # first and last line of the function around it; (0, 0): none
    kind: str
    before: str
    after: str
    start: int  # position of `before` in the UTF-8 text of the file
    end: int

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


class Statement(NamedTuple):
    node: ast.stmt
    function: tuple[int, int]


# ---- what may be changed ----


def is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_string or isinstance(node, ast.JoinedStr)


def last_name(node: ast.AST) -> str:
    """Returns `c` for the expressions c and a.b.c, "" for others."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def is_message(node: ast.AST) -> bool:
    """Returns whether an expression makes text for people."""
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        is_join = name == "join" and isinstance(node.func, ast.Attribute)
        is_error = name.endswith(("Error", "Exception", "Warning"))
        return is_error or name.strip("_") in LOG_CALLS or (is_join and is_text(node.func.value))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.BinOp) and is_text(node))


def is_type(node: ast.AST) -> bool:
    """Returns whether an expression may be a type, such as `dict[str, int] | None`."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and is_type(node.left) and is_type(node.right)
    if isinstance(node, ast.Subscript):
        return is_type(node.value) and last_name(node.value)[:1].isalpha()
    if isinstance(node, ast.Constant):
        return node.value is None
    return isinstance(node, (ast.Name, ast.Attribute))


def is_class_name(node: ast.AST) -> bool:
    name = last_name(node)
    return name[:1].isupper() and not name.isupper()


def is_left_alone(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Global, ast.Pass)):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or is_message(node.value)
    return isinstance(node, ast.Assign) and is_class_name(node.targets[0]) and is_type(node.value)


def statements(tree: ast.Module) -> Iterator[Statement]:
    """Yields all statements, without those that are left alone."""

    def walk(body: list[ast.stmt], function: tuple[int, int]) -> Iterator[Statement]:
        for node in body:
            inner = function
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name in REPRESENTATIONS:
                    continue
                inner = (node.lineno, node.end_lineno)
            if not is_left_alone(node):
                yield Statement(node, inner)
            for part in blocks_of(node):
                yield from walk(part, inner)

    yield from walk(tree.body, (0, 0))


def blocks_of(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        if getattr(node, field, None):
            yield getattr(node, field)
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def own_expressions(node: ast.stmt) -> Iterator[ast.expr]:
    """Yields the expressions of a statement itself: of a function its defaults, of a class none."""
    for field, value in ast.iter_fields(node):
        if field in LEFT_ALONE or isinstance(node, ast.ClassDef):
            continue
        values = value if isinstance(value, list) else [value]
        for one in values:
            if isinstance(one, ast.arguments):
                yield from (default for default in (*one.defaults, *one.kw_defaults) if default)
            elif isinstance(one, ast.withitem):
                yield one.context_expr
            elif isinstance(one, ast.keyword):
                yield one.value
            elif isinstance(one, ast.expr):
                yield one


def places(node: ast.AST, parent: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields each expression that may be changed, with the node above it."""
    if is_message(node):
        return
    yield node, parent
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from places(child, node)
        elif isinstance(child, (ast.keyword, ast.comprehension)):
            for part in ast.iter_child_nodes(child):
                if isinstance(part, ast.expr):
                    yield from places(part, child)


# ---- what it is changed to ----


def text(node: ast.AST) -> str:
    return ast.unparse(node)


def in_place(node: ast.AST) -> str:
    """Returns the text of an expression that can stand at any place."""
    is_atom = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    is_number = isinstance(node, ast.Constant)
    return text(node) if is_atom or is_number else f"({text(node)})"


def changes(node: ast.AST, parent: ast.AST | None, modules: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the kinds and the new texts of an expression."""
    if isinstance(node, ast.BinOp):
        yield from changes_of_operation(node)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "operator", f"({text(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield "operator", in_place(node.operand)
    elif isinstance(node, ast.Compare):
        for other in COMPARISONS[type(node.ops[0])]:
            changed = ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
            yield "comparison", f"({text(changed)})"
    elif isinstance(node, ast.IfExp):
        yield "comparison", f"({text(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.Constant):
        yield from changes_of_constant(node, parent)
    elif isinstance(node, (ast.Attribute, ast.Name)):
        name = last_name(node)
        if name in DTYPES:
            yield "dtype", text(node).removesuffix(name) + DTYPES[name]
    elif isinstance(node, ast.Call):
        yield from changes_of_call(node, modules)


def changes_of_operation(node: ast.BinOp) -> Iterator[tuple[str, str]]:
    if type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]()
        yield "operator", f"({text(ast.BinOp(node.left, other, node.right))})"
    yield "operator", in_place(node.left)
    if isinstance(node.op, (ast.Add, ast.Mult)):
        yield "operator", in_place(node.right)


def changes_of_constant(node: ast.Constant, parent: ast.AST | None) -> Iterator[tuple[str, str]]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", str(not value)
    elif isinstance(value, int):
        is_axis = isinstance(parent, ast.keyword) and parent.arg in AXIS_KEYWORDS
        is_axis |= isinstance(parent, ast.Call) and last_name(parent.func) in AXIS_CALLS
        is_axis |= isinstance(parent, ast.Subscript) and last_name(parent.value) == "shape"
        kind = "axis" if is_axis else "constant"
        yield kind, str(value + 1)
        if value > 0:
            yield kind, str(value - 1)
    elif isinstance(value, float):
        yield "constant", repr(2 * value if value else 1.0)
        yield "constant", "0.0" if value else "-1.0"
    elif isinstance(value, str):
        if value in MESH_AXES:
            number = MESH_AXES.index(value)
            yield "axis", repr(MESH_AXES[(number + 1) % len(MESH_AXES)])
            yield "axis", repr(MESH_AXES[number - 1])
        elif value in DTYPES:
            yield "dtype", repr(DTYPES[value])


def changes_of_call(node: ast.Call, modules: set[str]) -> Iterator[tuple[str, str]]:
    name = last_name(node.func)
    kind = "dtype" if name == "astype" else "reduction" if name in DROPPED_REDUCTIONS else "call"

    # Left out: x.method(...) and function(x, ...) become x.
    root = text(node.func).split(".")[0]
    is_method = isinstance(node.func, ast.Attribute) and root not in modules
    is_class = name[:1].isupper()
    if is_method:
        yield kind, in_place(node.func.value)
    elif node.args and not is_class and name not in KEPT_CALLS:
        if not isinstance(node.args[0], ast.Starred):
            yield kind, in_place(node.args[0])

    if name in REDUCTIONS and root != "math":
        yield "reduction", text(node).replace(text(node.func), _renamed(node.func), 1)

    # Arguments: swapped with the next one, or left out.
    for number, (first, second) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if not any(isinstance(one, ast.Starred) for one in (first, second)):
            args = [*node.args[:number], second, first, *node.args[number + 2 :]]
            yield "arguments", text(ast.Call(node.func, args, node.keywords))
    for number, keyword in enumerate(node.keywords):
        if keyword.arg is None:
            continue
        others = [*node.keywords[:number], *node.keywords[number + 1 :]]
        is_dtype = keyword.arg in DTYPE_KEYWORDS
        yield "dtype" if is_dtype else "arguments", text(ast.Call(node.func, node.args, others))


def _renamed(function: ast.AST) -> str:
    name = last_name(function)
    return text(function).removesuffix(name) + REDUCTIONS[name]


# ---- mutants ----


def mutants_of(statement: Statement, area: str, file: str, source: bytes) -> list[Mutant]:
    """Returns all mutants of a statement; each compiles, and is another program."""
    tree, modules = _parsed(source)
    lines = _starts_of_lines(source)
    original = ast.dump(tree)
    node = statement.node
    end_line = node.end_lineno
    if body := getattr(node, "body", None):
        end_line = max(node.lineno, body[0].lineno - 1)

    found = []
    for place, kind, after in _changes_of_statement(node, modules):
        start = lines[place.lineno - 1] + place.col_offset
        end = lines[place.end_lineno - 1] + place.end_col_offset
        mutant = Mutant(
            area=area,
            file=file,
            line=node.lineno,
            end_line=end_line,
            function=statement.function,
            kind=kind,
            before=source[start:end].decode(),
            after=after,
            start=start,
            end=end,
        )
        if _is_another_program(mutant.apply(source), original):
            found.append(mutant)
    return found


def _changes_of_statement(node: ast.stmt, modules: set[str]) -> Iterator[tuple[ast.AST, str, str]]:
    """Yields a part of the statement, the kind of the change, and the new text of the part."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "call", "pass"
    if isinstance(node, (ast.If, ast.While)):
        yield node.test, "comparison", f"(not ({text(node.test)}))"
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]()
        yield node, "operator", text(ast.AugAssign(node.target, other, node.value))
        yield node, "operator", "pass"
    for expression in own_expressions(node):
        for place, parent in places(expression):
            for kind, after in changes(place, parent, modules):
                yield place, kind, after


def _is_another_program(source: bytes, original: str) -> bool:
    try:
        return ast.dump(ast.parse(source)) != original
    except (SyntaxError, ValueError):
        return False


def _parsed(source: bytes) -> tuple[ast.Module, set[str]]:
    """Returns the tree, and the names of imported modules and of classes."""
    tree = ast.parse(source)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules |= {(name.asname or name.name).split(".")[0] for name in node.names}
    return tree, modules


def _starts_of_lines(source: bytes) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def draw(root: Path, seed: int, num: int) -> list[Mutant]:
    """Returns a sample of mutants of the package in `root`.

    The areas take turns, in an order that the seed chooses, so a part of the sample is a fair
    sample too. Each area gives a statement (all are equally likely, whatever the size of their
    file, and none is drawn twice), then a kind of change that the statement allows, then one of
    that kind.
    """
    rng = random.Random(seed)
    areas = rng.sample(AREAS, len(AREAS))
    pools = {area: _shuffled_statements(root, area, rng) for area in areas}
    mutants = []
    while len(mutants) < num and any(pools.values()):
        for area in areas:
            mutant = _draw_from(pools[area], area, rng)
            if mutant is not None and len(mutants) < num:
                mutants.append(mutant)
    return mutants


def _shuffled_statements(root: Path, area: str, rng: random.Random) -> list:
    pool = []
    for file in files_of_area(root, area):
        source = (root / file).read_bytes()
        pool += [(file, source, statement) for statement in statements(ast.parse(source))]
    rng.shuffle(pool)
    return pool


def _draw_from(pool: list, area: str, rng: random.Random) -> Mutant | None:
    """Takes statements from the pool until one of them can be changed."""
    while pool:
        file, source, statement = pool.pop()
        by_kind: dict[str, list[Mutant]] = {}
        for mutant in mutants_of(statement, area, file, source):
            by_kind.setdefault(mutant.kind, []).append(mutant)
        if by_kind:
            kinds = sorted(by_kind)
            weights = [1 if kind in LOUD_KINDS else 3 for kind in kinds]
            [kind] = rng.choices(kinds, weights)
            return rng.choice(by_kind[kind])
    return None
