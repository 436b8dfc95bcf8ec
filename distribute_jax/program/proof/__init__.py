"""Which results are equal on all replicas, and what would hang, read off the traced step."""
