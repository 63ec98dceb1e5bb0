"""Words that others register, and what a stranger may do wrong with them; docs/extending.md adds one of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore

from tests.composing import compose_once, composed
from tests.optimizers_for_tests import KeepsElsewhere
from zeroexp import __main__ as zeroexp
from zeroexp.check import check
from zeroexp.check.sweep_points import point_of
from zeroexp.check.try_points import try_points
from zeroexp.check.try_strategy import check_custom_layout_and_optimizer
from zeroexp.cluster.code_snapshot import snapshot_code
from zeroexp.cluster.sweep import Sweep
from zeroexp.config import plugins
from zeroexp.config.engines import ENGINES, Engine
from zeroexp.config.keys import Config, ConfigError, UndefinedCombination, save
from zeroexp.config.optimizer import OPTIMIZERS, OptimizerKind
from zeroexp.cut.layout import LAYOUTS, Layout, by_buffer
from zeroexp.cut.owners import OWNERS
from zeroexp.cut.stage import STAGES, Placement, Stage
from zeroexp.engines.build import with_members
from zeroexp.models.loss import loss_sum
from zeroexp.plan.form_of_config import build_on_meta, form_of
from zeroexp.registry import RegistryError
from zeroexp.run import rank
from zeroexp.tracking.files import read_json, write_json

R, PARTIAL, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD
PLUGIN = """
from zeroexp.config.optimizer import OPTIMIZERS, OptimizerKind
from zeroexp.cut.stage import STAGES, Placement, Stage

S = Placement.SHARD
STAGES.add("late_of_test", Stage(S, Placement.PARTIAL, S))
def make(groups, config):
    import torch
    return torch.optim.SGD(groups, lr=config.lr)

kind = OptimizerKind(make, num_moments=lambda config: 3, settings={"rho": 0.5})
OPTIMIZERS.add("optimizer_of_test", kind)
"""
WORDS = ["plugins=plugin_of_test", "model=tiny", "data=synthetic", "tracking=files"]


@pytest.fixture(autouse=True)
def put_back(monkeypatch, tmp_path) -> Iterator[None]:
    """What a test registers or imports is forgotten; it stands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for each in (one for group in plugins.REGISTRIES.values() for one in group):
        for name in set(each._values).difference(each.own):
            each.remove(name)
    for group, options in ConfigStore.instance().repo.items():
        if group in plugins.AS_OPTION:
            options.clear()
    for name in set(sys.modules) - modules:
        if name.startswith("plugin_"):
            del sys.modules[name]


def say(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["zeroexp", *words])
    return zeroexp.main()


# ---- a word has one meaning


def test_a_word_taken_is_refused_and_both_are_named():
    with pytest.raises(RegistryError, match=r"=buffer: registered by zeroexp itself and by module"):
        LAYOUTS.add("buffer", Layout(by_buffer))
    OWNERS.add("mine", by_buffer)
    assert OWNERS.add("mine", by_buffer) is by_buffer, "the same object again changes nothing"
    with pytest.raises(RegistryError, match=rf"by module {__name__} and by module {__name__}; ren"):
        OWNERS.add("mine", print)


def test_layouts_and_engines_share_one_key():
    with pytest.raises(RegistryError, match=r"implementation=torch: registered by zeroexp"):
        LAYOUTS.add("torch", Layout(by_buffer))


@pytest.mark.parametrize("word", ["my-layout", "1st", "", "a b"])
def test_a_word_can_be_typed(word):
    with pytest.raises(RegistryError, match="use letters, digits and _"):
        LAYOUTS.add(word, Layout(by_buffer))


@pytest.mark.parametrize(
    ("one", "value", "needs"),
    [
        (LAYOUTS, by_buffer, "function under this word; use a Layout"),
        (OPTIMIZERS, OptimizerKind, "type under this word; use an OptimizerKind"),
        (STAGES, Stage(R, PARTIAL, R), "a Stage whose optimizer rests sharded"),
        (STAGES, Stage(R, S, R), "a Stage whose optimizer rests sharded"),
        (STAGES, Stage(PARTIAL, S, S), "whose parameters are not partial"),
        (OWNERS, "greedy", "use a function"),
        (OWNERS, lambda specs: {}, "can not be called with 2 arguments"),
        (LAYOUTS, Layout(lambda unit: ()), "gives cut=<lambda>.*with 2 arguments"),
        (OPTIMIZERS, OptimizerKind(print, num_moments=1), "num_moments=1: no function; give one"),
    ],
)
def test_a_value_of_another_kind_is_refused(one, value, needs):
    with pytest.raises(RegistryError, match=needs):
        one.add("mine", value)
    assert "mine" not in one


# ---- modules of plugins=


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (None, "plugins=plugin_gone", "no module plugin_gone is installed or in "),
        (None, "plugins=plugin_of_test.py", "no name of a module; write mine for mine.py, pack"),
        (None, "plugins=a/b", "package.mine for mine.py in the folder package"),
        ("1 / 0", "plugins=plugin_of_test", "(ZeroDivisionError: division by zero, at plugin_of_"),
        ("import plugin_lib", "plugins=[plugin_of_test]", "No module named 'plugin_lib'"),
        ("raise SystemExit(3)", "plugins=plugin_of_test", "can not be imported (SystemExit: 3"),
        ("x = (", "plugins=plugin_of_test", "SyntaxError"),
        (
            "from zeroexp.cut.layout import *\nLAYOUTS.add('tensor', Layout(by_buffer))",
            "plugins=plugin_of_test",
            "registered by zeroexp itself and by module plugin_of_test; rename one of them",
        ),
    ],
)
def test_a_plugin_that_fails_is_one_line(text, words, told, tmp_path, monkeypatch, capsys):
    if text is not None:
        (tmp_path / "plugin_of_test.py").write_text(text)
    assert say(monkeypatch, words, "model=tiny") == zeroexp.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zeroexp: plugins=[") and told in line
    assert not (tmp_path / "outputs").exists()


def points(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Config]:
    """The configs of the points that a command line would run."""
    found: list[Config] = []
    compose_once(monkeypatch)
    monkeypatch.setattr(Sweep, "_execute", lambda self, jobs: found.extend(j.config for j in jobs))
    monkeypatch.setattr(Sweep, "conclude", lambda self: 0)
    assert say(monkeypatch, *WORDS, *words) == 0
    return found


def test_words_of_a_plugin_are_options_and_have_settings(tmp_path, monkeypatch, capsys):
    (tmp_path / "plugin_of_test.py").write_text(PLUGIN)
    words = ["strategy=late_of_test,zero3", "optimizer=optimizer_of_test"]
    late, zero3 = points(monkeypatch, *words, "optimizer.settings.rho=0.7", "world_size=1")
    assert late.plugins == ["plugin_of_test"] and zero3.strategy.name == "zero3"
    rows = (late.strategy.parameters, late.strategy.gradients, late.strategy.optimizer)
    assert [row.placement for row in rows] == ["shard", "partial", "shard"]
    assert late.strategy.reduce_each == "step" and late.optimizer.settings == {"rho": 0.7}
    assert form_of(late, build_on_meta(late), "direct").optimizer.num_moments == 3
    for wrong, told in {
        "++optimizer.settings.rhoo=1": "has no such setting; did you mean rho? use one of rho",
        "optimizer.betas=[0.1,0.2]": "optimizer.betas=[0.1, 0.2]: no effect, optimizer.name=opt",
        "strategy=late_of_tes": "did you mean late_of_test?",
        "+model.settings.x=1": "model.family=llama has no such setting; leave it out",
    }.items():
        assert say(monkeypatch, *WORDS, *words[1:], wrong) == zeroexp.REFUSED
        assert told in capsys.readouterr().err
    assert say(monkeypatch, "--help", "strategy", "optimizer.name", "plugins=plugin_of_test") == 0
    told = capsys.readouterr().out
    assert "late_of_test         added by a plugin" in told
    assert "one of adamw, sgd, muon, optimizer_of_test" in told
    assert say(monkeypatch, "--help", "optimizer.settings.rho", "plugins=plugin_of_test") == 0
    told = capsys.readouterr().out
    assert told.splitlines()[1:] == [
        "  a setting of optimizer.name=optimizer_of_test; default: 0.5"
    ]


def test_a_word_of_ours_is_an_option_without_a_yaml(tmp_path, monkeypatch, capsys):
    (tmp_path / "plugin_of_test.py").write_text(PLUGIN)
    plugins.load(["plugin_of_test"], tmp_path)
    words = ["strategy=late_of_test", "optimizer=optimizer_of_test", "world_size=1"]
    with monkeypatch.context() as as_ours:
        as_ours.setattr(STAGES, "own", tuple(STAGES))
        as_ours.setattr(OPTIMIZERS, "own", tuple(OPTIMIZERS))
        (point,) = points(as_ours, *words)
        assert point.strategy.gradients.placement == "partial"
        assert point.optimizer.name == "optimizer_of_test" and point.optimizer.lr == 1e-3
        assert say(as_ours, "--help", "optimizer") == 0
    assert "optimizer_of_test    its own defaults" in capsys.readouterr().out


def test_a_yaml_file_of_ones_own_changes_settings_without_a_warning(tmp_path, monkeypatch):
    """Here a warning would be an error."""
    (tmp_path / "plugin_of_test.py").write_text(PLUGIN)
    (tmp_path / "conf2/optimizer").mkdir(parents=True)
    (tmp_path / "conf2/optimizer/optimizer_of_test.yaml").write_text("settings: {rho: 0.25}\n")
    words = ["optimizer=optimizer_of_test", "world_size=1"]
    (point,) = points(monkeypatch, "--config-dir", str(tmp_path / "conf2"), *words)
    assert point.optimizer.settings == {"rho": 0.25}


def test_a_rank_finds_data_and_plugins_where_the_command_was_given(tmp_path, monkeypatch):
    given, run = tmp_path / "given", tmp_path / "run"
    given.mkdir(), run.mkdir()
    monkeypatch.chdir(tmp_path)
    (given / "plugin_of_test.py").write_text(PLUGIN)
    save(replace(Config(), plugins=["plugin_of_test"]), run / "config.yaml")
    with pytest.raises(ConfigError, match="no module plugin_of_test"):
        rank._config(run)
    write_json(run / "environment.json", {"folder": str(given)})
    rank._config(run)
    assert "late_of_test" in STAGES
    assert Path.cwd() == given


def test_jobs_get_the_plugin_that_was_submitted(tmp_path, monkeypatch):
    plugin = tmp_path / "plugin_of_test.py"
    plugin.write_text(PLUGIN)
    (tmp_path / "plugin_folder").mkdir()
    (tmp_path / "plugin_folder/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["plugin_of_test", "plugin_folder.inner", "pytest"]  # what is installed is not copied
    code = snapshot_code(tmp_path / "sweep", names)
    assert {path.name for path in code.iterdir()} == {
        *("zeroexp", "plugin_of_test.py", "plugin_folder")
    }
    assert snapshot_code(tmp_path / "sweep", names) == code
    plugin.write_text(f"{PLUGIN}# edited\n")
    assert snapshot_code(tmp_path / "sweep", names) != code
    assert "edited" not in (code / "plugin_of_test.py").read_text()


def test_plugins_are_named_once(monkeypatch, capsys):
    """Hydra takes the last of two words for a key, so that ranks would miss what the first had registered."""
    assert say(monkeypatch, "plugins=a", "plugins=[b,c]") == zeroexp.REFUSED
    assert "said twice, and Hydra takes the last; use plugins=a,b,c" in capsys.readouterr().err


def test_a_setting_that_one_of_two_words_has_skips_the_other(tmp_path, monkeypatch, capsys):
    (tmp_path / "plugin_of_test.py").write_text(PLUGIN)
    words = ["optimizer=optimizer_of_test,adamw", "world_size=1"]
    assert say(monkeypatch, *WORDS, *words, "optimizer.settings.rho=0.7") == zeroexp.REFUSED
    assert "not there so far; use ++optimizer.settings.rho=0.7" in capsys.readouterr().err
    found = points(monkeypatch, *words, "++optimizer.settings.rho=0.7")
    assert [config.optimizer.name for config in found] == ["optimizer_of_test", "adamw"]
    reasons = [
        str(job["reason"]) for job in map(read_json, sorted(Path().glob("*/*/*/state.json"))) if job
    ]
    assert sum("optimizer.name=adamw has no such setting" in reason for reason in reasons) == 1


# ---- what code of others returns is tried before a rank starts

# Module, with CODE in it, and the settings that use it.
CODE_OF_OTHERS = {
    "layout": (
        """
from zeroexp.cut.layout import LAYOUTS, Layout, by_tensor
from dataclasses import replace

def cut(unit, size):
    chunks = by_tensor(unit, size)
    return CODE

LAYOUTS.add("layout_of_test", Layout(cut))
""",
        {"strategy": {"implementation": "layout_of_test"}},
    ),
    "owners": (
        """
from zeroexp.cut.owners import OWNERS
OWNERS.add("owners_of_test", lambda specs, size: CODE)
""",
        {"strategy": {"implementation": "parameter", "owners": "owners_of_test"}},
    ),
    "optimizer": (
        """
import torch
from zeroexp.config.optimizer import OPTIMIZERS, OptimizerKind

class Closing(torch.optim.SGD):
    def step(self, closure):
        closure()

OPTIMIZERS.add("optimizer_of_test", OptimizerKind(CODE, num_moments=lambda config: 1))
""",
        {"optimizer": {"name": "optimizer_of_test"}},
    ),
    "data": (
        """
import numpy as np, torch
from zeroexp.data import Microbatch
from zeroexp.config.data_kinds import DATA, DataKind

class Source:
    vocab_size, source = 50, "a test"

    def __init__(self, config, model, seed):
        pass

    def __len__(self):
        return 9

    def read(self, indices):
        rows = torch.from_numpy(np.stack([np.arange(9) + i for i in indices]))
        return Microbatch({"input_ids": rows[:, :-1]}, rows[:, 1:])

    def count_labels_and_tokens(self, indices):
        return 8 * len(indices), 8 * len(indices)

    CODE

DATA.add("data_of_test", DataKind(Source))
""",
        {"data": {"kind": "data_of_test"}},
    ),
    "model": (
        """
from torch import nn
from zeroexp.config.families import MODELS, ModelFamily

class Answering(nn.Module):
    def __init__(self, answer, words=64):
        super().__init__()
        self.blocks, self.answer = nn.ModuleList(nn.Linear(words, words) for _ in "ab"), answer
        self.embed = nn.Embedding(words, words)

    def forward(self, input_ids):
        return self.answer(self.blocks[0](self.embed(input_ids)))

def build(config, words):
    CODE

MODELS.add("model_of_test", ModelFamily(build))
""",
        {"model": {"family": "model_of_test"}, "data": {"vocab_size": 64}},
    ),
}


@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        ("layout", "chunks[1:]", "implementation=layout_of_test: loses model.embed_tokens.weight;"),
        ("layout", "(*chunks, chunks[0])", "holds model.embed_tokens.weight twice, or in a unit"),
        ("layout", "None", "cuts a unit into None; return a tuple of Chunk"),
        ("layout", "[replace(c, kind='') for c in chunks]", "(trainable) into a chunk of kind ''"),
        ("layout", "[replace(c, cuts=c.cuts[1:]) for c in chunks]", "3 whole numbers that rise"),
        (
            "layout",
            "[replace(c, cuts=(0, 1, 2)) for c in chunks]",
            "elements for 2 ranks at (0, 1,",
        ),
        ("layout", "unit[0]['x']", "module plugin_of_test: raised TypeError: 'ParameterSpec' obj"),
        ("owners", "{}", "gives model.embed_tokens.weight to rank None; use 0 to 1, for each"),
        ("owners", "{s.name: 2 for s in specs}", "to rank 2; use 0 to 1, for each parameter"),
        ("owners", "[]", "strategy.owners=owners_of_test: returns a list; return a dict"),
        ("optimizer", "lambda groups, c: None", "its make returns a NoneType; return an optimizer"),
        ("optimizer", "lambda groups, c: Closing(groups)", "wants a closure in step(), and no"),
        (
            "optimizer",
            "lambda groups, c: torch.optim.Adafactor(groups)",
            "use the layout parameter",
        ),
        (
            "optimizer",
            "lambda groups, c: c.x",
            "module plugin_of_test: raised AttributeError: 'Opt",
        ),
        ("data", "def __len__(self): return 0", "data.kind=data_of_test: has no samples; give it"),
        ("data", "read = None", "opens a Source without read; return Samples of zeroexp/data/"),
        ("data", "vocab_size = 5", "reads tokens 0 to 8; vocab_size=5 allows 0 to 4"),
        (
            "data",
            "def count_labels_and_tokens(self, i): return 7 * len(i), 8",
            "counts 14 labels in samples that h",
        ),
        ("data", "def read(self, i): return 3", "reads a int; return Microbatch(inputs, labels)"),
        ("data", "def read(self, i): return {}[3]", "module plugin_of_test: raised KeyError: 3 at"),
        ("model", "return nn.Linear(2, 2)", "the model has no block; use one layer or more"),
        ("model", "return Answering(lambda x: (None, x))", "returns a tuple; return a tensor, or"),
        ("model", "return Answering(lambda x: x[:, 1:])", "returns shape [1, 7, 64] for labels of"),
        ("model", "return Answering(lambda x: x[:, :8])", None),  # it crops what is longer
        ("model", "return Answering(lambda x: x if x.sum() else x)", None),  # it reads values
    ],
)
def test_what_others_return_is_tried_before_a_rank_starts(what, code, told, tmp_path):
    text, changes = CODE_OF_OTHERS[what]
    (tmp_path / "plugin_of_test.py").write_text(text.replace("CODE", code))
    plugins.load(["plugin_of_test"])
    config = composed("model=tiny", "data=synthetic", "tracking=files", "data.seq_len=8")
    for group, values in changes.items():
        config = replace(config, **{group: replace(getattr(config, group), **values)})
    try:
        (problem,) = try_points([config])
    except ConfigError as error:
        problem = str(error)
    except Exception as error:
        problem = plugins.blame_plugin(error)
    assert problem is told is None or told in problem


def test_data_that_reads_files_and_ships_none_needs_a_path(tmp_path):
    text = (
        CODE_OF_OTHERS["data"][0]
        .replace("CODE", "pass")
        .replace("(Source)", "(Source, suffixes=('.py',))")
    )
    (tmp_path / "plugin_of_test.py").write_text(text)
    plugins.load(["plugin_of_test"])
    config = composed("model=tiny", "data=synthetic", "tracking=files", "data.seq_len=8")
    with pytest.raises(ConfigError, match=r"data.path=null: names nothing to read; name a file or"):
        check(replace(config, data=replace(config.data, kind="data_of_test")))


def test_a_line_that_tries_code_of_others_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    text, _ = CODE_OF_OTHERS["model"]
    (tmp_path / "plugin_of_test.py").write_text(text.replace("CODE", "return open('gone')"))
    compose_once(monkeypatch)
    words = ["model=model_of_test", "data.vocab_size=64"]
    assert say(monkeypatch, *(w for w in WORDS if w != "model=tiny"), *words) == zeroexp.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zeroexp: ") and "module plugin_of_test: raised FileNotFoundErr" in line
    assert not list(tmp_path.glob("**/state.json"))


def test_an_engine_without_a_member_is_one_line():
    with pytest.raises(ConfigError, match="returns a NoneType without model, optimizer, microbat"):
        with_members("mine", None)


@pytest.mark.parametrize(
    ("output", "task", "told"),
    [
        ((torch.zeros(2, 3, 5),), "causal", "=causal: the model returns a tuple; return a tensor"),
        (torch.zeros(2, 2, 5), "causal", r"shape \[2, 2, 5\] for labels of shape \[2, 3\]"),
        (torch.zeros(2, 3, 1), "regression", r"=regression: the .*; return a value for each label"),
    ],
)
def test_a_model_answers_with_a_value_for_each_label(output, task, told):
    with pytest.raises(ConfigError, match=told):
        loss_sum(output, torch.zeros(2, 3, dtype=torch.int64), task)


# ---- engines of others


def test_an_engine_of_others_is_checked_like_ours():
    words = ["model=tiny", "data=synthetic", "strategy=ddp", "world_size=1"]
    refused = {"seq_len": 64}
    engine = Engine(
        print,
        stages=("ddp",),
        keys=("overlap",),
        refuse=lambda config: "no length of 64" if config.data.seq_len == 64 else None,
    )
    ENGINES.add("engine_of_test", engine)
    base = composed(*words)
    mine = replace(base, strategy=replace(base.strategy, implementation="engine_of_test"))
    check(mine)
    check(replace(mine, strategy=replace(mine.strategy, overlap=True)))
    wrong = {
        "no length of 64": replace(mine, data=replace(mine.data, **refused)),
        "engine_of_test has no such stage; use one of ddp": replace(
            mine,
            strategy=replace(composed("strategy=zero3").strategy, implementation="engine_of_test"),
        ),
        "computes in fp32 alone": replace(mine, precision=composed("precision=bf16").precision),
        "strategy.unit=block: no effect": replace(
            mine, strategy=replace(mine.strategy, unit="block")
        ),
    }
    for told, config in wrong.items():
        with pytest.raises(UndefinedCombination, match=told):
            check(config)
    with pytest.raises(UndefinedCombination, match="brings no closed form"):
        form_of(mine, build_on_meta(mine), "gloo")


def test_settings_are_those_of_the_word():
    values = asdict(composed("model=tiny", "world_size=1"))
    values["optimizer"]["settings"] = {"rho": 1}
    # It is skipped: another point may have an optimizer that knows it.
    point = point_of([], values)
    assert point is not None and str(point.refusal).startswith(
        "optimizer.settings.rho=1: optimizer.name=adamw has no"
    )


def test_a_number_of_moments_is_a_number(monkeypatch):
    kind = OptimizerKind(lambda groups, config: torch.optim.SGD(groups), num_moments=repr)
    OPTIMIZERS.add("optimizer_of_test", kind)
    mine = composed("model=tiny", "world_size=1")
    mine = replace(mine, optimizer=replace(mine.optimizer, name="optimizer_of_test"))
    with pytest.raises(
        ConfigError, match=r"num_moments returns \"OptimizerConfig.*; return how many"
    ):
        check_custom_layout_and_optimizer(mine)


def test_an_optimizer_whose_state_no_checkpoint_carries_is_refused_where_one_is_to_be_written():
    """Else the run would fail at its first save, after all steps till there."""
    kind = OptimizerKind(lambda groups, _: KeepsElsewhere(groups), num_moments=lambda _: 0)
    OPTIMIZERS.add("elsewhere_of_test", kind)
    for every, says in (("null", nullcontext()), ("2", pytest.raises(ConfigError, match="carry"))):
        mine = composed("model=tiny", "world_size=1", f"checkpoint.every={every}")
        mine = replace(mine, optimizer=replace(mine.optimizer, name="elsewhere_of_test"))
        with says:
            check_custom_layout_and_optimizer(mine)


def test_fsdp2_is_skipped_for_an_optimizer_with_states_of_whole_matrices():
    kind = OptimizerKind(
        lambda groups, config: torch.optim.Adafactor(groups), num_moments=lambda _: 0
    )
    OPTIMIZERS.add("factors_of_test", kind)
    words = ("model=tiny", "world_size=2", "strategy=zero3", "strategy.implementation=torch")
    mine = composed(*words)
    mine = replace(mine, optimizer=replace(mine.optimizer, name="factors_of_test"))
    with pytest.raises(UndefinedCombination, match=r"factors_of_test.*FSDP2 cuts their rows"):
        check_custom_layout_and_optimizer(mine)
