"""The RL step, written on the protocols alone."""
