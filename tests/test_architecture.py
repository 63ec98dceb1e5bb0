"""The two rules of docs/architecture.md: imports run one way, and each outside library has one door."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from typing_extensions import get_protocol_members

from zeroexp.interface.strategy import Strategy

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("zeroexp/**/*.py"), *ROOT.glob("hydra_plugins/**/*.py")])

# The written order of the folders: a module may import its own folder and those of every row above it. `__main__` of a
# folder is a command, and commands come last. The longest prefix counts.
ORDER = [
    {"zeroexp.registry"},
    {"zeroexp.cut"},
    {"zeroexp.config"},
    {"zeroexp.process"},
    {"zeroexp.interface"},
    {"zeroexp.measure", "zeroexp.models"},
    {"zeroexp.comm", "zeroexp.data", "zeroexp.tracking"},
    {"zeroexp.zero", "zeroexp.training", "zeroexp.checkpoint", "zeroexp.report"},
    {"zeroexp.zero_safety", "zeroexp.foreign"},
    {"zeroexp.engines", "zeroexp.export"},
    {"zeroexp.check"},
    {"zeroexp.plan"},
    {"zeroexp.cluster", "zeroexp.run"},
    {"zeroexp.commandline", "zeroexp.sync", "zeroexp.calibrate", "zeroexp.verify"},
    {"zeroexp.__main__", "zeroexp.watch", "hydra_plugins"},
    {"zeroexp.plan.__main__", "zeroexp.report.__main__", "zeroexp.calibrate.__main__"},
    {"zeroexp.foreign.__main__", "zeroexp.verify.__main__"},
]

HYDRA = {"zeroexp.__main__", "zeroexp.commandline.mistakes", "hydra_plugins.zeroexp_launcher"}
DOORS = {
    "hydra": HYDRA,
    "omegaconf": HYDRA,
    "submitit": {"zeroexp.cluster.batch_file"},
    "mlflow": {"zeroexp.tracking.mlflow", "zeroexp.tracking.mlflow_store"},
    "transformers": {
        "zeroexp.data.conversations",
        "zeroexp.models.huggingface",
        "zeroexp.models.huggingface_folder",
        "zeroexp.models.huggingface_keys",
        "zeroexp.models.huggingface_tensor_names",
        "zeroexp.models.huggingface_weights_check",
    },
    "datasets": {"zeroexp.data.table_rows"},
    "peft": {"zeroexp.models.lora"},
    "psutil": {"zeroexp.measure.machine_load", "zeroexp.measure.system_samples"},
    "xxhash": {"zeroexp.process.content_hash"},
    "matplotlib": {"zeroexp.report.figure"},
    "plotly": {"zeroexp.report.page"},
    "scipy": {"zeroexp.report.statistics", "zeroexp.calibrate.step_factors"},
    "difflib": {"zeroexp.registry.did_you_mean"},  # one home for what a wrong word could have meant
}

COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier", "monitored_barrier"),
}
COMMUNICATOR = re.compile(r"\bdist(ributed)?$|group", re.IGNORECASE)
MAY_COMMUNICATE = {
    "zeroexp.comm.base",  # the sum of a tiny tensor
    "zeroexp.comm.point_to_point",  # messages to one peer
    "zeroexp.comm.native",
    "zeroexp.process.watchdog.differs",  # ends the waits of ranks that differ
    "zeroexp.process.world",
}

RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in the file, also those inside functions; relative ones made absolute."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            module = f"{base}.{node.module or ''}".strip(".") if node.level else node.module or ""
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def row_of(module: str) -> tuple[int, str] | None:
    matches = [
        (len(prefix), index, prefix)
        for index, row in enumerate(ORDER)
        for prefix in row
        if module == prefix or module.startswith(prefix + ".")
    ]
    if not matches:
        return None
    _, index, prefix = max(matches)
    return index, prefix


def test_no_two_files_share_a_name():
    names = [path.name for path in SOURCES if not path.name.startswith("__")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_what_is_installed_asks_for_nothing_that_is_not():
    found = {
        path: {module.partition(".")[0] for _, module in imported_modules(path)} for path in SOURCES
    }
    assert [path for path, roots in found.items() if roots & {"benchmarks", "tests"}] == []


def test_every_module_has_a_place_in_the_order():
    homeless = [module_name(path) for path in SOURCES if row_of(module_name(path)) is None]
    assert homeless == ["zeroexp"], "the package itself imports nothing and has no row"


def test_imports_run_one_way():
    wrong = []
    for path in SOURCES:
        mine = row_of(module_name(path))
        for line, imported in imported_modules(path):
            theirs = row_of(imported)
            if mine and theirs and theirs[1] != mine[1] and theirs[0] >= mine[0]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_the_engine_knows_no_transport():
    """It is given memory and moves; which transport provides them, and how, is nowhere named."""
    doors = ("base", "collectives", "traits", "secondary", "shared_memory_sizes")
    known = {
        module.split(".")[2]
        for path in (ROOT / "zeroexp/zero").rglob("*.py")
        for _, module in imported_modules(path)
        if module.startswith("zeroexp.comm.")
    }
    assert known == {*doors}


@pytest.mark.parametrize(
    "package",
    ["cut", "config", "interface", "comm", "zero", "zero_safety", "engines", "plan", "verify"],
)
def test_imports_run_one_way_inside_a_folder_too(package):
    """No two files need each other, however far apart: a reader can begin with those that need none."""
    files = {module_name(path): path for path in ROOT.glob(f"zeroexp/{package}/**/*.py")}
    needed = {
        name: {
            other
            for _, imported in imported_modules(path)
            for other in files
            if imported == other or imported.startswith(other + ".")
        }
        for name, path in files.items()
        if path.name != "__init__.py"
    }
    assert list(TopologicalSorter(needed).static_order())  # raises CycleError


def test_the_engine_does_not_know_its_refusals():
    """So they observe it; tests/zero/test_without_safety.py trains without them."""
    inside = ROOT / "zeroexp/zero_safety"
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if not path.is_relative_to(inside)
        for _, module in imported_modules(path)
        if module.startswith("zeroexp.zero_safety")
    }
    assert naming == {"zeroexp/engines/sharded.py"}


def test_the_loop_knows_no_engine():
    path = ROOT / "zeroexp/training/loop.py"
    assert [m for _, m in imported_modules(path) if m.startswith("zeroexp.zero")] == []


BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
SCOPES = (ast.FunctionDef, ast.ClassDef, ast.Lambda)


def depth_of(node: ast.AST) -> int:
    inner = (each for each in ast.iter_child_nodes(node) if not isinstance(each, SCOPES))
    return max((depth_of(each) + isinstance(each, BLOCKS) for each in inner), default=0)


def test_functions_nest_three_blocks_at_most():
    deep = {
        f"{module_name(path)}.{node.name}"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef) and depth_of(node) > 3
    }
    assert not deep, "nest less"


def test_the_loop_is_forty_lines():
    path = ROOT / "zeroexp/training/loop.py"
    (train,) = (n for n in nodes_of(path) if isinstance(n, ast.FunctionDef) and n.name == "train")
    assert train.end_lineno - train.lineno < 40


def test_an_engine_shows_the_loop_nine_members():
    shown = {"model", "optimizer", "microbatch", "backward", "step", "zero_grad"}
    kept = {"model_states", "state_dict", "load_state_dict"}
    assert get_protocol_members(Strategy) == shown | kept


@pytest.mark.parametrize("library", DOORS)
def test_each_outside_library_has_one_door(library):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in SOURCES
        for line, imported in imported_modules(path)
        if imported.split(".")[0] == library and module_name(path) not in DOORS[library]
    ]
    assert not wrong, f"{library} is imported by {sorted(DOORS[library])} alone:\n" + "\n".join(
        wrong
    )


def test_collectives_are_called_in_few_files():
    wrong = []
    for path in SOURCES:
        if module_name(path) in MAY_COMMUNICATE:
            continue
        for node in nodes_of(path):
            named = isinstance(node, ast.Attribute) and node.attr in COLLECTIVES
            if named and COMMUNICATOR.search(ast.unparse(node.value)):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
        for line, imported in imported_modules(path):
            module, _, name = imported.rpartition(".")
            if module.startswith("torch.distributed") and name in COLLECTIVES:
                wrong.append(f"{path.relative_to(ROOT)}:{line} {imported}")
    assert not wrong, f"collectives belong into {sorted(MAY_COMMUNICATE)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("guide", "package"),
    [
        ("zeroexp/zero/__init__.py", "zero"),
        ("zeroexp/zero_safety/__init__.py", "zero_safety"),
        ("zeroexp/comm/__init__.py", "comm"),
    ],
)
def test_every_file_is_in_its_guides(guide, package):
    text = (ROOT / guide).read_text()
    files = {path.name for path in ROOT.glob(f"zeroexp/{package}/*.py")} - {"__init__.py"}
    assert [name for name in sorted(files) if name not in text] == []


def test_rank_variables_are_named_in_world_alone():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for path in SOURCES
        if module_name(path) != "zeroexp.process.world"
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value in RANK_VARIABLES
    ]
    assert not wrong, "\n".join(wrong)


OPENERS = {"open": 1, "fdopen": 1, "TextIOWrapper": None, "read_text": None, "write_text": None}
NOT_TEXT = ("os", "kind")  # what `.open` of these returns is no file of text


def opens_text_by_locale(call: ast.Call) -> bool:
    """Whether the call opens text in the encoding of whoever runs it: of a Latin-1 or ASCII locale too."""
    words = {word.arg: word.value for word in call.keywords}
    if "encoding" in words or None in words:
        return False
    if "text" in words:  # of a subprocess
        return True
    method = isinstance(call.func, ast.Attribute)
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "open" and method and ast.unparse(call.func).split(".")[-2] in NOT_TEXT:
        return False
    if name not in OPENERS:
        return False
    at = 0 if name == "open" and method else OPENERS[name]
    mode = words.get("mode", call.args[at] if at is not None and at < len(call.args) else None)
    return mode is None or "b" not in ast.unparse(mode)


def test_every_text_file_is_opened_in_a_named_encoding():
    """ruff's PLW1514 sees only the paths whose type it infers."""
    files = [
        *SOURCES,
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("slurm/one_machine/*.py"),
    ]
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in files
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and opens_text_by_locale(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_yaml_is_data_without_targets():
    files = sorted(ROOT.glob("conf/**/*.yaml"))
    assert files
    assert [path for path in files if "_target_" in path.read_text()] == []


# None in sys.modules is how Python says "not installed": import raises, and find_spec finds nothing.
IMPORT_WITHOUT_LIBRARIES = """
import sys
for library in ("hydra", "omegaconf", "mlflow", "datasets", "submitit", "deepspeed"):
    sys.modules[library] = None
import zeroexp.zero, zeroexp.engines.build, zeroexp.models.module, zeroexp.training.loop
"""


@pytest.mark.slow
def test_engine_imports_with_torch_and_transformers_alone():
    subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_LIBRARIES], cwd=ROOT, check=True, timeout=600
    )


def test_every_package_is_shipped():
    """pyproject.toml lists packages by hand: a new folder must be added there."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {module_name(path.parent / "__init__.py") for path in SOURCES}
    assert set(listed) - {"zeroexp.conf", "zeroexp.site_example"} == folders, "both are YAML alone"
