"""mlflow.json in a run folder names the MLflow run that it became."""

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
    attempt: int  # a run that is repeated from its start becomes another run in MLflow
    closed: bool = False  # True: MLflow knows how the run ended

    @classmethod
    def read(cls, folder: Path) -> Link | None:
        """Read the link; None if it is missing or unreadable, and then the run is sent as a new one."""
        try:
            content = read_json(folder / LINK)
            return None if content is None else cls(**content)
        except (ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        write_json(folder / LINK, asdict(self))


def attempt_of(folder: Path) -> int:
    """Return how often the run was repeated: each earlier attempt's files were moved to earlier/<number>/."""
    return sum(1 for _ in (folder / "earlier").glob("*"))
