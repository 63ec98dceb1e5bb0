"""mlflow.json in a run folder: which MLflow run it became."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from zeroexp.tracking.files import read_json, write_json

LINK = "mlflow.json"


@dataclass(frozen=True)
class Link:
    uri: str
    experiment_id: str
    run_id: str
    attempt: int  # a run that is run again from its start is another run in MLflow
    closed: bool = False  # MLflow knows how the run ended

    @classmethod
    def read(cls, folder: Path) -> Link | None:
        """None where there is none, or one that nobody can read: its run is then sent as another."""
        try:
            content = read_json(folder / LINK)
            return None if content is None else cls(**content)
        except (ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        write_json(folder / LINK, asdict(self))


def attempt_of(folder: Path) -> int:
    """How often the run was run before: what those attempts left was moved to earlier/<number>/."""
    return sum(1 for _ in (folder / "earlier").glob("*"))
