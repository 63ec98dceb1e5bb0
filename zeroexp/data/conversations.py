"""Turn rows of conversations, and of prompts with completions, into tokens and which of them count in the loss.

The columns and their meaning are those of TRL's supervised trainer:

    messages              a list of {role, content} through the tokenizer's chat template; every token counts
    prompt, completion    texts: both in sequence as the tokenizer begins a text, then the end-of-text token; what comes
                          after the prompt counts
                          lists of messages: through the template, the prompt with what begins an answer; as above
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from string import ascii_letters
from typing import Any, NoReturn

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from zeroexp.config.keys import ConfigError
from zeroexp.config.vocabulary import TokenizerChoice
from zeroexp.data.table_columns import COMPLETION, PROMPT

# The day on which a template writes a text, as Llama's own do without a clock: else each day would train on another.
DAY = datetime(2024, 7, 26)
Document = tuple[list[int], int]  # tokens, and how many of the first ones do not count


def _with_fixed_day(template: str) -> str:
    """Put DAY into each directive of a format, where the template asks for the time."""
    if "strftime_now" not in template:
        return template
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters]
    pairs = [("%%", "\0"), *((each, DAY.strftime(each)) for each in directives), ("\0", "%")]
    macro = (
        "{%- macro strftime_now(format) -%}{%- set text = namespace(so_far=format) -%}"
        f"{{%- for each, value in {pairs} -%}}"
        "{%- set text.so_far = text.so_far.replace(each, value) -%}{%- endfor -%}"
        "{{ text.so_far }}{%- endmacro %}"
    )
    return f"{macro}\n{template}"  # the end of the line is no text after a block


class ConversationEncoder:
    """Makes documents of tokens of a table's column `column`, or of PROMPT and COMPLETION where that is None."""

    def __init__(self, words: TokenizerChoice, tokenizer: Tokenizer, column: str | None) -> None:
        self._words, self._tokenizer, self._column = words, tokenizer, column
        self._template: Callable[..., str] | None = None
        self._row = 0

    def __call__(self, batch: dict[str, list[Any]]) -> list[Document]:
        documents: list[Document] = []
        if self._column is not None:
            for messages in batch[self._column]:
                self._row += 1
                documents.append((self._encode(self._render(messages, self._column)), 0))
            return documents
        for prompt, completion in zip(batch[PROMPT], batch[COMPLETION], strict=True):
            self._row += 1
            documents.append(self._answer(prompt, completion))
        return documents

    def _answer(self, prompt: Any, completion: Any) -> Document:
        is_text = isinstance(prompt, str) and isinstance(completion, str)
        if is_text:
            before, whole = prompt, prompt + completion
        elif isinstance(prompt, list) and isinstance(completion, list):
            before = self._render(prompt, PROMPT, add_generation_prompt=True)
            whole = self._render([*prompt, *completion], COMPLETION)
        else:
            kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
            self._refuse(COMPLETION, f"prompt and completion are {kinds}", "give texts, or lists")
        # A template writes special tokens itself; a text begins with those of its tokenizer.
        tokens, first = (self._encode(each, special=is_text) for each in (whole, before))
        same = zip(tokens, first, strict=False)  # a token over the end of the prompt counts
        num_same = next(
            (n for n, (a, b) in enumerate(same) if a != b), min(len(tokens), len(first))
        )
        return tokens + [self._words.end_of_text] * is_text, num_same

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def _render(self, messages: Any, column: str, **how: bool) -> str:
        if not isinstance(messages, list) or not messages:
            self._refuse(column, "holds no list of messages", "give {role, content}, one or more")
        for message in messages:
            is_turn = isinstance(message, dict) and isinstance(message.get("role"), str)
            if not is_turn or not isinstance(message.get("content"), str):
                self._refuse(column, "a message without the texts role and content", "give both")
        try:
            return self._apply(messages, **how)
        except ConfigError:
            raise
        except Exception as error:  # of the template, which may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            self._refuse(column, f"the chat template refuses it ({reason})", "change the messages")

    def _apply(self, messages: list[Any], **how: bool) -> str:
        template = self._template
        if template is None:
            folder: Path = self._words.file.parent
            tokenizer: Any = None
            if (folder / "tokenizer_config.json").is_file():
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            if tokenizer is None or not tokenizer.chat_template:
                raise ConfigError(
                    f"data.text_column={self._column or PROMPT}: holds messages, and {folder} has a tokenizer "
                    "without chat template; use model.weights or model.path of a model that chats"
                )
            fixed = _with_fixed_day(tokenizer.get_chat_template())
            template = partial(tokenizer.apply_chat_template, chat_template=fixed)
            self._template = template
        # A table fills in keys that one message lacks and another has.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        return template(given, tokenize=False, **how)

    def _refuse(self, column: str, problem: str, remedy: str) -> NoReturn:
        raise ConfigError(f"data.path: row {self._row}, column {column}: {problem}; {remedy}")
