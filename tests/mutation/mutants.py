"""Every small change of a source file that could be a bug: one node of its syntax tree replaced by another.

    a < b       a <= b, a > b              x and y     x or y               if c        if not c
    a + b       a - b                      not x       x                    return x    return None
    7           8                          True        False                statement   (left out)

Docstrings, annotations, messages of errors, imports and type definitions are left alone: a change of those is none of
what runs. So are asserts and `zip(..., strict=True)`, which no right program ever notices.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARED = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclass(frozen=True)
class Mutant:
    file: str  # relative to the tree
    line: int
    function: str  # the innermost function or class that holds it, with those around it
    before: str  # the statement, in one line
    after: str
    source: str  # the whole file

    @property
    def key(self) -> str:
        """Stays the same while other lines come and go."""
        return f"{self.file}::{self.function}: {self.before} -> {self.after}"


def mutants_of(tree: Path, file: str, functions: Collection[str] | None = None) -> list[Mutant]:
    """In the order of the file, or of some of its functions; two ways to the same text count once."""
    source = (tree / file).read_text()
    found: dict[str, Mutant] = {}
    for mutant in _mutants(file, source, functions):
        found.setdefault(mutant.source, mutant)
    found.pop(ast.unparse(ast.parse(source)), None)
    return list(found.values())


def _mutants(file: str, source: str, functions: Collection[str] | None) -> Iterator[Mutant]:
    module = ast.parse(source)
    for path, node in _nodes(module, ()):
        function = _function(module, path)
        if functions is not None and function not in functions:
            continue
        statement, depth = _statement(module, path)
        line, before = getattr(node, "lineno", statement.lineno), _head(statement)
        for replacement in _replacements(node, path):
            _put(module, path, replacement)
            after, changed = _head(_at(module, path[:depth])), ast.unparse(module)
            _put(module, path, node)
            yield Mutant(file, line, function, before, after, changed)


def _put(module: ast.AST, path: Path_, node: ast.AST) -> None:
    place = _at(module, path[:-1])
    name, index = path[-1]
    if index is None:
        setattr(place, name, node)
    else:
        getattr(place, name)[index] = node


Step = tuple[str, int | None]  # a field of a node, and a place in it where it is a list
Path_ = tuple[Step, ...]


def _nodes(node: ast.AST, path: Path_) -> Iterator[tuple[Path_, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "msg", "exc"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _is_talk(child):
                here = (*path, (name, index))
                yield here, child
                yield from _nodes(child, here)


def _is_talk(node: ast.AST) -> bool:
    """Docstrings, imports, texts, our own checks, and what a type checker alone reads."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    return isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Raise | ast.Assert)


def _replacements(node: ast.AST, path: Path_) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in COMPARED[type(operator)]:
                changed = copy.deepcopy(node)
                changed.ops[index] = other()
                yield changed
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _is_text(node):
        yield ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
        yield ast.AugAssign(node.target, COMPUTED[type(node.op)](), node.value)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED:
        if node.func.id != "sorted" or not node.keywords:
            yield ast.Call(ast.Name(CALLED[node.func.id]), node.args, node.keywords)
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    if _may_be_left_out(node) and len(path) > 1:
        yield ast.Pass()


def _may_be_left_out(node: ast.AST) -> bool:
    """A statement without which names are the same: a call, a change in place, an assignment to a part."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.AugAssign | ast.Delete)


def _is_text(node: ast.BinOp) -> bool:
    texts = (ast.Constant, ast.JoinedStr)
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, texts) and isinstance(getattr(side, "value", 0), str))
        for side in (node.left, node.right)
    )


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _at(node: ast.AST, path: Path_) -> ast.AST:
    for name, index in path:
        value = getattr(node, name)
        node = value if index is None else value[index]
    return node


def _statement(module: ast.AST, path: Path_) -> tuple[ast.stmt, int]:
    """The innermost one that holds the place, and how deep it lies."""
    for depth in range(len(path), 0, -1):
        node = _at(module, path[:depth])
        if isinstance(node, ast.stmt):
            return node, depth
    raise AssertionError(path)


def _function(module: ast.AST, path: Path_) -> str:
    names = []
    for depth in range(1, len(path)):
        node = _at(module, path[:depth])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
    return ".".join(names)


def _head(node: ast.AST) -> str:
    """A statement in one line, without what is inside of it."""
    node = copy.deepcopy(node)
    if hasattr(node, "body") and isinstance(node.body, list):
        node.body = [ast.Expr(ast.Constant(...))]
        if getattr(node, "orelse", None):
            node.orelse = []
    return " ".join(ast.unparse(node).split())
