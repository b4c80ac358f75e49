"""Weights and bytes: named tensors, their digest, one payload, and the way back into live targets."""
