"""Names of columns that a `vime.types.TrainBatch` may have in `extra`, [B] samples or [T] tokens."""

from __future__ import annotations

PG_WEIGHTS = "pg_loss_weights"
"""[T] column of `TrainBatch.extra`: what each token's policy loss is multiplied with, in place of `loss_weights`."""
CORRECTION_WEIGHTS = "correction_weights"
"""[T] column of `TrainBatch.extra`: what --use-tis and --use-rs multiply each token's policy loss with, where they have
been worked out before the first step."""
TOKEN_ADVANTAGES = "token_advantages"
"""[T] column of `TrainBatch.extra`: an advantage for each token, in place of its sample's."""
METRIC_WEIGHTS = "metric_weights"
"""[T] column of `TrainBatch.extra`: those of the trajectory mean, for metrics, where `loss_weights` are others."""
SHAPED_REWARDS = "shaped_rewards"
"""[B] column of `TrainBatch.extra`: what advantages are made of, where that is not the raw reward."""
TEACHER_LOG_PROBS = "teacher_log_probs"
"""[T] column of `TrainBatch.extra`: a teacher's of each token (on-policy distillation); NaN where the mask is 0."""
POLICY_VERSIONS = "policy_versions"
"""[T] column of `TrainBatch.extra`: the version that sampled each token; -1 where none is known."""
VALUES, RETURNS = "values", "returns"
"""[T] columns of `TrainBatch.extra`, of a critic: the value before each token when training on the rollout began, and
what the critic is trained towards."""
