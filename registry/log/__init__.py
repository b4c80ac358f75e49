"""The record in SQL: what versions exist, what should run, who held what."""
