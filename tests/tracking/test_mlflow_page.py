"""What a user sees at the address that a sweep ends with: the server that `ui_command` starts, in a browser."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from tests.browser import browse, needs_browser
from tests.mlflow_server import MlflowServer
from tests.run_folders import STRATEGIES, WORLD_SIZES
from zeroexp.tracking.mlflow import MlflowTracker

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WINDOW = "--window-size=1900,2400"


@pytest.mark.browser
@needs_browser
def test_the_address_of_a_sweep_shows_its_runs_alone_and_in_order(
    mlflow: MlflowServer, tmp_path: Path
) -> None:
    address = MlflowTracker(mlflow.uri, "zeroexp").address_of("study")
    assert address.startswith(f"{mlflow.uri}/#/experiments/")
    dom = browse(address, tmp_path, WINDOW).dom
    points = [f"{s}-buffer-n{n}" for s, n in product(STRATEGIES, WORLD_SIZES)]
    texts = [text.strip() for text in re.findall(r">([^<>]+)<", dom)]
    assert [text for text in texts if text in (*points, "of-another-sweep")] == points[::-1]
