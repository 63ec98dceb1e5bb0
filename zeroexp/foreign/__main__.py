"""`zeroexp import FOLDER --to DIR WORDS`: another trainer's checkpoint, weights and moments, to go on from.

    zeroexp import FOLDER --to outputs/imported model=hf model.path=DIR data=... optimizer=adamw
    zeroexp resume=outputs/imported model=hf model.path=DIR data=... optimizer=adamw strategy=zero3 world_size=4

FOLDER is of torch.distributed.checkpoint, as FSDP2 trainers and Megatron-LM's fsdp_dtensor write it, or of DeepSpeed's
ZeRO or universal form. WORDS are those of a run: model, data and optimizer are what the checkpoint was trained with.
Names, shapes and moments that do not fit are refused. It unpickles what FOLDER holds: take it from nobody whom you
would not run code of.

--to DIR   a folder that does not exist yet; it becomes that of a run with one checkpoint
--step N   the number of steps done, where FOLDER does not hold it, or counts updates alone (fp16 skips some)

Exit codes: 0 written, 2 refused with the reason in one line. --json: the checkpoint, for programs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroexp.checkpoint.folders import refuse_existing
from zeroexp.checkpoint.manifest import CheckpointError
from zeroexp.commandline import mistakes
from zeroexp.config.keys import Config, ConfigError
from zeroexp.foreign import READERS
from zeroexp.plan.__main__ import composed_points
from zeroexp.process.json_output import answer_or_end_in_order, parser_of
from zeroexp.tracking.json_files import dumps


def main() -> int:
    return answer_or_end_in_order(_import)


def _import(told: list[str] | None) -> int:
    arguments = parse_arguments()
    reader = next((read for is_one, read in READERS.values() if is_one(arguments.folder)), None)
    if reader is None:
        problem = f"{arguments.folder}: no checkpoint of {', '.join(READERS)}"
        raise CheckpointError(
            f"{problem}; give the folder of one step, or one whose file names the latest"
        )
    refuse_existing(arguments.to)
    config = _config(arguments.words)
    # These imports take seconds, so they come after everything that can be refused without them.
    from zeroexp.foreign.into_checkpoint import import_checkpoint

    checkpoint, notes = import_checkpoint(
        reader, arguments.folder, config, arguments.to, arguments.step
    )
    if told is not None:
        told.append(dumps({"folder": str(arguments.to), "checkpoint": str(checkpoint)}))
    print(*notes, f"{checkpoint}: go on from it with resume={arguments.to}", sep="\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="of one checkpoint of another trainer")
    parser.add_argument("--to", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--step", type=int, help="steps done, where the folder tells updates alone")
    parser.add_argument("words", nargs="*", help="of a run: its model, data and optimizer")
    return parser.parse_intermixed_args()


def _config(words: Sequence[str]) -> Config:
    """Return the config of the one run that the words mean. Raises ConfigError."""
    try:
        points = composed_points(words).points
    except mistakes.MISTAKES as error:
        raise ConfigError(mistakes.explain(error)) from error
    if len(points) != 1:
        raise ConfigError(f"{' '.join(words)}: {len(points)} runs; give the words of one")
    return points[0].config


if __name__ == "__main__":
    sys.exit(main())
