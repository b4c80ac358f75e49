"""A structure has one row, however often it is looked up, and whatever became of an earlier transaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from weightledger.registry import Registry
from weightledger.registry.log.models import Structure

ONE: dict[str, Any] = {"kind": "mapping", "tree": {"dict": ["a"]}}
OTHER: dict[str, Any] = {"kind": "mapping", "tree": {"dict": ["b"]}}


def test_equal_structures_have_one_row_and_others_have_another(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r") as registry, registry.ledger.writing() as conn:
        asked = [ONE, ONE, dict(ONE), OTHER, ONE, dict(OTHER), OTHER]
        first, again, equal, other, third, other_again, last = [
            registry.ledger.structure_id(conn, structure) for structure in asked
        ]
        assert first == again == equal == third
        assert other == other_again == last != first
        bodies = {key: json.loads(body) for key, body in conn.execute(select(Structure.id, Structure.body))}
        assert (bodies[first], bodies[other]) == (ONE, OTHER)


def test_a_row_that_was_undone_is_written_again(tmp_path: Path) -> None:
    with Registry.open(tmp_path / "r") as registry:
        with pytest.raises(ValueError, match="undone"), registry.ledger.writing() as conn:
            registry.ledger.structure_id(conn, ONE)
            raise ValueError("undone")
        with registry.ledger.writing() as conn:
            key = registry.ledger.structure_id(conn, ONE)
        with registry.ledger.reading() as conn:
            assert json.loads(conn.scalar(select(Structure.body).where(Structure.id == key)) or "") == ONE
