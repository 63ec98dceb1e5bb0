"""Every YAML composes, is accepted, and builds; what a run is told survives its file."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.composing import CONF, composed, options
from tests.run_folders import write_run
from zeroexp import __main__ as zeroexp_main
from zeroexp.check import check
from zeroexp.check.rules_machine import check_ranks_fit_host_memory
from zeroexp.config.engines import ENGINES
from zeroexp.config.keys import (
    ENGINE_SETTINGS,
    Config,
    ConfigError,
    DamagedFile,
    UndefinedCombination,
    from_mapping,
    load,
    resolve,
    save,
)
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.stage import STAGES, Stage
from zeroexp.tracking.run import read_run
from zeroexp.zero.options import Options
from zeroexp.zero_safety.engine_arguments import WORDS

ROOT = CONF.parent
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
# The group's options that need company to be accepted.
COMPANY = {
    "model=smollm2_360m_yelp": ["data=yelp"],
    "model=hf": ["+model.hf_config.model_type=gpt2"],
    "model=mlp_1b": ["data=vectors"],
    "model=mlp_tiny": ["data=vectors"],
    "data=vectors": ["model=mlp_tiny"],
    "data=hf": ["data.path=reviews.csv"],
    "data=yelp": ["model=smollm2_360m_yelp"],
    "precision=autocast": ["strategy=ddp", "strategy.implementation=torch"],
    "cluster=slurm": ["cluster.device=cpu"],
    "optimizer=muon": ["strategy.implementation=parameter"],
}


def all_options() -> list[str]:
    return [f"{group}={name}" for group in GROUPS for name in options(group)]


@pytest.mark.parametrize("option", all_options())
def test_every_option_composes_is_accepted_and_survives_its_file(option, tmp_path):
    config = composed(option, *COMPANY.get(option, ()))
    check(config)
    group, name = option.split("=")
    assert getattr(config, group).name == name, "a file is named as it names itself"
    save(resolve(config), tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == resolve(config)


@pytest.mark.parametrize("name", options("strategy"))
def test_every_strategy_is_a_known_row_with_the_dtypes_of_the_precision(name):
    strategy = composed(f"strategy={name}", "precision=bf16_master").strategy
    rows = (strategy.parameters, strategy.gradients, strategy.optimizer)
    Stage.of(*(row.placement for row in rows))
    assert [row.dtype for row in rows] == ["bfloat16", "float32", "float32"]


def with_implementation(config: Config, implementation: str) -> Config:
    return replace(config, strategy=replace(config.strategy, implementation=implementation))


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_deepspeed_is_refused_with_how_to_install_it():
    with pytest.raises(UndefinedCombination, match=r"pip install zeroexp\[deepspeed\]"):
        check(with_implementation(composed("strategy=zero2"), "deepspeed"))


def test_defined_and_undefined_combinations_of_strategy_and_implementation():
    """All but one combination means something. DeepSpeed: test_deepspeed.py."""
    undefined = []
    own = (*LAYOUTS, *(engine for engine in ENGINES if engine != "deepspeed"))
    for stage, implementation in itertools.product(STAGES, own):
        try:
            check(with_implementation(composed(f"strategy={stage}"), implementation))
        except UndefinedCombination:
            undefined.append((stage, implementation))
    assert undefined == [("zero1_allreduce", "torch")]


OURS = {"fp32", "bf16", "bf16_master", "paper16", "fp16_master"}
TORCH_DDP = {"fp32", "bf16", "autocast"}  # DDP and ZeroRedundancyOptimizer
# fp32 shards, cast when gathered and reduced
TORCH_FSDP2 = {"fp32", "bf16_master", "paper16", "fp16_master"}


@pytest.mark.parametrize(
    ("stage", "implementation", "accepted"),
    [
        *((stage, "buffer", OURS) for stage in STAGES),
        *((stage, "torch", TORCH_DDP) for stage in ("ddp", "zero1")),
        *((stage, "torch", TORCH_FSDP2) for stage in ("zero2", "zero3")),
    ],
)
def test_precisions_that_an_engine_takes(stage, implementation, accepted):
    taken = set()
    for precision in options("precision"):
        config = composed(f"strategy={stage}", f"precision={precision}")
        try:
            check(with_implementation(config, implementation))
            taken.add(precision)
        except UndefinedCombination:
            pass
    assert taken == accepted


def test_resolved_config_has_every_setting_that_has_an_effect_and_what_was_chosen():
    zero3 = resolve(composed("strategy.implementation=parameter")).strategy
    assert (zero3.unit, zero3.overlap, zero3.owners) == ("block", True, "greedy")
    assert (zero3.prefetch, zero3.keep, zero3.reduce_each) == (None, "last", "microbatch")
    zero1 = resolve(composed("strategy=zero1")).strategy
    assert (zero1.owners, zero1.prefetch, zero1.keep) == (None, None, None)
    assert zero1.reduce_each == "step"
    torch = resolve(composed("strategy.implementation=torch")).strategy
    assert (torch.unit, torch.overlap, torch.prefetch) == (None, None, None)
    chosen = ["strategy.unit=model", "strategy.overlap=false", "strategy.prefetch=0"]
    strategy = resolve(composed(*chosen)).strategy
    assert (strategy.unit, strategy.overlap, strategy.prefetch) == ("model", False, 0)


def test_small_numbers_survive_the_file(tmp_path):
    """YAML 1.1 reads 1e-8, without a point, as a word."""
    config = composed("optimizer.eps=1e-8", "optimizer.lr=5e-5")
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml").optimizer.eps == 1e-8


def test_a_config_that_is_cut_anywhere_is_refused(tmp_path):
    """Half a value is a value: `outputs: /scratch/me` of `outputs: /scratch/me/results`."""
    config = replace(composed(), outputs="/scratch/me/results", plugins=["mine"])
    path = write_run(tmp_path / "run", status="running", num_steps=4) / "config.yaml"
    save(config, path)
    whole = path.read_text(encoding="utf-8")
    assert load(path) == config
    for cut in range(1, 120):
        path.write_text(whole[:-cut], encoding="utf-8")
        for read in (load, lambda path: read_run(path.parent)):
            with pytest.raises(DamagedFile, match=r"config\.yaml: .*cut short"):
                read(path)


def test_unknown_key_in_a_run_config_is_refused():
    values = asdict(Config())
    values["train"]["stepz"] = 3
    with pytest.raises(
        ConfigError, match=r"train\.stepz=3: unknown key; did you mean steps\? use one of .*"
    ):
        from_mapping(Config, values)


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return done.stdout


def test_a_rank_reads_its_config_without_hydra(tmp_path):
    save(Config(), tmp_path / "config.yaml")
    code = f"""
import sys, pathlib
sys.modules["hydra"] = sys.modules["omegaconf"] = sys.modules["torch"] = None
from zeroexp.config.keys import load
print(load(pathlib.Path({str(tmp_path / "config.yaml")!r})).strategy.name)
"""
    assert python(code).strip() == "zero3"


def test_the_process_that_starts_a_sweep_stays_light():
    """It composes and watches: torch belongs to the fork-server, mlflow to a thread."""
    code = """
import sys
import zeroexp.__main__
print(sorted({"torch", "transformers", "datasets", "mlflow", "numpy"} & set(sys.modules)))
"""
    assert python(code).strip() == "[]"


def zeroexp(*words: str, cwd: Path = ROOT, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zeroexp", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    tmp_path = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    copy = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if name.startswith(("zeroexp/", "conf/", "hydra_plugins/", "slurm/")) or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*build, "-w", tmp_path, copy], check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_installed_package_brings_its_yaml_and_launcher(wheel, tmp_path):
    """From a wheel, far from the checkout: conf/ lies inside the package there."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    shown = zeroexp("--cfg", "all", "study=compare", cwd=tmp_path, path=site)
    assert shown.returncode == 0, shown.stderr
    assert "hydra_plugins.zeroexp_launcher.ZeroexpLauncher" in shown.stdout
    for name in ("py.typed", "site_example/cluster/mysite.yaml", "data/corpus/tokenizer.json"):
        assert (site / "zeroexp" / name).is_file(), name


@pytest.mark.slow
def test_an_installed_zeroexp_runs_the_main_job(wheel, tmp_path):
    """In an environment of its own that borrows the libraries of this one, but not this checkout."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (own,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (own / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--force-reinstall"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": variables, "text": True, "timeout": 600}
    subprocess.run([*install, wheel], check=True, **options)
    where = "import zeroexp; print(zeroexp.__file__)"
    told = subprocess.run([python, "-c", where], check=True, capture_output=True, **options)
    assert told.stdout.startswith(str(own))
    words = ["study=compare", "strategy=zero3", "strategy.implementation=buffer,torch"]
    words += ["model=tiny", "train.steps=6", "train.warmup_steps=1", "tracking=files"]
    done = subprocess.run(
        [python.with_name("zeroexp"), *words], capture_output=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 loss curves agree" in done.stdout and "2 of 2 losses fall" in done.stdout
    assert len(list(tmp_path.glob("outputs/compare/*/summary.json"))) == 2


def test_no_more_ranks_are_started_than_the_memory_has_room_for():
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = min(1024, memory // (48 << 20))
    assert not [*check_ranks_fit_host_memory(Config(world_size=most))]
    ((key, _, remedy),) = check_ranks_fit_host_memory(Config(world_size=most + 1))
    assert key == "world_size" and remedy == f"use at most {most}, cluster=slurm, or zeroexp plan"


def test_another_system_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert zeroexp_main.main() == 2
    told = capsys.readouterr()
    assert told.err.startswith("zeroexp: darwin: ranks need Linux") and not told.out
    assert told.err.count("\n") == 1


def test_the_engines_settings_are_its_options():
    """The library has defaults of its own, since it needs no config; they are those of the config."""
    for name, declared in ENGINE_SETTINGS.items():
        if declared["stands_for"] is not None:
            assert getattr(Options(), name) == declared["stands_for"]
        if declared["choices"]:
            assert {*declared["choices"]} == {*WORDS[name]} - {None}
    own = {"gradient_as_bucket_view", "settings"}  # of torch's engines, and of others
    assert {*ENGINE_SETTINGS} >= {"unit", "bucket_mb"} and not own & {*ENGINE_SETTINGS}
