"""Data: the same global batches at every world size, nothing lost or padded, caches whole or absent."""

from __future__ import annotations

import copy
import csv
import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets.packaged_modules.parquet.parquet import Parquet
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.cache_writers import die, race
from tests.composing import composed
from zeroexp.check.rules_data import check_validation
from zeroexp.check.try_data import check_data
from zeroexp.config.data_splits import data_files
from zeroexp.config.keys import ConfigError, DataConfig, ModelConfig
from zeroexp.config.vocabulary import TokenizerChoice
from zeroexp.cut.rank_grid import RankGrid
from zeroexp.data import StepBatch, batches, packed_cache, table_rows, tokenize_and_pack
from zeroexp.data.batches import Data, build_data, sample_indices
from zeroexp.data.choose_tokenizer import choose_tokenizer, identity_of_tokenizer
from zeroexp.data.classes import classes_of
from zeroexp.data.conversations import ConversationEncoder
from zeroexp.data.source_files import CORPUS
from zeroexp.data.table_rows import read_table
from zeroexp.models import find_weights
from zeroexp.process import locks, progress

TOKENIZER = Tokenizer.from_file(str(CORPUS / "tokenizer.json"))
REVIEWS = [
    ("The soup was cold.", 1),
    ("Five stars, and I would give six! " * 20, 4),
    ('He said "never again", twice,\nand left.', 0),
    ("Fine.", 2),
    ("Crème brûlée as in Paris…", 3),
    ("Good value for a lunch in the week.", 3),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """An empty cache for this file's tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROEXP_CACHE", str(folder))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
        yield folder


def configs(data: str, model: str = "tiny", **changes) -> tuple[DataConfig, ModelConfig]:
    words = ["data.path=set-by-the-test"] if data == "hf" else []
    config = copy.deepcopy(composed(f"data={data}", "model=small", *words))
    models = composed(f"model={model}", *(["data=yelp"] if model.endswith("yelp") else []))
    return replace(config.data, **changes), copy.deepcopy(models.model)


def opened(data: str, model: str = "tiny", *, seed: int = 0, **changes) -> Data:
    return build_data(*configs(data, model, **changes), seed)


def global_batch(data: Data, position: int, world_size: int) -> tuple[torch.Tensor, ...]:
    """(inputs, labels) of all ranks in the order of the data: microbatch by microbatch, rank by rank."""
    steps = [
        data.step_batch(position, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    turns = [turn for row in zip(*(s.microbatches for s in steps), strict=True) for turn in row]
    inputs = torch.cat([next(iter(turn.inputs.values())) for turn in turns])
    return inputs, torch.cat([turn.labels for turn in turns])


# --- order


@given(seed=st.integers(0, 9), num_samples=st.integers(1, 40), epoch=st.integers(0, 3))
def test_every_epoch_is_one_permutation(seed, num_samples, epoch):
    indices = sample_indices(epoch * num_samples, num_samples, num_samples=num_samples, seed=seed)
    assert sorted(indices) == list(range(num_samples))


@given(
    start=st.integers(0, 100),
    count=st.integers(1, 60),
    skip=st.integers(0, 59),
    num_samples=st.integers(1, 25),
)
def test_resuming_anywhere_gives_what_was_next(start, count, skip, num_samples):
    skip = min(skip, count - 1)
    whole = sample_indices(start, count, num_samples=num_samples, seed=3)
    rest = sample_indices(start + skip, count - skip, num_samples=num_samples, seed=3)
    assert np.array_equal(whole[skip:], rest)


def test_seeds_and_epochs_differ():
    orders = [
        sample_indices(start, 50, num_samples=50, seed=seed).tolist()
        for seed in (0, 1)
        for start in (0, 50)
    ]
    assert len({tuple(order) for order in orders}) == 4


# --- batches


@pytest.mark.parametrize(
    ("data", "model"), [("offline", "tiny"), ("synthetic", "tiny"), ("vectors", "mlp_tiny")]
)
def test_the_global_batch_is_the_same_at_every_world_size(data, model):
    whole = opened(data, model, seq_len=32, global_batch_size=24)
    position = whole.num_samples - 5  # the step crosses into the second epoch
    for micro in (1, 2, 3):
        config = replace(whole._config, micro_batch_size=micro)
        batches = Data(whole._samples, config, 0)
        alone = global_batch(batches, position, 1)
        for world_size in (2, 4):
            shared = global_batch(batches, position, world_size)
            assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
        assert len({counts(batches, position, size) for size in (1, 2, 4)}) == 1


def counts(data: Data, position: int, world_size: int) -> tuple[int, int]:
    """(valid labels, tokens) of a step, which every rank knows."""
    ranks = range(world_size)
    steps = [data.step_batch(position, rank=rank, world_size=world_size) for rank in ranks]
    ((num_valid, num_tokens),) = {(step.num_valid, step.num_tokens) for step in steps}
    return num_valid, num_tokens


@pytest.mark.parametrize("data", ["offline", "synthetic"])
def test_labels_are_the_next_tokens_and_all_count(data):
    steps = [opened(data, seq_len=16).step_batch(12, rank=r, world_size=2) for r in range(2)]
    num_labels = num_tokens = 0
    for turn in (turn for step in steps for turn in step.microbatches):
        ids = turn.inputs["input_ids"]
        assert ids.shape == turn.labels.shape == (1, 16)
        assert ids.dtype == turn.labels.dtype == torch.int64
        assert torch.equal(turn.labels[:, :-1], ids[:, 1:])
        num_labels += int((turn.labels >= 0).sum())
        num_tokens += ids.numel()
    assert {(s.num_valid, s.num_tokens) for s in steps} == {(num_labels, num_tokens)}


def in_stored_order(data: Data) -> StepBatch:
    """All samples as one step of one rank, but in the order in which they are stored."""
    order = np.argsort(sample_indices(0, data.num_samples, num_samples=data.num_samples, seed=0))
    whole = replace(data._config, global_batch_size=data.num_samples, micro_batch_size=1)
    step = Data(data._samples, whole, 0).step_batch(0, rank=0, world_size=1)
    return replace(step, microbatches=[step.microbatches[place] for place in order])


def test_packing_loses_nothing_but_the_tail():
    """Samples put back to back are the shipped text, token for token; a form feed stands between documents."""
    data = opened("offline", seq_len=100)
    assert data.source == "shipped: Python's language reference (PSF licence)"
    stream, counts = stream_of(data)
    assert all(counts[1:])
    text = (CORPUS / "python_reference.txt").read_bytes().decode()
    decoded = TOKENIZER.decode(stream, skip_special_tokens=False).replace("<|endoftext|>", "\f")
    assert text.startswith(decoded)
    assert len(TOKENIZER.encode(text[len(decoded) :]).ids) < 100


def test_packing_goes_on_from_one_batch_of_documents_to_the_next(tmp_path):
    """`datasets` hands on 1,000 rows at a time: the tokens that fill no sample go to the front of the next ones."""
    lines = [f"line {number} of the text" for number in range(2500)]
    (tmp_path / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    stream, _ = stream_of(opened("hf", path=str(tmp_path / "lines.txt"), seq_len=97))
    expected = [token for each in TOKENIZER.encode_batch(lines) for token in (*each.ids, 0)]
    assert stream == expected[: len(stream)] and len(expected) - len(stream) < 97


def test_texts_are_encoded_in_slices(tmp_path, monkeypatch):
    """An encoding takes up to a hundred bytes for each one of its text, which held a gigabyte for 15 MB."""
    texts = ["a" * 400_000] * 7 + ["b" * 3_000_000, "c"]
    slices = [*tokenize_and_pack._slices(texts)]
    assert [text for each in slices for text in each] == texts
    assert [len(each) for each in slices] == [2, 2, 2, 1, 1, 1]
    (tmp_path / "lines.txt").write_text("a few words of it\n" * 99, encoding="utf-8")
    whole = opened("hf", path=str(tmp_path / "lines.txt"), seq_len=7).tokens_hash
    monkeypatch.setattr(tokenize_and_pack, "SLICE", 40)
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path / "cache"))
    assert opened("hf", path=str(tmp_path / "lines.txt"), seq_len=7).tokens_hash == whole


def test_an_order_takes_four_bytes_a_sample_and_is_as_it_was():
    order = batches._permutation(100_003, 3, 1)
    assert order.dtype == np.int32
    assert np.array_equal(order, np.random.default_rng([3, 1]).permutation(100_003))


def test_a_text_of_ones_own(tmp_path):
    (tmp_path / "b.txt").write_text("second " * 50, newline="\n")
    (tmp_path / "a.txt").write_text("first " * 50, newline="\n")
    (tmp_path / "a.pdf").write_bytes(b"\xff\x00")
    data = opened("offline", path=str(tmp_path), seq_len=8)
    ids = [int(i) for row in in_stored_order(data).microbatches for i in row.inputs["input_ids"][0]]
    assert TOKENIZER.decode(ids).startswith("first first")
    assert TOKENIZER.decode(ids).count("first") == 50
    assert data.source == f"local: {tmp_path}"


def test_a_text_of_the_same_size_and_time_is_another(tmp_path):
    file, hashes = tmp_path / "text.txt", []
    for word in ("first ", "other "):
        file.write_text(word * 40)
        os.utime(file, (0, 0))
        data = opened("offline", path=str(file), seq_len=8)
        ids = in_stored_order(data).microbatches[0].inputs["input_ids"][0]
        assert TOKENIZER.decode([int(i) for i in ids]).startswith(word)
        hashes += [data.tokens_hash, opened("offline", path=str(file), seq_len=8).tokens_hash]
    first, again, other, _ = hashes
    assert first == again != other


@pytest.mark.parametrize("file", ["tokens.npy", "about.json"])
def test_a_damaged_cache_entry_is_made_again(tmp_path, cache, file):
    text = tmp_path / "text.txt"
    text.write_text(f"{file} " * 100)
    whole = opened("offline", path=str(text), seq_len=8).num_samples
    (folder,) = [one.parent for one in cache.glob("*/about.json") if str(text) in one.read_text()]
    content = (folder / file).read_bytes()
    for damaged in (content[: len(content) // 2], content[:-40] + bytes(40)):  # cut, zeros
        (folder / file).write_bytes(damaged)
        assert opened("offline", path=str(text), seq_len=8).num_samples == whole
        assert (folder / file).read_bytes() == content


def test_synthetic_tokens_can_be_learned():
    """Each sample counts on by one stride modulo the vocabulary."""
    for turn in opened("synthetic", seq_len=32).step_batch(0, rank=0, world_size=1).microbatches:
        steps = (turn.labels - turn.inputs["input_ids"]) % 2048
        assert len(set(steps.flatten().tolist())) == 1
        assert 1 <= int(steps[0, 0]) <= 8


def test_vectors_fit_the_model_and_count_elements():
    step = opened("vectors", "mlp_tiny", seq_len=3).step_batch(0, rank=1, world_size=2)
    turn = step.microbatches[0]
    assert turn.inputs["vectors"].shape == turn.labels.shape == (1, 3, 64)
    assert torch.equal(turn.labels, turn.inputs["vectors"].roll(1, -1).tanh())
    assert (step.num_valid, step.num_tokens) == (12 * 3 * 64, 12 * 3)


def test_synthetic_samples_follow_the_seed():
    first, same, other = (opened("synthetic", seed=seed) for seed in (0, 0, 1))
    a, b, c = (global_batch(data, 0, 1)[0] for data in (first, same, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


# --- reviews


HEADED = ("text", "label")


def write_csv(folder: Path) -> Path:
    file = folder / "train.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerows([HEADED, *REVIEWS])
    return file


def write_tsv(folder: Path) -> Path:
    file = folder / "reviews.tsv"
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, delimiter="\t").writerows([HEADED, *REVIEWS])
    return file


def write_json(folder: Path) -> Path:
    file = folder / "reviews.json"
    file.write_text(json.dumps([{"text": a, "label": b} for a, b in REVIEWS]))
    return file


def write_folders(folder: Path) -> Path:
    for split, rows in (("train", REVIEWS), ("test", REVIEWS[:1])):
        (folder / split).mkdir()
        write_jsonl(folder / split, rows)
    return folder


def write_archive(folder: Path) -> Path:
    """As in Yelp's own archive: no header, stars from 1, the test reviews beside it."""
    for name, rows in (("train.csv", REVIEWS), ("test.csv", REVIEWS[:1])):
        with (folder / name).open("w", newline="", encoding="utf-8") as out:
            csv.writer(out, quoting=csv.QUOTE_ALL).writerows((b + 1, a) for a, b in rows)
    return folder


def write_jsonl(folder: Path, rows: Sequence[tuple[str, int]] = REVIEWS) -> Path:
    file = folder / "reviews.jsonl"
    file.write_text("".join(json.dumps({"label": b, "text": a}) + "\n" for a, b in rows))
    return file


def as_dataset() -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"text": [a for a, _ in REVIEWS], "label": [b for _, b in REVIEWS]}
    )


def write_parquet(folder: Path) -> Path:
    as_dataset().to_parquet(folder / "train-00000-of-00001.parquet")
    as_dataset().select([0]).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


def write_saved(folder: Path) -> Path:
    datasets.DatasetDict(train=as_dataset(), test=as_dataset().select([0])).save_to_disk(
        folder / "s"
    )
    return folder / "s"


def write_twins(folder: Path) -> Path:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, folder / "twins.parquet")
    return folder


WRITERS = [write_csv, write_archive, write_jsonl, write_parquet, write_saved]


@pytest.mark.parametrize("write", [*WRITERS, write_tsv, write_json, write_folders])
def test_reviews_of_local_files(write: Callable[[Path], Path], tmp_path):
    path = str(write(tmp_path))
    there = sorted(tmp_path.rglob("*"))
    data = opened("yelp", "smollm2_360m_yelp", path=path, seq_len=24)
    assert (data.num_samples, data.vocab_size, data.source) == (6, 2048, f"local: {path}")
    step = in_stored_order(data)
    rows = [TOKENIZER.encode(text).ids[:24] for text, _ in REVIEWS]
    for turn, ids, (_, label) in zip(step.microbatches, rows, REVIEWS, strict=True):
        assert turn.inputs["input_ids"].tolist() == [ids + [0] * (24 - len(ids))]
        assert turn.labels.tolist() == [label]
    assert (step.num_valid, step.num_tokens) == (6, sum(map(len, rows)))
    assert opened("yelp", "smollm2_360m_yelp", path=path, limit=2).num_samples == 2
    assert sorted(tmp_path.rglob("*")) == there, "nothing is written beside the data"


TWO = {"train.csv": "text\na\n", "test.csv": "text\nb\n"}
COLUMNS = {"a.csv": "body,text\na,b\nc,\n"}
STARS = {"a.csv": "n,text\n1,a\n 2.5,b\n"}
CAUSAL = "yelp_causal"
WRONG: list[tuple[Any, str, dict[str, Any], str]] = [
    (write_csv, CAUSAL, {"seq_len": 10**5}, r"data.seq_len=100000: the text is shorter"),
    ({}, CAUSAL, {"path": "absent"}, r"data.path=.*absent: no such file"),
    ({}, CAUSAL, {}, r"data.path=.*: no file in it ends in .csv"),
    (COLUMNS, CAUSAL, {"text_column": "n"}, r"=n: no such column in .*; use one of body, t"),
    (STARS, CAUSAL, {"text_column": "n"}, r"=n: holds numbers, no text; use one of text$"),
    (COLUMNS, CAUSAL, {"text_column": "text"}, r"=text: 1 of 2 rows in .* have no value"),
    ({"a.parquet": "PAR1 and no"}, CAUSAL, {}, r"path=.*a.parquet: .*; repair or convert"),
    (TWO, CAUSAL, {"split": "dev"}, r"data.path=.*: no file for the split dev among "),
    ({"a.csv": "", "b.csv": ""}, CAUSAL, {"split": "test"}, r"no file for the split test among"),
    (write_saved, CAUSAL, {"split": "dev"}, r"data.split=dev: .*use one of train, test"),
    ({"a.txt": ""}, CAUSAL, {}, r"data.path=.*a.txt: is empty; name a file with rows"),
    ({"a.csv": "text,text\na,b\n"}, CAUSAL, {}, r"column=text: several columns .*; rename al"),
    ({"a.csv": "text,n\n"}, CAUSAL, {}, r"data.path=.*a.csv: has no rows; name a file with"),
    ({"a.csv": "text;n\na;1\n"}, CAUSAL, {}, r"columns are separated by ';', no comma; con"),
    ({"a.csv": "n,text\n1,a, b\n"}, CAUSAL, {}, r"a row has more fields than the first row has"),
    (
        {"a.csv": 'text\n"a\n'},
        CAUSAL,
        {},
        r"a.csv: a quote that opens a field is not closed; close",
    ),
    ({"a.csv": 'text\n"b" c\n'}, CAUSAL, {}, r"a.csv: a quote inside of a quoted field is not"),
    ({"a.csv": 'text,n\n"a\\"b\\", c",\n'}, CAUSAL, {}, r"a.csv: a quote inside of a quoted field"),
    ({"a.csv": "text\na\n", "b.csv": "word\nb\n"}, CAUSAL, {}, r"b.csv: has no column text, wh"),
    ({"a.csv": "text\na\n", "b.csv": ""}, CAUSAL, {}, r"b.csv: has no column text, where other"),
    ({"a.csv": "text\na\n", "b.csv": "text,text\na,b\n"}, CAUSAL, {}, r"b.csv: has several col"),
    (
        {"a.tsv": 'text\tn\n"a\t0\nb"\t1\n'},
        CAUSAL,
        {},
        r"a.tsv: quotes may be letters of it, or join",
    ),
    (write_twins, CAUSAL, {}, r"column=text: several columns of .*; rename all but one"),
    ({"a.csv": "text\na\n", "b.txt": "b\n"}, CAUSAL, {}, r"several kinds \(.csv, .txt\); na"),
    (write_csv, "offline", {}, r"data.kind=text reads no .csv; use data=hf for tables"),
    ({"l.jsonl": '{"text": "caf\xe9"}'}, CAUSAL, {}, r"data.path=.*l.jsonl: .*; repair or"),
    (
        {"m.jsonl": '{"text": "a"}\n{"text": "\xe9"}'},
        CAUSAL,
        {},
        r"data.path=.*m.jsonl: .*; repair or",
    ),
    ({"l.txt": "caf\xe9"}, "offline", {}, r"l.txt: no UTF-8 \(byte 3 is 0xe9\); convert it with"),
]


@pytest.mark.parametrize(("files", "data", "changes", "line"), WRONG)
def test_wrong_data_is_one_line(files, data, changes, line, tmp_path, capfd):
    """Files are given by their texts, or by a function that writes them; one is named, several by their folder."""
    if callable(files):
        path = files(tmp_path)
    else:
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="latin-1")
        path = tmp_path / next(iter(files)) if len(files) == 1 else tmp_path
    changes = {**changes, "path": str(tmp_path / changes["path"] if "path" in changes else path)}
    with pytest.raises(ConfigError, match=line) as caught:
        opened(data, **changes)
    assert "\n" not in str(caught.value) and not capfd.readouterr().err


def test_the_mark_that_a_spreadsheet_writes_first_is_no_letter_of_a_column(tmp_path):
    (tmp_path / "a.csv").write_text("review,n\ngood,1\n" * 9, encoding="utf-8-sig")
    here = {"path": str(tmp_path / "a.csv"), "text_column": "review", "seq_len": 8}
    config, model = configs("yelp_causal", **here)
    assert build_data(config, model, 0).num_samples
    table_rows.require_columns(config, [tmp_path / "a.csv"])  # of what Slurm's nodes will read


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_texts_that_look_like_numbers_stay_texts(tmp_path, suffix):
    """In a later file, or in a later block of rows, where types would be found anew."""
    rows = ["a name"] * 10_000 + ["007", "1e5", "3.10"] * 9
    for name, own in (("a", rows), ("b", rows[-27:])):
        (tmp_path / (name + suffix)).write_text("\n".join(["text", *own]), encoding="utf-8")
    assert [*_read(tmp_path)["text"]] == rows + rows[-27:]


def test_a_completion_in_a_csv_may_be_a_number(tmp_path):
    rows = "".join(f"What is {n} and {n}?,{n + n}\n" for n in range(99))
    (tmp_path / "a.csv").write_text(f"prompt,completion\n{rows}", encoding="utf-8")
    data = opened("hf", path=str(tmp_path / "a.csv"), seq_len=8)
    assert data.num_samples > 0


@pytest.mark.parametrize("kind", ["yelp_causal", "offline"])
def test_a_mark_of_the_byte_order_is_no_text(tmp_path, kind):
    (tmp_path / "a.txt").write_text("some words of it\n" * 30, encoding="utf-8-sig")
    data = opened(kind, path=str(tmp_path / "a.txt"), seq_len=8, micro_batch_size=1)
    first = in_stored_order(data).microbatches[0].inputs["input_ids"][0]
    assert first.tolist()[:4] == TOKENIZER.encode("some words of it\n").ids[:4]


def test_a_table_is_read_as_it_was_written(tmp_path):
    """Its name may be in capitals, what is hidden beside it is no data, and NA is a word."""
    words = ["NA", "null", "None", "nan", "N/A", "0x10", "1.50", "∅ ☃", "a\nb"] * 9
    rows = "".join(f'"{word}",{n % 2}\n' for n, word in enumerate(words))
    (tmp_path / "A.CSV").write_text(f"text,n\n{rows}", encoding="utf-8")
    (tmp_path / ".A.csv.swp").write_text("x")
    (tmp_path / ".checkpoints").mkdir()
    (tmp_path / ".checkpoints/A.csv").write_text("other\n1\n")
    assert [*_read(tmp_path)["text"]] == words


def labelled(folder: Path, values: Sequence[object], **changes) -> list[int]:
    """The classes that the head of five sees for these values of the column `stars`."""
    file = folder / "stars.jsonl"
    rows = [{"review": f"number {n}", "stars": value} for n, value in enumerate(values)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"text_column": "review", "label_column": "stars", "seq_len": 8} | changes
    data = opened("yelp", "smollm2_360m_yelp", path=str(file), **changes)
    return [int(turn.labels[0]) for turn in in_stored_order(data).microbatches]


@pytest.mark.parametrize(
    ("values", "changes", "classes"),
    [
        ([0, 3, 1], {}, [0, 3, 1]),
        ([1, 5, 3], {}, [0, 4, 2]),
        ([1, 3], {"labels": [1, 2, 3, 4, 5]}, [0, 2]),
        ([-2, 2, 0], {"labels": [-2, -1, 0, 1, 2]}, [0, 4, 2]),
        (["d", "a", "c", "b", "e"], {}, [3, 0, 2, 1, 4]),
        (["10", "9", "1", "5", "7"], {}, [4, 3, 0, 1, 2]),
        (["²", "9", "½", "négatif", "☃"], {}, [2, 0, 3, 1, 4]),
        ([1, 3], {"labels": ["1", "2", "3", "4", "5"]}, [0, 2]),
        (["good", "bad"], {"labels": ["bad", "poor", "fair", "good", "great"]}, [3, 0]),
        ([True, False], {}, [1, 0]),
        # The limit is on what is trained on, and does not change what a label means.
        ([1, 2, 5], {"limit": 2}, [0, 1]),
    ],
)
def test_values_of_the_label_column_are_classes(tmp_path, values, changes, classes):
    assert labelled(tmp_path, values, **changes) == classes


@pytest.mark.parametrize(
    ("values", "changes", "line"),
    [
        (
            [0, 5],
            {},
            r"data.label_column=stars: labels 0,5 are not all in 0..4 or 1..5; .*=\[0,5\]",
        ),
        ([2, 6], {}, r"are not all in 0..4 or 1..5; set model.num_labels, or name them"),
        (["a", "b"], {}, r"_column=stars: holds 2 words \(a,b\) .*set model.num_labels=2"),
        ([0.5, 1.0], {}, r"data.label_column=stars: holds float, no labels"),
        ([[1], [2]], {}, r"data.label_column=stars: holds List, no labels; use another column"),
        ([1, 2], {"labels": [1, 2, 3, 4, 4]}, r"data.labels=\[1,2,3,4,4\]: names 4 twice; name"),
        ([1, None], {}, r"data.label_column=stars: 1 of 2 rows in .* have no value there"),
        ([1, 6], {"labels": [1, 2, 3, 4, 5]}, r"data.labels=\[1,2,3,4,5\]: .*also holds 6; name"),
        ([1], {"label_column": "label"}, r"_column=label: no such .*one of review, stars"),
        (
            ["2024-01-01"] * 2,
            {"text_column": "stars"},
            r"=stars: holds dates alone, no .* of review",
        ),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path, values, changes, line):
    with pytest.raises(ConfigError, match=line) as caught:
        labelled(tmp_path, values, **changes)
    assert "\n" not in str(caught.value)


def test_a_classifier_reads_no_conversations(tmp_path):
    write_rows(tmp_path, ".jsonl", [{"text": [{"role": "user", "content": "a"}], "label": 1}])
    with pytest.raises(ConfigError, match=r"_column=text: holds List, no text; use other data"):
        _read(tmp_path, *CLASSES)


def write_rows(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> None:
    """As .csv or as .jsonl."""
    if suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = "\n".join([",".join(rows[0]), *(",".join(map(str, r.values())) for r in rows)])
    (folder / f"{len([*folder.iterdir()])}{suffix}").write_text(text, encoding="utf-8")


def test_a_column_that_nobody_reads_makes_no_csv_unreadable(tmp_path):
    """One that is empty at first, a number that becomes a word, a fraction: in later rows or another file."""
    texts = [f"a text {n} of a file" for n in range(12_000)]
    late = [
        {"notes": "a note" * n, "id": f"A{n}" if n else 1, "price": [1, 1.5][n]} for n in (0, 1)
    ]
    rows = [{**late[n > 11_000], "text": text} for n, text in enumerate(texts)]
    write_rows(tmp_path, ".csv", rows)
    write_rows(tmp_path, ".csv", [dict(reversed(row.items())) for row in rows[-9:]])
    write_rows(tmp_path, ".csv", [{"text": texts[0], "more": "words"}])
    read = _read(tmp_path)
    assert read.column_names == ["text"] and [*read["text"]] == [*texts, *texts[-9:], texts[0]]


def _read(path: Path, *words: str) -> datasets.Dataset:
    config = composed("data=hf", f"data.path={path}", "model=tiny", *words).data
    return read_table(config, data_files(config), path.parent / f".{path.name}")[0]


def test_a_table_of_parquet_may_hold_columns_that_datasets_has_no_type_for(tmp_path):
    maps = pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64()))
    labels = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])}).arrow_schema
    table = pa.table({"text": ["a", "b"], "m": maps, "label": [1, 0]})
    pq.write_table(table.replace_schema_metadata(labels.metadata), tmp_path / "a.parquet")
    assert [*_read(tmp_path / "a.parquet")["text"]] == ["a", "b"]
    read = _read(tmp_path / "a.parquet", *CLASSES)
    assert [*read["label"]] == [1, 0] and table_rows.class_names(read, "label") == ["no", "yes"]


CLASSES = "model.task=classification", "model.num_labels=2"


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [
        (["01", "A1"], "01", ["01", "A1"]),
        (["0", "1"], "unknown", ["0", "1", "unknown"]),
        (["True", "False"], "maybe", ["True", "False", "maybe"]),
        (["1", "2"], "3", [1, 2, 3]),
        (["-1", "0"], "1", [-1, 0, 1]),
        (["true", "False"], "true", [True, False]),
        (["01", "02"], "03", ["01", "02", "03"]),
        (["1", "2"], "2.5", [1.0, 2.0, 2.5]),
        (["+1", "-1"], " 0", [1, -1, 0]),
        ([" 1", "2"], "2.5 ", [1.0, 2.0, 2.5]),
        (["1_0", "2_0"], "٣", ["1_0", "2_0", "٣"]),
        (["-01", "01"], "inf", ["-01", "01", "inf"]),
        (["nan", "inf"], "inf", ["nan", "inf"]),
    ],
)
def test_labels_of_a_csv_are_numbers_where_all_are_written_so(tmp_path, first, then, found):
    rows = [{"label": first[n % 2] if n < 10_000 else then, "text": "a"} for n in range(10_009)]
    write_rows(tmp_path, ".csv", rows)
    read = _read(tmp_path, *CLASSES)
    values = read.unique("label")
    assert values == found and [*map(type, values)] == [*map(type, found)]


# Quotes of a .tsv that stand in a text, and those around one.
QUOTED = [
    ('text\tlabel\n"aaa\t0\nbbb" ccc\t1\nddd\t1\n', [('"aaa', 0), ('bbb" ccc', 1), ("ddd", 1)]),
    ('"text"\t"label"\n"aaa"\t0\nb\t1\n', [("aaa", 0), ("b", 1)]),
    ('label\ttext\n0\t"Good" it was\n1\tb\n', [('"Good" it was', 0), ("b", 1)]),
    ('label\ttext\n0\t5" wide\n1\tb "so"\n', [('5" wide', 0), ('b "so"', 1)]),
    ('text\tlabel\n"a\nb ""c"""\t0\n"a\tb"\t1\n', [('a\nb "c"', 0), ("a\tb", 1)]),
    (f'text\tlabel\n"{"a" * 200_000}"\t0\n', [("a" * 200_000, 0)]),
]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.csv", "text,label\n" + "a name,1,\n" * 99, [("a name", 1)] * 99),  # a comma too many
        ("a.csv", "\n  \ntext,label\n\ngood,1\n\nbad,0\n\n", [("good", 1), ("bad", 0)]),
        *(("a.tsv", *each) for each in QUOTED),
    ],
)
def test_rows_of_a_table_are_those_of_its_lines(tmp_path, name, text, rows):
    (tmp_path / name).write_text(text, encoding="utf-8")
    read = _read(tmp_path / name, *CLASSES)
    assert [*zip(read["text"], read["label"], strict=True)] == rows


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_what_pandas_writes_is_read(tmp_path, quoting):
    """Code, say, whose tabs and lines stand in quotes."""
    rows = [("if a:\n\treturn", 0), ("a\tb\n", 1), ('"so"\n', 1), ("c", 0), (' "d', 1)]
    for suffix, sep in ((".tsv", "\t"), (".csv", ",")):
        file = tmp_path / f"a{suffix}"
        table = pandas.DataFrame(rows, columns=["text", "label"])
        table.to_csv(file, sep=sep, quoting=quoting, index=False)
        read = _read(file, *CLASSES)
        assert [*zip(read["text"], read["label"], strict=True)] == rows


def test_keys_that_only_later_messages_have_are_kept(tmp_path):
    turns = [{"role": "user", "content": "a"}]
    rows = [{"messages": turns}] * 1000 + [
        {"messages": [{**turns[0], "name": "b"}]},
        {"messages": turns},
    ]
    write_rows(tmp_path, ".jsonl", rows)
    found = [row[0].get("name") for row in _read(tmp_path)["messages"]]
    assert found == [None] * 1000 + ["b", None]


def test_a_split_to_validate_on_has_the_classes_of_the_training(tmp_path):
    """Its one review has two stars of five: by itself that would read as the third class."""
    path = str(write_archive(tmp_path))
    changes = {"path": path, "validation_split": "test", "seq_len": 24, "limit": 6}
    data = opened("yelp", "smollm2_360m_yelp", **changes)
    (turn,) = data.validation_turns(rank=0, world_size=1)
    assert turn.microbatch.labels.tolist() == [REVIEWS[0][1]] and turn.counts
    assert (data.num_samples, data.num_valid_labels) == (6, 1)


def test_each_split_that_datasets_saved_is_a_file_of_its_own(tmp_path):
    changes = {"path": str(write_saved(tmp_path)), "validation_split": "test", "seq_len": 24}
    data = opened("yelp", "smollm2_360m_yelp", labels=[0, 1, 2, 3, 4], **changes)
    assert (data.num_samples, data.num_valid_labels) == (6, 1)


def test_a_class_of_the_validation_alone_is_told_with_its_split(tmp_path):
    for split, stars in (("train", "xy"), ("test", "z")):
        rows = [{"text": "a", "label": star} for star in stars]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, model = configs("yelp", "smollm2_360m_yelp", path=str(tmp_path), seq_len=8)
    with pytest.raises(ConfigError, match=r"data.validation_split=test: .* also holds z; name ev"):
        build_data(replace(data, validation_split="test"), replace(model, num_labels=2), 0)


@pytest.mark.parametrize(("limit", "num_samples"), [(None, 4), (1, 1)])
def test_a_part_of_a_file_is_a_split(tmp_path, limit, num_samples):
    """A limit is of the training's split alone."""
    changes = {"path": str(write_jsonl(tmp_path)), "seq_len": 24, "limit": limit}
    changes |= {"split": "train[:4]", "validation_split": "train[4:]"}
    data = opened("yelp", "smollm2_360m_yelp", labels=[0, 1, 2, 3, 4], **changes)
    assert (data.num_samples, data.num_valid_labels) == (num_samples, 2)


@pytest.mark.parametrize(
    ("training", "validation"),
    [
        ("train[:90%]", "train[90%:]"),
        ("train[:-10%]", "train[-10%:]"),
        ("train[:100]", "train[-10:]"),
        ("train[5:100]+train[200:]", "train[100:200]+test"),
        ("train[:90%]", "train[1000:]"),  # nobody knows before it is read
        (None, "test[:5]"),
        ("train[_:5]", "train"),  # as `datasets` will say
        ("test", "eval"),
    ],
)
def test_parts_without_rows_in_common_may_be_trained_and_validated_on(training, validation):
    changes = [f"data.validation_split={validation!r}"]
    changes += [f"data.split={training!r}"] if training else []
    assert not [*check_validation(composed("data=yelp", *changes))]


@pytest.mark.parametrize(
    ("training", "validation"),
    [("train", "train[:1_000]"), ("test", "all"), ("train[50:]", "train[:-50]")],
)
def test_parts_with_rows_in_common_are_refused(training, validation):
    words = [f"data.split={training!r}", f"data.validation_split={validation!r}"]
    (refusal,) = check_validation(composed("data=yelp", *words))
    assert refusal[:2] == ("data.validation_split", "has rows that are trained on")


@pytest.mark.parametrize(
    ("names", "validation"),
    [
        (("part-0", "part-1", "heldout"), "heldout"),
        (("reviews_test",), "test"),
        (("train_sft", "train_gen"), "train_gen"),
        (("train_val", "train"), "validation"),
    ],
)
def test_files_that_are_trained_on_are_not_validated_on(tmp_path, names, validation):
    for name in names:
        (tmp_path / f"{name}.csv").write_text("text,label\na,1\nb,2\n")
    data, model = configs("yelp", "smollm2_360m_yelp", path=str(tmp_path), seq_len=8)
    of = rf"data.validation_split={validation}: reads {tmp_path}/\w+.csv, which is trained on"
    with pytest.raises(ConfigError, match=of):
        build_data(replace(data, validation_split=validation), replace(model, num_labels=2), 0)


def test_of_files_that_are_no_tables_hidden_ones_alone_are_left_out(tmp_path):
    for name in ("__init__.txt", ".hidden.txt", "b.txt"):
        (tmp_path / name).write_text("a")
    data, _ = configs("offline", path=str(tmp_path))
    assert [file.name for file in data_files(data)] == ["__init__.txt", "b.txt"]


# Files of a folder, and of a path in it, by split, those that are read.
FILES: list[tuple[str, dict[tuple[str, str], str]]] = [
    (
        "train.csv eval.csv test.csv dataset_infos.json __cache/test.csv",
        {(".", split): f"{split}.csv" for split in ("train", "eval", "test")},
    ),
    (
        "more/state.jsonl more/state.json more/dataset_info.json",
        {("more", "train"): "more/state.jsonl"},
    ),
    (
        "a[1].jsonl a1.jsonl d[1]/b.jsonl d1/b.jsonl reviews_Test.jsonl test/c.jsonl latest.jsonl",
        {
            ("a[1].jsonl", "train"): "a[1].jsonl",
            ("d[1]", "train"): "d[1]/b.jsonl",
            (".", "train"): "a1.jsonl a[1].jsonl d1/b.jsonl d[1]/b.jsonl latest.jsonl",
            (".", "test"): "reviews_Test.jsonl test/c.jsonl",
        },
    ),
    (
        "train/test_of_time.csv train/b.csv test/train_x.csv test/deep/dev.csv val.csv "
        "testing.csv evaluation.csv more/training.csv dev-set/train.csv",
        {
            (
                ".",
                "train",
            ): "dev-set/train.csv more/training.csv train/b.csv train/test_of_time.csv",
            (".", "test"): "test/deep/dev.csv test/train_x.csv",
            (".", "eval"): "evaluation.csv test/deep/dev.csv test/train_x.csv testing.csv",
            (".", "validation"): "val.csv",
        },
    ),
]


@pytest.mark.parametrize(("names", "read"), FILES)
def test_files_of_a_split_are_found_by_their_names_and_folders(tmp_path, names, read):
    """In the words of `datasets`, which takes names for patterns; hidden ones and descriptions are left out."""
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = f"text\n{name}\n" if name.endswith(".csv") else json.dumps({"text": name})
        (tmp_path / name).write_text(text)
    for (path, split), found in read.items():
        config = composed("data=yelp_causal", f"data.split={split}", "data.text_column=text").data
        config.path = str(tmp_path / path)
        table, _ = read_table(config, data_files(config), tmp_path / ".scratch")
        assert [*table["text"]] == found.split()


@pytest.mark.parametrize("name", ["{}.csv", "{}/a.csv"])
def test_names_with_words_of_two_splits_are_of_both_as_datasets_reads_them(tmp_path, name):
    words = ["train", "train_test", "dev-train", "test 2", "train+test", "fêtest", "(test)", "val."]
    for word in words:
        file = tmp_path / "there" / name.format(word)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text\n{word}\n", encoding="utf-8")
    there = {"data_dir": str(tmp_path / "there"), "cache_dir": str(tmp_path / "cache")}
    for split, theirs in datasets.load_dataset("csv", **there).items():
        read = _read(tmp_path / "there", f"data.split={split}")
        assert sorted(read["text"]) == sorted(theirs["text"])


def test_each_column_of_a_table_has_tokens_of_its_own(tmp_path):
    (tmp_path / "a.csv").write_text("one,two\n" + "a name,some words\n" * 99)
    asked: dict[str, Any] = {"path": str(tmp_path / "a.csv"), "seq_len": 8, "micro_batch_size": 1}
    for column, text in (("one", "a name"), ("two", "some words")):
        data = opened("yelp_causal", text_column=column, **asked)
        first = in_stored_order(data).microbatches[0].inputs["input_ids"][0]
        assert first.tolist() == ([*TOKENIZER.encode(text).ids, 0] * 8)[:8]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_columns_of_a_job_for_slurm_are_looked_at_here(write, tmp_path, cache):
    config = copy.deepcopy(composed("data=yelp", "cluster=slurm", "model=smollm2_360m_yelp"))
    config.data.path = str(write(tmp_path))
    packed = set(cache.glob("*/about.json"))
    check_data(config)
    for key, column in (("text_column", "review"), ("label_column", "stars")):
        wrong = replace(config, data=replace(config.data, **{key: column}))
        with pytest.raises(ConfigError, match=rf"data.{key}={column}: no such column in .*; use"):
            check_data(wrong)
    assert set(cache.glob("*/about.json")) == packed, "nothing is packed here"


def test_names_that_a_data_set_knows_are_its_classes(tmp_path):
    names = datasets.ClassLabel(names=["worst", "bad", "fair", "good", "best"])
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [4, 1]})
    table.cast_column("label", names).save_to_disk(tmp_path / "named")
    hashes = set[str]()
    for labels, classes in ((None, [4, 1]), (["best", "good", "fair", "bad", "worst"], [0, 3])):
        changes = {"path": str(tmp_path / "named"), "labels": labels, "seq_len": 8}
        data = opened("yelp", "smollm2_360m_yelp", **changes)
        assert [int(t.labels[0]) for t in in_stored_order(data).microbatches] == classes
        names = ["worst", "bad", "fair", "good", "best"]
        assert data.label_names == (labels or names)
        hashes.add(data.tokens_hash)
    assert len(hashes) == 2, "no checkpoint goes on with its classes in another order"
    data, model = configs("yelp", "smollm2_360m_yelp", path=str(tmp_path / "named"))
    with pytest.raises(ConfigError, match=r"has 5 classes \(worst,.*; set model.num_labels=5"):
        build_data(data, replace(model, num_labels=2), 0)


@pytest.mark.parametrize("asked", [None, ["no", "yes"]])
def test_rows_without_a_label_are_refused_by_their_value(asked):
    """As of SNLI, and of the test splits of GLUE."""
    with pytest.raises(ConfigError, match=r"data.label_column=label: holds -1, which is no class"):
        classes_of([0, -1, 1], 2, column="label", asked=asked, names=["no", "yes"])


@pytest.mark.parametrize("shape", ["cached", "cached_parts"])
def test_what_was_fetched_from_the_hub_is_read_without_it(tmp_path, cache, monkeypatch, shape):
    """As `datasets` keeps it: <id>/<subset>/<version>/<fingerprint>/."""
    monkeypatch.setattr(find_weights, "is_online", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache / "datasets"))
    subsets = ["one", "two"] if shape == "cached_parts" else ["default"]
    for subset in subsets:
        kept = cache / "datasets" / f"me___{shape}" / subset / "0.0.0" / "0123abcd"
        (tmp_path / subset).mkdir()
        rows = write_parquet(tmp_path / subset)
        builder = Parquet(
            data_files={
                "train": [str(rows / "train-00000-of-00001.parquet")],
                "test": [str(rows / "test-00000-of-00001.parquet")],
            },
            cache_dir=str(tmp_path / "built"),
            dataset_name=shape,
            config_name=subset,
        )
        builder.download_and_prepare()
        kept.parent.mkdir(parents=True)
        shutil.copytree(builder.cache_dir, kept)
    changes = {"path": f"me/{shape}", "seq_len": 24, "limit": 4}
    if len(subsets) > 1:
        with pytest.raises(ConfigError, match=r"data.path=me/cached_parts: .*data.subset"):
            opened("yelp", "smollm2_360m_yelp", **changes)
        changes["subset"] = "two"
    data = opened("yelp", "smollm2_360m_yelp", validation_split="test", **changes)
    assert data.source == f"hub's cache, offline: me/{shape}"
    assert (data.num_samples, data.num_valid_labels) == (4, 1)


def test_reviews_that_can_not_be_had_fail_without_asking_again_and_again(monkeypatch):
    """The client of the hub would, for half a minute, if it were not told to look into its cache alone."""
    monkeypatch.setattr(find_weights, "is_online", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=r"data.path=zeroexp-tests/none: .*on the hub or in its"):
        opened("yelp", "smollm2_360m_yelp", path="zeroexp-tests/none")
    assert datasets.config.HF_HUB_OFFLINE and huggingface_hub.constants.HF_HUB_OFFLINE


# --- conversations

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTION = [{"role": "user", "content": "What is a slice?"}]
ANSWER = [{"role": "assistant", "content": "An object of a part of a sequence."}]


def give_a_chat_template(folder: Path, template: str | None = TEMPLATE) -> None:
    """To a folder of weights: the shipped tokenizer, with a template."""
    shutil.copyfile(CORPUS / "tokenizer.json", folder / "tokenizer.json")
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def chatting(folder: Path, template: str | None = TEMPLATE) -> str:
    give_a_chat_template(folder, template)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return str(folder)


def of_rows(tmp_path: Path, rows: list[dict[str, object]], **changes) -> Data:
    template = changes.pop("template", TEMPLATE)
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, model = configs("hf", path=str(file), seq_len=6, **changes)
    return build_data(data, replace(model, weights=chatting(tmp_path, template)), 0)


def stream_of(data: Data) -> tuple[list[int], list[bool]]:
    """The tokens of all samples in sequence, and which of them count as labels."""
    rows = in_stored_order(data).microbatches
    tokens, counts = rows[0].inputs["input_ids"][0, :1].tolist(), [False]
    for row in rows:
        assert row.inputs["input_ids"][0, 0] == tokens[-1]
        inputs, labels = row.inputs["input_ids"][0].tolist(), row.labels[0].tolist()
        for token, label in zip([*inputs[1:], None], labels, strict=True):
            assert label in (-100, token) or token is None
            counts.append(label != -100)
            tokens.append(label if token is None else token)
    return tokens, counts


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("column", [None, "messages"])
def test_messages_go_through_the_chat_template_and_all_tokens_count(tmp_path, column):
    data = of_rows(tmp_path, [{"messages": QUESTION + ANSWER}] * 3, text_column=column)
    text = f"user: {QUESTION[0]['content']}\nassistant: {ANSWER[0]['content']}\n"
    tokens, counts = stream_of(data)
    assert tokens == (ids(text) * 3)[: len(tokens)] and all(counts[1:])


@pytest.mark.parametrize(
    ("form", "day"),
    [("%-d %b %Y", "26 Jul 2024"), ("%F", "2024-07-26"), ("%d.%m. %T %%d", "26.07. 00:00:00 %d")],
)
def test_a_template_that_writes_the_date_writes_the_same_every_day(tmp_path, form, day):
    template = f"{{{{ strftime_now('{form}') }}}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    data = of_rows(tmp_path, [{"messages": QUESTION}] * 9, template=template)
    assert TOKENIZER.decode(stream_of(data)[0]).startswith(f"{day}What is a slice?")


@pytest.mark.parametrize("talks", [False, True])
def test_only_a_completion_counts_in_the_loss(tmp_path, talks):
    prompt, completion = "A slice is", " a part of a sequence of any kind."
    rows: list[dict[str, object]] = [{"prompt": prompt, "completion": completion}]
    before, whole, end = prompt, prompt + completion, [0]
    if talks:
        rows = [{"prompt": QUESTION, "completion": ANSWER}]
        before = f"user: {QUESTION[0]['content']}\nassistant:"
        whole, end = f"{before} {ANSWER[0]['content']}\n", []
    data = of_rows(tmp_path, rows * 40)
    document = [*ids(whole), *end]
    num_prompt = len(ids(before))
    assert document[:num_prompt] == ids(before), "the tokenizer cuts them alike"
    marks = ([False] * num_prompt + [True] * (len(document) - num_prompt)) * 40
    starts = range(0, 40 * len(document) - 6, 6)
    # A sample of a prompt alone teaches nothing.
    starts = [start for start in starts if any(marks[start + 1 : start + 7])]
    kept = [marks[start + 1 : start + 7] for start in starts]
    found = in_stored_order(data)
    inputs = [row.inputs["input_ids"][0].tolist() for row in found.microbatches]
    assert inputs == [(document * 40)[start : start + 6] for start in starts]
    labels = [row.labels[0] for row in found.microbatches]
    assert [(each != -100).tolist() for each in labels] == kept
    assert found.num_valid == sum(map(sum, kept)) and found.num_tokens == 6 * len(kept)
    words = [token for each in labels for token in each.tolist() if token != -100]
    answers = [token for token, mark in zip(document * 40, marks, strict=True) if mark]
    assert words == answers[: len(words)] and len(answers) - len(words) < 6


def test_a_prompt_begins_as_the_tokenizer_lets_a_text_begin():
    """With a first token of its own, as LLaMA's does."""
    begins = Tokenizer.from_str(TOKENIZER.to_str())
    begins.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", 1)])
    words = choose_tokenizer(DataConfig(), ModelConfig())
    encode = ConversationEncoder(words, begins, None)
    ((tokens, num_prompt),) = encode({"prompt": ["A slice"], "completion": [" is a part"]})
    assert tokens == [1, *ids("A slice is a part"), words.end_of_text]
    assert num_prompt == 1 + len(ids("A slice"))


def test_a_replica_that_steps_by_itself_averages_over_its_own_labels(tmp_path):
    """Its gradients count once for each replica."""
    prompt = "A slice is a part of a sequence of any kind."
    rows: list[dict[str, object]] = [
        {"prompt": prompt[: 4 + 7 * n], "completion": prompt[: 40 - 6 * n]} for n in range(6)
    ]
    data = of_rows(tmp_path, rows * 9, global_batch_size=16, micro_batch_size=2)
    grid, seen = RankGrid(4, num_groups=2), set()
    for group in (range(2), range(2, 4)):
        steps = [
            data.step_batch(0, rank=rank, world_size=4, replica=grid.group(rank)) for rank in group
        ]
        own = sum(int((m.labels != -100).sum()) for step in steps for m in step.microbatches)
        assert [step.num_valid for step in steps] == [2 * own] * 2
        seen.add(own)
    assert len(seen) == 2, "or nothing is shown"


@pytest.mark.parametrize(
    ("rows", "changes", "line"),
    [
        ([{"messages": [{"role": "user"}]}], {}, r"row 1, column messages: a message without"),
        ([{"messages": QUESTION}, {"messages": []}], {}, r"row 2, column messages: holds no list"),
        (
            [{"messages": QUESTION}],
            {"template": None},
            r"=messages: holds messages, and .* without",
        ),
        (
            [{"messages": QUESTION}],
            {"template": "{{ raise_exception('begin with a system') }}"},
            r"row 1, column messages: the chat template refuses it \(begin with a system\); change",
        ),
        ([{"prompt": "a", "completion": ANSWER}], {}, r"row 1, column completion: .*str and list"),
        ([{"prompt": "a", "completion": None}], {}, r"=completion: 1 of 1 rows .* have no value"),
        ([{"prompt": "a"}], {}, r"data.text_column=text: no such column in .*; use one of prompt"),
    ],
)
def test_conversations_that_are_none_are_one_line(tmp_path, rows, changes, line):
    with pytest.raises(ConfigError, match=line) as caught:
        of_rows(tmp_path, rows, **changes)
    assert "\n" not in str(caught.value)


# --- tokenizers


def test_the_shipped_text_has_its_licence_and_its_tokenizer_reads_anything():
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (CORPUS / "LICENSE.txt").read_text()
    assert "python_reference.txt" in (CORPUS / "ABOUT.md").read_text()
    assert TOKENIZER.get_vocab_size() == 2048
    for text in ("def f(x): return x", "naïve — ½ 🙂 \x00\x7f", "\t\n  "):
        assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_real_weights_bring_their_own_tokenizer(tmp_path):
    words = Tokenizer.from_file(str(CORPUS / "tokenizer.json"))
    words.add_tokens(["assert"])
    # A file keeps what it was last called with: no reason to cut or to pad a text.
    words.enable_truncation(8)
    words.enable_padding(length=12, pad_id=5)
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    data, model = configs("offline", seq_len=16)
    theirs = build_data(data, replace(model, weights=str(tmp_path)), 0)
    shipped = build_data(replace(data, vocab_size=2048), replace(model, weights=str(tmp_path)), 0)
    assert (theirs.vocab_size, shipped.vocab_size) == (2049, 2048)
    ids = torch.cat([turn.labels for turn in in_stored_order(theirs).microbatches])
    assert 2048 in ids and 7 in ids and 0 not in ids
    assert abs(theirs.num_samples - shipped.num_samples) < shipped.num_samples / 10


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "end"),
    [
        (2, "<|endoftext|>", 0),  # transformers' default, which is a word of this tokenizer
        (None, {"content": "<|endoftext|>"}, 0),
        (2, None, 2),
        (None, None, None),
    ],
)
def test_texts_end_with_a_token_that_is_no_word(tmp_path, of_model, of_tokenizer, end):
    shutil.copyfile(CORPUS / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": of_model}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": of_tokenizer}))
    data, model = configs("offline", seq_len=16)
    model = replace(model, weights=str(tmp_path))
    if end is None:
        with pytest.raises(
            ConfigError, match=r"model\.weights=.* set eos_token_id in config\.json"
        ):
            choose_tokenizer(data, model)
    else:
        assert choose_tokenizer(data, model).end_of_text == end


ADDED = {"content": "<|im_end|>", "special": True}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"2048": ADDED}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|im_end|>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"end_token": "<|im_end|>"}}),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
        ("special_tokens_map.json", {"eos_token": ADDED}),
        ("added_tokens.json", {"<|im_end|>": 2048}),
    ],
)
def test_tokens_that_stand_beside_the_tokenizers_own_file_are_not_cut_into_letters(
    tmp_path, file, content
):
    """transformers reads each of them as one token; saved anew they are in tokenizer.json."""
    data, model = configs("offline", seq_len=16)
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}
    chatting(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(usual))
    choose_tokenizer(data, replace(model, weights=str(tmp_path)))
    content = {**usual, **content} if file == "tokenizer_config.json" else content
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"model.weights=.* name <\|im_end\|>, tokenizer.json do"):
        choose_tokenizer(data, replace(model, weights=str(tmp_path)))
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "anew")
    shutil.copyfile(tmp_path / "config.json", tmp_path / "anew/config.json")
    words = choose_tokenizer(data, replace(model, weights=str(tmp_path / "anew")))
    ids = Tokenizer.from_file(str(words.file)).encode("a<|im_end|>").ids
    assert ids == AutoTokenizer.from_pretrained(tmp_path)("a<|im_end|>").input_ids
    assert len(ids) == 2


def test_what_decides_tokens_is_in_their_identity(tmp_path):
    give_a_chat_template(tmp_path, TEMPLATE)
    plain = TokenizerChoice(tmp_path / "tokenizer.json", 0, 0)
    first = identity_of_tokenizer(plain)
    assert identity_of_tokenizer(replace(plain, end_of_text=1)) != first
    assert identity_of_tokenizer(replace(plain, padding=1)) != first
    give_a_chat_template(tmp_path, f"{TEMPLATE} ")
    second = identity_of_tokenizer(plain)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert len({str(each) for each in (first, second, identity_of_tokenizer(plain))}) == 3


def test_the_shipped_text_is_packed_once_for_all_copies_of_the_code(cache, tmp_path, monkeypatch):
    """Every sweep on Slurm has one."""
    opened("offline", seq_len=40)
    before = {path.name for path in cache.iterdir()}
    shutil.copytree(CORPUS, tmp_path / "corpus")
    monkeypatch.setattr("zeroexp.data.source_files.CORPUS", tmp_path / "corpus")
    monkeypatch.setattr("zeroexp.data.choose_tokenizer.CORPUS", tmp_path / "corpus")
    opened("offline", seq_len=40)
    assert {path.name for path in cache.iterdir()} == before


@pytest.mark.parametrize("used", [False, True])
def test_a_tokenizer_may_have_words_without_a_row_in_the_embedding(tmp_path, used):
    """As Gemma 3's has one for images; what must fit is the largest token of the data, the validation's too."""
    words = Tokenizer.from_file(str(CORPUS / "tokenizer.json"))
    words.add_special_tokens(["<image>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (tmp_path / "train.txt").write_text("some words\n" * 99)
    (tmp_path / "test.txt").write_text("an <image> of it\n" * 99 if used else "others\n" * 99)
    config = composed("data=hf", f"data.path={tmp_path}", "data.validation_split=test", *TINY_GEMMA)
    model = replace(config.model, weights=str(tmp_path))
    if used:
        with pytest.raises(ConfigError, match=r"vocab_size=2048: the data have tokens up to 2048"):
            check_data(replace(config, model=model))
    else:
        check_data(replace(config, model=model))


TINY_GEMMA = [
    *("data.seq_len=8", "model=hf", "model.path=null"),
    *("+model.hf_config.model_type=gemma3_text", "+model.hf_config.vocab_size=2048"),
]


def test_ids_with_holes_are_counted_by_the_largest(tmp_path):
    """And are packed in more than 16 bits where the largest one needs them."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (tmp_path / "a.txt").write_text("a b\n" * 99)
    data, model = configs("hf", path=str(tmp_path / "a.txt"), seq_len=8)
    read = build_data(data, replace(model, weights=str(tmp_path)), 0)
    assert read.vocab_size == 70_001
    assert 70_000 in in_stored_order(read).microbatches[0].labels[0]


def test_a_text_must_have_room_beside_the_tokenizers_own_tokens(tmp_path):
    words = Tokenizer.from_file(str(CORPUS / "tokenizer.json"))
    words.post_processor = TemplateProcessing(single="! $A #", special_tokens=[("!", 1), ("#", 3)])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    file = write_jsonl(tmp_path)
    for seq_len in (2, 3):
        data, model = configs("yelp", "smollm2_360m_yelp", path=str(file), seq_len=seq_len)
        model = replace(
            model, weights=str(tmp_path), hf_config={**model.hf_config, "pad_token_id": 0}
        )
        if seq_len == 3:
            first = in_stored_order(build_data(data, model, 0)).microbatches[0].inputs["input_ids"]
            assert first[0, 0] == 1 and first[0, 2] == 3
        else:
            with pytest.raises(ConfigError, match=r"data.seq_len=2: .*adds 2 tokens .*use 3 or mo"):
                build_data(data, model, 0)


def test_weights_without_a_tokenizer_are_one_line(tmp_path):
    data, model = configs("offline")
    with pytest.raises(ConfigError, match=r"no tokenizer.json in it.*data.vocab_size=2048"):
        build_data(data, replace(model, weights=str(tmp_path)), 0)


# --- the cache


@pytest.mark.slow
def test_ranks_that_start_together_write_once(cache):
    context = multiprocessing.get_context("forkserver")
    together, (ours, theirs) = context.Barrier(2), context.Pipe(duplex=False)
    racers = [context.Process(target=race, args=(cache, together, theirs)) for _ in "ab"]
    for racer in racers:
        racer.start()
    seen = [ours.recv() for _ in racers]
    for racer in racers:
        racer.join()
    assert [name[:3] for name in seen[0] if name != packed_cache.DIGESTS] == ["by-", "fir"]
    assert seen == [seen[0]] * 2


def test_a_writer_that_fails_leaves_nothing(cache):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("disk full")

    before = {path.name for path in cache.iterdir()}
    with pytest.raises(RuntimeError, match="disk full"):
        packed_cache.cached({"test": "fail"}, fail)
    left = {path.name for path in cache.iterdir()} - before
    assert all(name.endswith(".lock") for name in left)
    folder = packed_cache.cached({"test": "fail"}, write_all)
    assert {path.name for path in folder.iterdir()} == {"all", packed_cache.DIGESTS}


def test_a_rank_that_waits_for_another_process_to_write_advances(cache):
    """The watchdog takes a rank that does nothing, as one that waits for a lock, for one that hangs."""
    lock = packed_cache.cached({"test": "wait"}, write_all).with_suffix(".lock")
    shutil.rmtree(lock.with_suffix(""))
    before = progress.done()
    with ThreadPoolExecutor() as pool:
        with locks.take(lock) or pytest.fail("somebody else has it"):
            waits = pool.submit(packed_cache.cached, {"test": "wait"}, write_all)
            while progress.done() == before:
                time.sleep(0.01)
        assert waits.result().is_dir()


def test_where_no_lock_can_be_had_the_cache_is_written_without(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setenv("ZEROEXP_CACHE", str(tmp_path))
    assert packed_cache.cached({"test": "no locks"}, write_all).is_dir()
    assert not [*tmp_path.glob(".*")]


def test_two_that_see_no_lock_of_each_other_may_write_at_once(cache):
    def write_slowly(folder: Path) -> None:
        write_all(folder)
        packed_cache._fill(cache / folder.name, write_all)

    assert (packed_cache.cached({"test": "both"}, write_slowly) / "all").is_file()


def write_all(folder: Path) -> None:
    (folder / "all").write_text("x")


def test_a_killed_writer_blocks_nobody(cache):
    process = multiprocessing.get_context("forkserver").Process(target=die, args=(cache,))
    process.start()
    process.join()
    assert process.exitcode == 9
    folder = packed_cache.cached({"test": "kill"}, write_all)
    assert {path.name for path in folder.iterdir()} == {"all", packed_cache.DIGESTS}


@pytest.mark.slow
def test_a_rank_that_finds_the_cache_imports_neither_datasets_nor_transformers():
    opened("offline", seq_len=40)
    code = (
        "import sys; from zeroexp.config.keys import DataConfig, ModelConfig;"
        "from zeroexp.data.batches import build_data; from zeroexp.models.module import build_model;"
        "build_model(ModelConfig(family='mlp', mlp={'width': 8, 'depth': 1}), seed=0);"
        "data = build_data(DataConfig(seq_len=40), ModelConfig(), 0);"
        "assert data.step_batch(0, rank=0, world_size=2).num_valid == 480;"
        "sys.exit(bool({'datasets', 'transformers', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
