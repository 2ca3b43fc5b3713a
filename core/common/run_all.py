"""`run_all`: calls several functions, also after one of them failed."""

from __future__ import annotations

from collections.abc import Callable


def run_all(*steps: Callable[[], object]) -> None:
    """Call all ``steps`` in order, also after one of them raised an exception. Raises the first exception afterwards."""
    failure: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failure = failure or error
    try:
        if failure is not None:
            raise failure
    finally:
        failure = (
            None  # the exception's traceback refers to this frame, which must not refer to the exception
        )
