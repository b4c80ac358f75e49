"""What runs in a worker's process: it checks, copies, notes and answers."""
