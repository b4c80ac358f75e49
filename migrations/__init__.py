"""Alembic migrations of the registry database."""
