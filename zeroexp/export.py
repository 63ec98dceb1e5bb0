"""`zeroexp export RUN`: a checkpoint in somebody else's format: weights for transformers, or all of it for a trainer.

    zeroexp export outputs/<sweep>/<run>          the newest checkpoint, into <run>/exported/step-000020
    zeroexp export outputs/<sweep>/<run> --step 10 --to DIR --dtype bfloat16
    zeroexp export outputs/<sweep>/<run> --format dcp          weights and moments, for FSDP2
    zeroexp export outputs/<sweep>/<run> --format chakra       a traced step, for simulators
    zeroexp model.weights=DIR                     start from weights
    zeroexp model=hf model.path=DIR               start from those of a run with model=hf

Of a run with `model.lora` its adapters alone are written for transformers, as peft reads them.

It reads one tensor after the other, checks each hash and writes file by file into a hidden folder beside DIR. When all
is written, one rename gives the folder its name. Exit codes: 0 written, 2 refused with the reason in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zeroexp.checkpoint import folders
from zeroexp.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from zeroexp.config import plugins
from zeroexp.config.keys import Config, ConfigError, from_mapping
from zeroexp.config.vocabulary import TokenizerChoice
from zeroexp.foreign import WRITERS
from zeroexp.measure.chakra import traced_step, write_chakra
from zeroexp.process.json_output import answer_or_end_in_order, parser_of
from zeroexp.registry import UnknownWord
from zeroexp.tracking.files import working_folder_of
from zeroexp.tracking.json_files import dumps

HUGGINGFACE, CHAKRA = "huggingface", "chakra"


def main() -> int:
    return answer_or_end_in_order(_export)


def _export(told: list[str] | None) -> int:
    arguments = parse_arguments()
    given = {"dtype": arguments.dtype, "max_shard_size": arguments.max_shard_size}
    of_weights = {key: value for key, value in given.items() if value is not None}
    if arguments.format != HUGGINGFACE and of_weights:
        key, value = next(iter(of_weights.items()))
        problem = f"--format={arguments.format} keeps what is saved; leave it out"
        raise ConfigError(f"--{key.replace('_', '-')}={value}: {problem}")
    if arguments.format == CHAKRA:
        source = arguments.run.resolve()
        step = traced_step(source, arguments.step)
        target = arguments.to or source / "exported" / f"{CHAKRA}-step-{step:06d}"
        folders.refuse_existing(target)
        with folders.filled_or_removed(target) as folder:
            write_chakra(source, step, folder)
        written = {"folder": str(target), "run": str(source), "step": step}
        what = f"step {step} of {source}, a Chakra execution trace of each rank"
    else:
        source = choose_checkpoint(arguments.run, arguments.step)
        target = arguments.to or default_target(source, arguments.format)
        with folders.kept(source):  # its run may go on
            if arguments.format == HUGGINGFACE:
                export(source, target, **of_weights)
            else:
                export_whole(source, target, arguments.format)
        dtype = arguments.dtype or "float32"
        written = {"folder": str(target), "checkpoint": str(source)}
        written |= {"dtype": dtype} if arguments.format == HUGGINGFACE else {}
        what = _what_was_written(target, source, arguments.format, dtype)
    if told is not None:
        told.append(dumps(written))
    print(f"{target}: {what}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, or of one of its checkpoints")
    parser.add_argument("--to", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--step", type=int, help="the checkpoint after so many steps, or the traced one"
    )
    parser.add_argument(
        "--format",
        choices=[HUGGINGFACE, *WRITERS, CHAKRA],
        default=HUGGINGFACE,
        help="whose it is to be",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of weights; float32")
    parser.add_argument("--max-shard-size", help="of one file, and of memory; 5GB")
    return parser.parse_args()


def choose_checkpoint(folder: Path, step: int | None = None) -> Path:
    """Return the absolute path of the checkpoint that a run's or a checkpoint's folder means.

    Raises CheckpointError where there is no such checkpoint.
    """
    folder = folder.resolve()
    if step is None and (folder / MANIFEST).is_file():
        return folder
    there = {folders.step_of(path): path for path in folders.complete_checkpoints(folder)}
    if not there:
        remedy = "give the folder of a run with checkpoints, or one of its checkpoint/step-*"
        raise CheckpointError(f"{folder}: no whole checkpoint in there; {remedy}")
    if step is not None and step not in there:
        steps = ", ".join(map(str, there))
        raise CheckpointError(f"--step={step}: no such checkpoint in {folder}; use {steps}")
    return there[max(there) if step is None else step]


def default_target(checkpoint: Path, form: str = HUGGINGFACE) -> Path:
    """Return the folder an export goes to without --to. Raises ConfigError for a checkpoint that lies in no run."""
    if checkpoint.parent.name != folders.FOLDER:
        raise ConfigError(f"--to=null: {checkpoint} lies in no run's folder; set --to=DIR")
    name = checkpoint.name if form == HUGGINGFACE else f"{form}-{checkpoint.name}"
    return checkpoint.parents[1] / "exported" / name


def _what_was_written(target: Path, checkpoint: Path, form: str, dtype: str) -> str:
    """Say what the folder holds, and how to begin with it."""
    if form != HUGGINGFACE:
        return f"weights and moments of {checkpoint}, bit for bit, in the format of {form}"
    model = from_mapping(Config, read_manifest(checkpoint).config).model
    if model.lora.r is not None:
        use = f"peft.PeftModel.from_pretrained(model, {str(target)!r})"
        return f"the adapters of {checkpoint} in {dtype}; put them around the model with {use}"
    use = f"model.weights={target}"
    if model.family == "hf":
        head = f" model.task={model.task} model.num_labels={model.num_labels}"
        use = f"model=hf model.path={target}" + (head if model.num_labels else "")
    return f"the weights of {checkpoint} in {dtype}; start from it with {use}"


def export(
    checkpoint: Path, target: Path, *, dtype: str = "float32", max_shard_size: str = "5GB"
) -> None:
    """Write the weights of `checkpoint` in Hugging Face's format to `target`, which must not exist.

    Raises ConfigError for a target that exists or can not be written and for a model that transformers does not have,
    and CheckpointError for a damaged checkpoint. After an error nothing is left behind.
    """
    manifest = read_manifest(checkpoint)
    config = from_mapping(Config, manifest.config)
    folders.refuse_existing(target)
    # These imports take seconds, so they come after everything that can be refused without them.
    import torch

    from zeroexp.checkpoint.weights import Weights
    from zeroexp.models import huggingface_folder, lora

    weights = Weights(checkpoint, manifest)
    with _with_plugins(config, checkpoint), folders.filled_or_removed(target) as folder:
        if config.model.lora.r is not None:
            module = huggingface_folder.empty_model(config.model, weights.shapes)
            as_asked = getattr(torch, dtype)
            model = replace(config.model, weights=_base_of(config, checkpoint))
            lora.write_adapters(folder, model, module, weights.read, as_asked)
            return
        huggingface_folder.write(
            folder,
            config.model,
            weights.shapes,
            weights.read,
            dtype=getattr(torch, dtype),
            max_shard_size=max_shard_size,
            tokenizer=_tokenizer(config, checkpoint),
            labels=config.data.labels,
        )


def export_whole(checkpoint: Path, target: Path, form: str) -> None:
    """Write weights and moments in the format of one of WRITERS; raises as `export` does."""
    manifest = read_manifest(checkpoint)
    config = from_mapping(Config, manifest.config)
    if config.model.lora.quantize is not None:
        problem = f"model.lora.quantize={config.model.lora.quantize} packs weights as no other trainer reads them"
        raise ConfigError(f"--format={form}: {problem}; leave it out, which exports the adapters")
    folders.refuse_existing(target)
    from zeroexp.checkpoint.weights import Weights
    from zeroexp.models.huggingface_folder import require_same
    from zeroexp.models.module import build_empty

    weights = Weights(checkpoint, manifest)
    with _with_plugins(config, checkpoint), folders.filled_or_removed(target) as folder:
        require_same(build_empty(config.model, weights.shapes).module, weights.shapes)
        WRITERS[form](folder, config, manifest, weights)


def _base_of(config: Config, checkpoint: Path) -> str | None:
    """Return what adapters lie around: the absolute path of a folder, or a name of the hub."""
    base = config.model.weights
    started_in = working_folder_of(checkpoint.parents[1]) or Path()
    folder = started_in / Path(base or "").expanduser()
    return str(folder.resolve()) if base and folder.is_dir() else base


@contextlib.contextmanager
def _with_plugins(config: Config, checkpoint: Path) -> Iterator[None]:
    """Import the run's plugins, from where it was started or from here.

    Raises ConfigError of one that is gone where a word is asked for that nobody has registered, and only there.
    """
    if started_in := working_folder_of(checkpoint.parents[1]):
        plugins.add_import_folder(started_in)
    gone: ConfigError | None = None
    for name in config.plugins:
        try:
            plugins.load([name])
        except ConfigError as error:
            gone = gone or error
    try:
        yield
    except UnknownWord as error:
        raise gone or error from error


def _tokenizer(config: Config, checkpoint: Path) -> TokenizerChoice | None:
    """Return the tokenizer of the training text; None where there was no text or the tokenizer is gone.

    Relative paths are meant from where the run was started, as long as that folder is there.
    """
    from zeroexp.config.data_kinds import DATA
    from zeroexp.data.choose_tokenizer import choose_tokenizer

    try:
        with _with_plugins(config, checkpoint), contextlib.ExitStack() as there:
            if not DATA[config.data.kind].tokenizes:
                return None
            with contextlib.suppress(OSError):  # gone, or closed to whoever exports
                started_in = working_folder_of(checkpoint.parents[1])
                there.enter_context(contextlib.chdir(started_in or "."))
            choice = choose_tokenizer(config.data, config.model)
            return replace(choice, file=choice.file.absolute())
    except ConfigError as error:
        print(f"zeroexp: exported without a tokenizer: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
