"""Metrics to Weights & Biases. The key comes from the environment (WANDB_API_KEY) or `wandb login`, never a flag."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vime.errors import ConfigError
from vime.observability.metrics import check_names
from vime.types import Metrics

_ID_FILE = "wandb.json"
_STEP = "rollout_id"
_MISSING = "--use-wandb needs the package wandb; install vime[wandb], or leave it out"


def find_run_id(folders: Iterable[Path]) -> str | None:
    """The W&B run that was kept in the first of these folders that has one."""
    for folder in folders:
        if (file := folder / _ID_FILE).exists():
            return str(json.loads(file.read_text(encoding="utf-8"))["run_id"])
    return None


class WandbWriter:
    """Satisfies `MetricWriter`. Charts are over `rollout_id`, so a resumed run may go over the same steps again.

    Args:
        folder: the run's; its name is the W&B run's name.
        keep_id_in: folders where the run's id is kept, for a resume.
        run_id: of a run to go on with, or an id of the user's choice for a new one; None makes one up.
        settings: plain data, shown with the run; no secrets.
        mode: "online", "offline" (files to be uploaded by `wandb sync`) or "disabled".
        directory: where wandb keeps its files.
        project, group, entity, host: as W&B calls them; None leaves them to wandb's own settings.
    Raises: ConfigError if the package is missing, or W&B cannot be reached or refuses the key.
    """

    def __init__(
        self,
        *,
        folder: Path,
        keep_id_in: Sequence[Path],
        run_id: str | None,
        settings: Mapping[str, Any],
        mode: Literal["online", "offline", "disabled"],
        directory: Path,
        project: str | None,
        group: str | None,
        entity: str | None,
        host: str | None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(_MISSING) from error
        directory.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"base_url": host} if host is not None else {}
        try:
            self._run = wandb.init(
                project=project,
                group=group,
                entity=entity,
                name=folder.name,
                id=run_id,
                resume="allow" if mode == "online" else None,  # offline, the files of one id are joined by `wandb sync`
                dir=str(directory),
                mode=mode,
                config=dict(settings),
                settings=wandb.Settings(console="off", silent=True, **options),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"--use-wandb: {error}; set WANDB_API_KEY or run `wandb login`, or write files by --wandb-mode offline"
            ) from error
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        for place in keep_id_in:
            place.mkdir(parents=True, exist_ok=True)
            (place / _ID_FILE).write_text(json.dumps({"run_id": self._run.id}) + "\n", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        """Log one step's metrics. Raises: UnknownMetric."""
        check_names(metrics)
        self._run.log({_STEP: step, **metrics})

    def close(self) -> None:
        """Upload or write what is left."""
        import wandb

        self._run.finish()
        wandb.teardown()  # offline, 0.30 writes its file after `finish` has returned; this waits for it
