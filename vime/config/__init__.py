"""The resolved configuration: frozen, typed, complete. Built by vime.cli.resolve; never edited afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.config.algo_section import AlgoConfig
from vime.config.critic import CriticConfig
from vime.config.fault import FaultConfig
from vime.config.sections import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DebugConfig,
    EvalConfig,
    LogConfig,
    RewardConfig,
    RolloutConfig,
    SyncConfig,
    TrainConfig,
)
from vime.config.stream import StreamConfig
from vime.config.teacher import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run's settings. The three mappings hold only what the user set, under their owners' field names."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    log: LogConfig = field(default_factory=LogConfig)
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Fields of vLLM's AsyncEngineArgs."""
    router: Mapping[str, Any] = field(default_factory=dict)
    """Fields of vllm-router's RouterArgs."""


__all__ = [
    "AlgoConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "EvalConfig",
    "FaultConfig",
    "LogConfig",
    "RewardConfig",
    "RolloutConfig",
    "StreamConfig",
    "SyncConfig",
    "TeacherConfig",
    "TrainConfig",
]
