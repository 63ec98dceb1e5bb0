"""Make the shipped files from the reference manual that every CPython carries.

    python zeroexp/data/corpus/make.py

Rerun this only on purpose: other text or another tokenizer makes losses incomparable with earlier runs.
"""

import pydoc_data.topics
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent
VOCAB_SIZE = 2048
BETWEEN_DOCUMENTS = "\f"  # occurs in no document


def main() -> None:
    documents = list(pydoc_data.topics.topics.values())
    text = BETWEEN_DOCUMENTS.join(documents)
    (FOLDER / "python_reference.txt").write_text(text, encoding="utf-8", newline="\n")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],  # id 0: it separates documents and pads
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(FOLDER / "tokenizer.json"))


if __name__ == "__main__":
    main()
