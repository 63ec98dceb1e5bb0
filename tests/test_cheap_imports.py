"""Imports of large libraries collect no garbage, and leave out what nobody needs of them."""

from __future__ import annotations

import gc
import sys

import pytest

from zeroexp.process.cheap_imports import importing_cheaply


def test_what_is_left_out_can_be_imported_later_and_what_is_there_stays() -> None:
    sys.modules.pop("this", None)
    with importing_cheaply("this", "json"):
        import json

        with pytest.raises(ImportError):
            import this
        assert json.loads("1") == 1 and not gc.isenabled()
    import this

    assert this.s and gc.isenabled()


def test_who_collects_no_garbage_goes_on_so() -> None:
    gc.disable()
    try:
        with importing_cheaply(), pytest.raises(ZeroDivisionError), importing_cheaply():
            raise ZeroDivisionError
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_blocks_may_be_nested() -> None:
    sys.modules.pop("this", None)
    with importing_cheaply("this"), importing_cheaply("this"):
        pass
    import this

    assert this.s
