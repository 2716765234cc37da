"""A training batch as a file of numpy arrays, for a look at what the trainer was given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from vime.types import TrainBatch


def write_train_data(path: Path, batch: TrainBatch) -> None:
    """Write the columns of a batch as .npz under their names; `extra.<name>` for further ones, `steps` as JSON text,
    `routed_experts.rows` and `.known`, and `support.ids` and `.starts`, where there are some.

    `numpy.load(path)` reads it. Raises: OSError (a full disk).
    """
    columns: dict[str, Any] = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    columns |= {f"extra.{name}": column for name, column in columns.pop("extra").items()}
    for part, names in {"routed_experts": ("rows", "known"), "support": ("ids", "starts")}.items():
        if (value := columns.pop(part)) is not None:
            columns |= {f"{part}.{name}": getattr(value, name) for name in names}
    columns["steps"] = json.dumps(columns["steps"])
    with open(path, "wb") as file:
        np.savez_compressed(file, **columns)
