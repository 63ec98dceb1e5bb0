"""Every key of an experiment, as dataclasses, and how they become a run's config.yaml.

Hydra composes YAML into these schemas, so typos and wrong types fail at composition. `zeroexp.check` refuses
combinations without a meaning before any rank starts. Keys that only some implementations have default to None, which
means the implementation's own default; `resolve` writes that default into the run's config. This file imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from zeroexp.config.gpus import GPUS, NETWORKS
from zeroexp.cut.chunk import HOST_PARTS
from zeroexp.cut.codec_bytes import CODE_BITS
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.matrix_step import MATRIX_STEPS
from zeroexp.cut.moment_blocks import MOST_DECAY
from zeroexp.cut.rank_grid import RankGrid
from zeroexp.cut.stage import Placement, default_reduce_each
from zeroexp.registry.did_you_mean import suggest_nearest
from zeroexp.registry.errors import ConfigError, DamagedFile
from zeroexp.registry.errors import UndefinedCombination as UndefinedCombination

Schema = TypeVar("Schema")

# No experiment needs more, and beyond these the system, torch or a person's patience gives up.
MANY, MOST_STEPS, MOST_NUMEL, YEAR_S = 10**6, 10**9, 1 << 31, 366 * 24 * 60 * 60
DTYPES = ("float32", "bfloat16")
MASTER = "master"  # a dtype of parameters at rest: that of the masters
TASKS = ("causal", "classification", "regression")
# Names of folders and of objects in MLflow: without a path separator.
NAME = r"\w[\w .+-]{0,99}", "no name", "use letters, digits, spaces and . _ + -, at most 100 in all"
LONGEST_NAME_BYTES = 200  # of a folder; file systems allow 255, and a number may follow
# Slurm would refuse other names after the submission, or read another word.
OF_SLURM = r"\w[\w.,+@:-]{0,199}", "no name that Slurm could have", "use the site's, or null"
FEATURES = r"[\w(\[][\w.,+@:*&|()\[\]!-]{0,199}", *OF_SLURM[1:]  # man sbatch, --constraint
# man tc, RATES
SPEED = r"[1-9]\d{0,4}mbit|[1-9]\d{0,2}gbit", "no speed", "use 1mbit to 999gbit, or null"
OUTPUTS = "use outputs=outputs, or use outputs=$HOME/... without quotes"
COMMAND = r"(?s).*\S.*", "no command", "name one, or leave it null"
FOLDER = r"(?!~)[^$]+", "empty, or with a ~ or $ that no shell has replaced", OUTPUTS
TORCH_DDP = ("ddp", "zero1")  # torch builds these on DistributedDataParallel, all others on FSDP2


def choice(*choices: str) -> Any:
    """Declare a key that is one of these, the first unless set."""
    return field(default=choices[0], metadata={"choices": choices})


def choice_or_null(*choices: str) -> Any:
    """Declare a key that is null, unless it is set to one of these."""
    return field(default=None, metadata={"choices": choices})


def number(
    default: Any, *, least: float | None = None, above: float | None = None, most: Any = None
) -> Any:
    """Declare a number with its bounds: the least and the most it may be, or what it has to exceed."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


def text(default: str | None, like: tuple[str, str, str]) -> Any:
    """Declare a text: the pattern that all of it matches, what is wrong with any other, and what to do."""
    return field(default=default, metadata={"like": like})


def of_engine(stands_for: Any = None, *choices: str, **bounds: float) -> Any:
    """Declare a setting of our engine, which is null unless set: what null stands for, and what it may be."""
    return field(default=None, metadata={"stands_for": stands_for, "choices": choices, **bounds})


@dataclass
class StatePlacement:
    """Where one kind of state rests between uses, and its dtype."""

    # where the state rests between uses
    placement: str = choice(*(placement.value for placement in Placement))
    dtype: str = choice(*DTYPES, "float16")  # of the state at rest


@dataclass
class ParametersPlacement(StatePlacement):
    # dtype at rest; master: as the masters, cast when they are gathered (zero3). int8, float8, int4: as codes, which
    # also travel, beside masters (zero3), see docs/codecs.md
    dtype: str = choice(*DTYPES, "float16", MASTER, *CODE_BITS)


@dataclass
class OptimizerPlacement(StatePlacement):
    # ranks that share the state: those of a group, of strategy.replicas; or all, each group's piece cut again by groups
    over: str = choice("group", "all")


@dataclass
class LoraKeys:
    """Keys of peft's LoraConfig, by its names; None = peft's default. Without `r` there are no adapters."""

    # rows of A and columns of B, which are trained
    r: int | None = number(None, least=1, most=1 << 20)
    lora_alpha: float | None = number(None, above=0)  # an adapter's output counts alpha / r
    use_rslora: bool = False  # an adapter's output counts alpha over the root of r instead
    # names of layers that get adapters; [all-linear] = all but the head
    target_modules: list[str] | None = None
    layers_to_transform: list[int] | None = None  # numbers of blocks that get adapters; None = all
    # modules that are trained as they are; None = a classifier's head
    modules_to_save: list[str] | None = None
    # dtype in which the weights around which adapters lie rest and travel; ours, not peft's
    quantize: str | None = choice_or_null("int8")


@dataclass
class ModelConfig:
    name: str = text("small", NAME)  # how tables name it
    family: str = "llama"  # a word of MODELS (config/families.py)
    task: str = choice(*TASKS)  # what the model is trained for
    num_labels: int | None = number(None, least=1, most=1 << 20)  # classes of a classifier's head
    hf_config: dict[str, Any] = field(default_factory=dict[str, Any])  # keys of transformers' class
    mlp: dict[str, Any] = field(default_factory=dict[str, Any])  # width, depth
    moe: dict[str, Any] = field(default_factory=dict[str, Any])  # fields of models.moe.MoeShape
    weights: str | None = None  # a local folder or a hub id; None = random from train.seed
    freeze: list[str] = field(default_factory=list[str])  # patterns of parameters not to train
    lora: LoraKeys = field(default_factory=LoraKeys)

    # Family hf, any model of transformers; see docs/models.md.

    path: str | None = None  # a local folder or a hub id: its config, and its weights
    # the weights of model.path, or random ones from train.seed; None = weights
    init: str | None = choice_or_null("weights", "random")
    blocks: list[str] | None = None  # lists of modules, or modules, that move together; None: found
    published: dict[str, Any] = field(default_factory=dict[str, Any])  # config.json of `path`
    settings: dict[str, Any] = field(default_factory=dict[str, Any])  # keys of a plugin's family


@dataclass
class DataConfig:
    name: str = text("offline", NAME)  # how tables name it
    kind: str = "text"  # a word of DATA (config/data_kinds.py)
    task: str = choice(*TASKS)  # what the samples train
    seq_len: int = number(128, least=1, most=1 << 24)  # tokens per sample
    # samples per optimizer step over all ranks
    global_batch_size: int = number(12, least=1, most=MOST_NUMEL)
    micro_batch_size: int = number(1, least=1, most=1 << 24)  # samples per rank and forward pass
    path: str | None = None  # a local file or folder; hf: also the id of a data set on the hub
    # synthetic: the number of tokens, None = the model's; text: 2048 = the shipped tokenizer, None = that of
    # model.weights, else the shipped one
    vocab_size: int | None = number(None, least=1, most=MOST_NUMEL)

    # Kind hf, see docs/data.md.

    subset: str | None = None  # the part of a hub's data set that has several (its "configuration")
    split: str | None = None  # what is trained on; None = train
    text_column: str | None = None  # the column that is read; None = text
    label_column: str | None = None  # the column of classes; None = label
    labels: list[Any] | None = None  # the label column's values in the order of the classes
    # how many rows to read, from the first on; None = all
    limit: int | None = number(None, least=1, most=MOST_NUMEL)
    validation_split: str | None = None  # what is validated on instead of held-out training samples
    # how many samples are held out, or taken of validation_split; None = none, or all of it
    validation_samples: int | None = number(None, least=1)
    settings: dict[str, Any] = field(default_factory=dict[str, Any])  # keys of a plugin's data


@dataclass
class OuterKeys:
    """Seldom synchronised replicas (DiLoCo, local SGD; zeroexp/zero/outer.py); see docs/codecs.md."""

    # steps that each replica takes by itself between two outer steps; None: every step sums over all
    every: int | None = number(None, least=1, most=MOST_STEPS)
    # learning rate of the outer SGD; 1 with momentum 0 averages the weights
    lr: float = number(0.7, above=0)
    momentum: float = number(0.9, least=0, most=1)  # Nesterov momentum of the outer SGD


@dataclass
class StrategyConfig:
    name: str = text("zero3", NAME)  # a word of STAGES (cut/stage.py)
    parameters: ParametersPlacement = field(default_factory=ParametersPlacement)
    gradients: StatePlacement = field(default_factory=StatePlacement)
    optimizer: OptimizerPlacement = field(default_factory=OptimizerPlacement)
    # a word of LAYOUTS (cut/layout.py), which our engine cuts by, or of ENGINES (config/engines.py)
    implementation: str = "buffer"

    # Our engine; None = its default.

    # what moves together; layer: each block, and outside of blocks each module that holds parameters, as the head
    unit: str | None = of_engine("block", "model", "block", "layer", "module")
    overlap: bool | None = of_engine(True)  # communication beside compute, or strictly after it
    # who owns which parameter: a word of OWNERS (cut/owners.py)
    owners: str | None = of_engine("greedy")
    # units gathered ahead (zero3); None: 1, in shared memory 0
    prefetch: int | None = of_engine(least=0, most=1024)
    # units left gathered until their backward (zero3)
    keep: str | None = of_engine("last", "none", "last", "all")
    # when accumulated gradients are reduced; None: as the stage says
    reduce_each: str | None = of_engine(None, "microbatch", "step")
    # until when updated parameters arrive that rest whole: the end of the step, or their use in the next forward
    publish: str | None = of_engine("step", "step", "forward")
    # the most MiB of one reduction; None: the transport's best
    bucket_mb: float | None = of_engine(least=0.001, most=1 << 20)
    # groups of neighbouring ranks that hold all states each, sharded inside of the group; None: 1
    replicas: int | None = of_engine(least=1, most=1 << 20)
    outer: OuterKeys = field(default_factory=OuterKeys)
    # how parameters travel rounded in fewer bytes (zero3); None: exact. See docs/codecs.md.
    gather_codec: str | None = of_engine(None, *CODE_BITS)
    # how gradients travel rounded in fewer bytes; None: exact. See docs/codecs.md.
    reduce_codec: str | None = of_engine(None, *CODE_BITS)
    # whether what reduce_codec leaves out of a gradient is added to the next one
    error_feedback: bool | None = of_engine(False)
    # ranks of a node, inside of which all gathers but a step's first of each unit stay (zero3; ZeRO++: hpZ)
    secondary_partition: int | None = of_engine(least=2, most=1 << 20)
    # how an optimizer of whole matrices steps those that are cut: each rank that has a piece gets the whole, or one
    matrix_step: str | None = of_engine("alltoall", *MATRIX_STEPS)
    # what rests on the host, and is updated there; None: nothing. See docs/offload.md.
    offload: str | None = of_engine(None, *HOST_PARTS)
    # share of it that does, as whole chunks; None: all of it
    offload_fraction: float | None = of_engine(1.0, above=0, most=1)
    # folder of a disk: all that rests on the host lies in a file there for each rank, mapped into its memory
    offload_folder: str | None = of_engine()
    # torch's DistributedDataParallel (ddp, zero1): gradients lie in its buckets; None: true
    gradient_as_bucket_view: bool | None = None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])  # keys of a plugin's engine

    @property
    def rows(self) -> tuple[StatePlacement, ...]:
        return self.parameters, self.gradients, self.optimizer

    @property
    def optimizer_over(self) -> str:
        return self.optimizer.over

    @property
    def codes(self) -> str | None:
        """The codec in whose codes parameters rest; None: they rest in a dtype of torch."""
        return self.parameters.dtype if self.parameters.dtype in CODE_BITS else None

    @property
    def masters_rest(self) -> bool:
        """Whether no parameters in the dtype of compute rest, but masters, or codes beside them."""
        return self.parameters.dtype in (MASTER, *CODE_BITS)


# What `of_engine` has declared, by name. Options of zeroexp/zero has the same choices and defaults.
ENGINE_SETTINGS = {
    item.name: item.metadata for item in fields(StrategyConfig) if "stands_for" in item.metadata
}


@dataclass
class PrecisionConfig:
    name: str = text("fp32", NAME)  # fp32 | bf16 | bf16_master | fp16_master | paper16 | autocast
    compute: str = choice(*DTYPES, "float16")  # dtype of parameters and activations
    reduce: str = choice(*DTYPES)  # dtype of gradients on the wire and of the reduced gradient
    master: str = choice(*DTYPES)  # dtype of the weights the optimizer updates
    autocast: bool = False  # fp32 parameters, bf16 operations (torch engines only)


@dataclass
class OptimizerConfig:
    name: str = text("adamw", NAME)  # a word of OPTIMIZERS (config/optimizer.py)
    lr: float = number(1e-3, above=0)  # learning rate at its top
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decays of both moments
    eps: float = number(1e-8, above=0)  # added to the root of the second moment
    momentum: float = number(0.0, least=0, most=1)  # decay of the only moment
    # dtype in which moments rest; None: the master's. int8: those of large parameters, in blocks of 256 with a scale
    moments: str | None = choice_or_null(*MOST_DECAY)
    weight_decay: float = number(0.1, least=0)  # per unit of the learning rate
    decay_norms_and_biases: bool = False  # False: they form a second parameter group without decay
    # torch's fused update of all tensors; SGD does without under FSDP2, and where its kernel fails a trial (CPU, bf16)
    fused: bool = True
    # norm to which larger gradients are clipped; None = no clipping
    max_grad_norm: float | None = number(1.0, above=0)
    # learning rate after warm-up
    schedule: str = choice("constant", "cosine", "linear")
    # steps of linear learning-rate warm-up
    warmup_steps: int = number(0, least=0, most=MOST_STEPS)
    min_lr_ratio: float = number(0.1, least=0, most=1)  # learning rate at the end over its top
    settings: dict[str, Any] = field(default_factory=dict[str, Any])  # keys of a plugin's optimizer
    # other settings for some parameters, by kind or pattern of names, as {embeddings: {lr: 1e-4}}; see docs/models.md
    kinds: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class TrainConfig:
    seed: int = number(0, least=0, most=2**32 - 1)  # of weights, of the order of samples
    # steps not counted in time; where there are two or more, memory is read in the last of them
    warmup_steps: int = number(3, least=0, most=MOST_STEPS)
    steps: int = number(20, least=1, most=MOST_STEPS)  # measured steps
    # steps between two validations; None = only at the end
    validate_every: int | None = number(None, least=1)
    activation_checkpointing: bool = False  # recompute each block in backward
    # only every so-many-th block is recomputed; None = each
    recompute_every: int | None = number(None, least=1)
    # operators whose results recomputed blocks keep, as aten.mm; aten.mm:2 keeps every second
    recompute_except: list[str] = field(default_factory=list[str])
    offload_activations: bool = False  # what each block saves for backward rests on the host
    compile: bool = False  # torch.compile of each block

    # Steps that are watched count in no time. They are numbered from 0, warm-up included; see docs/measuring.md.

    # numbers of steps of which a timeline of memory and verbs is written
    trace_steps: list[int] = field(default_factory=list[int])
    # numbers of steps that torch.profiler records
    profile_steps: list[int] = field(default_factory=list[int])
    # ranks that torch.profiler watches; empty = all
    profile_ranks: list[int] = field(default_factory=list[int])


@dataclass
class CheckpointConfig:
    """Checkpoints for `resume`, saved into <run>/checkpoint while training goes on; see docs/checkpoints.md."""

    # steps between two checkpoints, and one at the end; None = none
    every: int | None = number(None, least=1, most=MOST_STEPS)
    keep: int = number(2, least=1, most=MANY)  # how many of the newest checkpoints are kept


@dataclass
class SlurmConfig:
    """Requests of a job to a site's Slurm; None leaves one to the site's default."""

    # most ranks of one point that share a node
    ranks_per_node: int = number(8, least=1, most=1024)
    cpus_per_rank: int = number(4, least=1, most=1024)  # of a node, for each rank
    # points of one sweep that may run at once
    max_running: int | None = number(None, least=1, most=MANY)
    array: bool = False  # submit the points of one shape as one job array
    partition: str | None = text(None, OF_SLURM)  # of sbatch
    account: str | None = text(None, OF_SLURM)  # of sbatch
    qos: str | None = text(None, OF_SLURM)  # of sbatch
    constraint: str | None = text(None, FEATURES)  # of sbatch: features that nodes have
    memory_gb: float | None = number(None, above=0, most=MANY)  # GiB of one node
    # times that one job may start again from its checkpoint, for any reason
    max_requeues: int = number(10, least=1, most=MANY)
    # seconds before the time limit at which ranks are told to save and stop
    save_s: int = number(120, least=1, most=YEAR_S)
    python: str | None = None  # command that starts Python on a node; None = the running Python
    setup: list[str] = field(default_factory=list[str])  # shell lines before the ranks start
    ports: str | None = None  # ports that ranks may listen on, as 60001-63000; None = any
    srun: list[str] = field(default_factory=list[str])  # further arguments of srun
    sbatch: dict[str, Any] = field(default_factory=dict[str, Any])  # further options of sbatch


@dataclass
class ClusterConfig:
    name: str = text("local", NAME)  # how tables name it
    kind: str = choice("local", "slurm")  # where ranks run: on this machine, or as jobs of Slurm
    # what ranks compute on; auto: GPUs where there is one for each rank, else CPUs
    device: str = choice("auto", "cpu", "cuda")
    threads_per_rank: int = number(1, least=1, most=1024)  # CPU threads of one rank
    # local, as root: what a node's link to the others sends, as 1gbit or 200mbit; ranks are on cluster.nodes nodes then
    link: str | None = text(None, SPEED)
    # local: nodes of this machine, each behind a cluster.link; None: 2
    nodes: int | None = number(None, least=2, most=64)
    # 1e12 operations a second that a rank can compute; None: of the GPU's data sheet, or measured
    peak_tflops: float | None = number(None, above=0)
    # kind of GPU of a plan, whose figures are in config/gpus.py; None: H100
    gpu: str | None = choice_or_null(*GPUS)
    # network of a plan, whose figures are in config/gpus.py; None: nvlink-infiniband
    network: str | None = choice_or_null(*NETWORKS)
    # GiB of one rank's device; None: those of cluster.gpu, else no plan is judged
    device_memory_gib: float | None = number(None, above=0, most=MANY)
    # GiB of device_memory_gib that no tensor gets: driver, NCCL, Python; None: nothing is set aside
    reserved_gib: float | None = number(None, above=0, most=MANY)
    force: bool = False  # slurm: submit points that can not fit device_memory_gib all the same
    # seconds for all rehearsals of a sweep, on Slurm before its points are submitted, here when a point's ranks have
    # ended; 0: nothing is rehearsed
    rehearse_s: int = number(60, least=0, most=YEAR_S)
    # seconds after which a point is stopped and recorded as timed out
    timeout_s: int = number(3600, least=1, most=YEAR_S)
    # slurm: False submits and returns; `zeroexp watch` shows the sweep later
    wait: bool = True
    # slurm: seconds of silence of a task after which it, or its node, counts as lost
    heartbeat_s: int = number(30, least=1, most=YEAR_S)
    # slurm: seconds from a job's first task to its last, and as many again for every 256 ranks: Python may load from a
    # slow shared disk
    start_s: int = number(60, least=1, most=YEAR_S)
    # seconds in which no rank has advanced in a step (before: done anything), after which the job ends; None: never
    hang_s: int | None = number(300, least=1, most=YEAR_S)
    # slurm: start again what Slurm ended; None = where checkpoint.every is set
    requeue: bool | None = None
    dry_run: bool = False  # slurm: print the sbatch files and submit nothing
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def num_nodes(self) -> int:
        """How many nodes a local run has."""
        return 1 if self.link is None else self.nodes or 2

    @property
    def max_requeues(self) -> int:
        """How often a job of Slurm may start again; 0 unless `requeue` is set."""
        return self.slurm.max_requeues if self.requeue else 0


@dataclass
class EventsConfig:
    """What becomes of a run to which something happens; see docs/slurm.md for what outlives a job of Slurm."""

    stall: str = choice("end", "retry")  # a run of which no rank advances for cluster.hang_s
    out_of_memory: str = choice("end", "retry")  # a run that lacks memory
    nan: str = choice("go_on", "end")  # a run whose loss or gradient norm is no number
    # times that a run of this machine is tried again, from its checkpoint if there is one
    retries: int = number(1, least=1, most=100)
    # a command of the shell that reads one line about each run that does not end well, as: mail -s zeroexp me@site;
    # with cluster.wait=false when watch or sync next looks
    tell: str | None = text(None, COMMAND)


@dataclass
class TrackingConfig:
    name: str = text("mlflow", NAME)  # how tables name it
    mlflow: bool = True  # whether runs are sent to MLflow too
    uri: str | None = None  # MLflow's store; None: MLFLOW_TRACKING_URI, else outputs/mlflow.db
    experiment: str = text("zeroexp", NAME)  # of MLflow
    # seconds between samples of each node's CPU, memory, network; a sample takes milliseconds
    system_s: float | None = number(None, least=0.1)


@dataclass
class StudyConfig:
    """A sweep that answers a question."""

    name: str | None = text(None, NAME)  # of the sweep's folder
    question: str | None = None  # what the sweep answers, for its page
    # rows of keys, each with the values that it takes; a point runs only if it matches one
    include: list[dict[str, list[Any]]] = field(default_factory=list[dict[str, list[Any]]])
    # relative bound on how far curves lie apart at any step
    loss_agreement: float | None = number(None, above=0)
    loss_must_fall: bool = False  # whether each curve must end below its beginning
    # whether each run is rehearsed once it has ended, and must hold, send and launch what was planned
    plan_must_hold: bool = False
    # keys and groups of the config, or machine | versions | git | engine | transport | load; if one differs between
    # points, the study fails
    must_equal: list[str] = field(default_factory=list[str])


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    world_size: int = number(2, least=1, most=1 << 24)  # number of ranks
    # runs of every point, in rounds: each point once, then each again
    repeats: int = number(1, least=1, most=100)
    resume: str | None = None  # latest, a run's folder, or one of its checkpoint/step-* folders
    outputs: str = text("outputs", FOLDER)  # root folder of all runs
    # modules with code of your own, imported in the command and in every rank; see docs/extending.md
    plugins: list[str] = field(default_factory=list[str])

    @property
    def grid(self) -> RankGrid:
        """Which ranks shard among themselves."""
        return RankGrid(self.world_size, self.strategy.replicas or 1)


def fields_of(schema: Any = Config, parent: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield every dotted key with its field, a group before its keys."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        yield parent + item.name, item
        if is_dataclass(hints[item.name]):
            yield from fields_of(hints[item.name], f"{parent}{item.name}.")


# Every key that holds a value; its field's metadata are what `choice`, `number`, `text` and `of_engine` declare.
KEYS = {key: item for key, item in fields_of() if not is_dataclass(item.default_factory)}


def default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def resolve(config: Config) -> Config:
    """Return a copy in which every open setting that has an effect holds its default."""
    config = deepcopy(config)
    cluster = config.cluster
    if cluster.requeue is None:
        cluster.requeue = cluster.kind == "slurm" and config.checkpoint.every is not None
    strategy = config.strategy
    if strategy.implementation in LAYOUTS:
        for key, default in _engine_defaults(strategy).items():
            if getattr(strategy, key) is None:
                setattr(strategy, key, default)
    on_ddp = strategy.implementation == "torch" and strategy.name in TORCH_DDP
    if on_ddp and strategy.gradient_as_bucket_view is None:
        strategy.gradient_as_bucket_view = True
    return config


def _engine_defaults(strategy: StrategyConfig) -> dict[str, Any]:
    """Return the defaults of our engine's keys for this strategy.

    `bucket_mb` and `prefetch` stay None: the ranks take what is best for the transport they find.
    """
    has_effect = {"unit", "overlap"}
    if LAYOUTS[strategy.implementation].has_owners and strategy.optimizer.placement == "shard":
        has_effect.add("owners")
    if strategy.parameters.placement == "shard":
        has_effect.add("keep")
    defaults = {name: ENGINE_SETTINGS[name]["stands_for"] for name in has_effect}
    return {**defaults, "reduce_each": default_reduce_each(strategy.gradients.placement)}


def save(config: Config, path: Path) -> None:
    """Write the config to `path`. A concurrent reader sees either the old content or the new one."""
    import yaml

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        yaml.safe_dump(
            asdict(config), file, sort_keys=False, explicit_start=True, explicit_end=True
        )
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load(path: Path) -> Config:
    """Read the config of a run that `save` wrote. Raises ConfigError for a key that no schema has."""
    text = read_whole(path)
    try:
        values = parse(text)
    except ValueError as error:
        raise DamagedFile(path, str(error)) from error
    if not isinstance(values, dict):
        raise DamagedFile(path, "no config")
    return from_mapping(Config, cast(dict[str, Any], values))


def parse(text: str) -> Any:
    """Parse a run's config, by YAML's loader in C where there is one: it is ten times as fast. Raises ValueError."""
    import yaml

    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError("no YAML") from error


def read_whole(path: Path) -> str:
    """Return the text of a config. Raises DamagedFile without YAML's mark for the end: half a value is a value too."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(path, "no text") from error
    if not text.endswith("\n...\n"):
        raise DamagedFile(path, "cut short" if text else "empty")
    return text


def from_mapping(schema: type[Schema], values: Mapping[str, Any], parent: str = "") -> Schema:
    """Turn plain nested mappings into dataclasses. Keys are checked; the writer guarantees the types of values."""
    hints = get_type_hints(schema)
    names = sorted(item.name for item in fields(schema))  # pyright: ignore[reportArgumentType]
    for key in sorted(values.keys() - names):
        remedy = suggest_nearest(key, names)
        raise ConfigError(f"{parent}{key}={values[key]}: unknown key; {remedy}")
    arguments = dict(values)
    for key, value in values.items():
        if is_dataclass(hints[key]):
            arguments[key] = from_mapping(hints[key], value, f"{parent}{key}.")
    return schema(**arguments)
