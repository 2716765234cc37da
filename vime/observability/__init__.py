"""What a run tells: metric names and their definitions, writers, timers, live progress, the run folder."""
