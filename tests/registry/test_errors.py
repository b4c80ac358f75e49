"""The errors: one tree, grouped by what a handler does, that survive a process border."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.registry.helpers import in_child
from weightledger.registry import Registry, errors
from weightledger.registry.errors import WeightLedgerError

CLASSES = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, WeightLedgerError)
]


def test_the_tree_is_the_one_that_is_documented() -> None:
    assert sorted(found.__name__ for found in CLASSES if found is not WeightLedgerError) == [
        "ConflictError",
        "CorruptionError",
        "InUseError",
        "InvalidWeightsError",
        "NotFoundError",
        "SchemaError",
        "StorageError",
        "SyncError",
    ]
    assert all(found.__name__ in (errors.__doc__ or "") and found.__doc__ for found in CLASSES)


def test_handlers_of_builtin_errors_catch_the_two_that_mean_the_same() -> None:
    assert issubclass(errors.NotFoundError, LookupError) and not issubclass(errors.NotFoundError, KeyError)
    assert issubclass(errors.InvalidWeightsError, ValueError)
    others = set(CLASSES) - {errors.NotFoundError, errors.InvalidWeightsError}
    assert not any(issubclass(found, (LookupError, ValueError, OSError)) for found in others)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_comes_back_whole_from_a_pickle(kind: type[WeightLedgerError]) -> None:
    text = "v7 of policy 'default': expected …, found …; do …"
    error = pickle.loads(pickle.dumps(kind(text)))
    assert type(error) is kind and str(error) == text and error.args == (text,)


def _ask_for_what_is_not_there(folder: Path) -> None:
    Registry.open(folder, create=False)


def test_an_error_of_another_process_is_caught_by_its_class(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFoundError, match="no such file"):
        in_child(_ask_for_what_is_not_there, tmp_path / "nowhere")
