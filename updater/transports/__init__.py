"""How bytes and instructions reach workers, and how their answers come back."""
