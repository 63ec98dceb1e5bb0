"""`--json`: standard output gets one object for programs, and what is said to people goes to standard error."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Generator

from zeroexp.config.keys import ConfigError
from zeroexp.process import safe_output, signals

WORD, REFUSED, INTERRUPTED = "--json", 2, 130


def parser_of(verb: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the docstring of a verb's module, as it is."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog, description=verb, formatter_class=raw)


def answer_or_end_in_order(command: Callable[[list[str] | None], int]) -> int:
    """As `answer`, where Ctrl-C, SIGTERM and SIGHUP remove what is half written."""
    signals.handle_ctrl_c()
    try:
        return answer(command)
    except KeyboardInterrupt:
        return INTERRUPTED


def answer(command: Callable[[list[str] | None], int]) -> int:
    """Run a verb and return its exit code; what it refuses is one line.

    command: takes a list for its answer to programs, None where nobody asks for it by `--json`.
    """
    safe_output.ignore_output_errors()
    wanted = take_json_option()
    with json_alone(wanted) as told:
        try:
            return command(told if wanted else None)
        except ConfigError as error:
            print(f"zeroexp: {error}", file=sys.stderr)
            return REFUSED


def take_json_option() -> bool:
    """Take the word from the command line; Hydra and what comes after it need not know it."""
    wanted = WORD in sys.argv[1:]
    sys.argv[1:] = [word for word in sys.argv[1:] if word != WORD]
    return wanted


@contextlib.contextmanager
def json_alone(wanted: bool) -> Generator[list[str]]:
    """Print the text that the block puts into the list, if JSON is wanted, and nothing else on standard output."""
    told: list[str] = []
    with contextlib.ExitStack() as aside:
        if wanted:
            kept = os.dup(1)
            aside.callback(os.close, kept)
            aside.callback(os.dup2, kept, 1)
            os.dup2(2, 1)  # for processes that the block starts
            aside.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield told
    if wanted:
        print(*(told or ["null"]), sep="\n")
