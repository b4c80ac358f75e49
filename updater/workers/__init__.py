"""What an updater knows of its workers and what it decides about each. Pure: no transport, no database, no clock."""
