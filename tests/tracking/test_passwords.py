"""A store's password is nowhere on disk, screen or in MLflow: refused in words, taken from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_sweep import LIGHT, jobs, zeroexp
from tests.composing import composed
from zeroexp.config.keys import ConfigError
from zeroexp.process.server_address import without_password
from zeroexp.tracking.mlflow_store import STORE, Store, store_uri, with_store
from zeroexp.tracking.mlflow_upload_thread import Uploads

SECRET = "hunter2"


def files_with_it(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and (SECRET.encode() in path.read_bytes() or SECRET in path.name)
    ]


@pytest.mark.parametrize(
    "word",
    [
        f"tracking.uri=postgresql://me:{SECRET}@host/db",
        f"tracking.uri=sqlite:///x.db,'https://:{SECRET}@host'",
        f"tracking.urk=https://me:{SECRET}@host",
    ],
)
def test_in_a_word_it_is_refused_before_anything_is_written(tmp_path, word):
    refused = zeroexp(tmp_path, "-m", word, *LIGHT)
    assert refused.returncode == 2 and list(tmp_path.iterdir()) == []
    assert refused.stdout == "" and SECRET not in refused.stderr
    assert refused.stderr.count("\n") == 1 and "MLFLOW_TRACKING_PASSWORD" in refused.stderr


@pytest.mark.slow
def test_in_a_file_too(tmp_path):
    (tmp_path / "conf" / "tracking").mkdir(parents=True)
    text = f"name: mine\nmlflow: true\nexperiment: x\nuri: postgresql://me:{SECRET}@host/db\n"
    (tmp_path / "conf" / "tracking" / "mine.yaml").write_text(text)
    light = [word for word in LIGHT if "tracking" not in word]
    refused = zeroexp(tmp_path, "--config-dir", str(tmp_path / "conf"), "tracking=mine", *light)
    assert refused.returncode == 2 and not (tmp_path / "outputs").exists()
    assert "tracking.uri: holds a password" in refused.stderr and SECRET not in refused.stderr


@pytest.mark.slow
def test_of_the_environment_it_stays_there(tmp_path, monkeypatch):
    monkeypatch.setenv(STORE, f"http://me:{SECRET}@127.0.0.1:1")
    done = zeroexp(tmp_path, *LIGHT, "tracking=mlflow", "world_size=1")
    assert done.returncode == 0, done.stderr
    assert "no server answers at http://me@127.0.0.1:1" in done.stdout
    assert SECRET not in done.stdout + done.stderr and files_with_it(tmp_path) == []
    (job,) = jobs(tmp_path).values()
    assert job.config.tracking.uri == "http://me@127.0.0.1:1", "where it is sent later"
    assert store_uri(job.config.tracking.uri, tmp_path) == f"http://me:{SECRET}@127.0.0.1:1"
    assert SECRET not in Store(job.config.tracking.uri, "x", tmp_path).ui_command()


def test_the_store_of_the_environment_is_used_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STORE, "sqlite:///mine.db")
    assert store_uri(None, tmp_path / "outputs") == f"sqlite:///{tmp_path}/mine.db"
    assert store_uri("https://other", tmp_path / "outputs") == "https://other"
    config = with_store(composed("tracking=mlflow"))
    assert config.tracking.uri == f"sqlite:///{tmp_path}/mine.db", "also from another folder"
    monkeypatch.setenv(STORE, "databricks")
    with pytest.raises(ConfigError, match=f"^{STORE}=databricks is no store that MLflow writes to"):
        Uploads(composed("tracking=mlflow").tracking, tmp_path, "sweep")
    assert with_store(composed("tracking=files")) == composed("tracking=files")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host:5000/path", "https://host:5000/path"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
        (f"postgresql://me:{SECRET}:with@signs@host/db", "postgresql://me@host/db"),
        (f"mysql://h/d?password={SECRET}&ssl=1", "mysql://h/d?password&ssl=1"),
        ("sqlite:////a:b@c/mlflow.db", "sqlite:////a:b@c/mlflow.db"),
    ],
)
def test_what_is_shown(text, shown):
    assert without_password(text) == shown
