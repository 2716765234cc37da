"""Ray: processes, placement, and the handles that satisfy the protocols."""
