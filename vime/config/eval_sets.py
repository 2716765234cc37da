"""Held-out sets with everything settled: what `--eval-prompt-data`, `--eval-config` and the `--eval-*` flags amount to.

The YAML file of --eval-config, whose names are the flags' without `eval-` (upstream's):

    eval:
      defaults: {temperature: 0.0, max_response_len: 512}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: math, n_samples_per_eval_prompt: 16, temperature: 0.6}

A value is the set's own, else the file's default, else the `--eval-*` flag's, else the rollout's.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vime.config.ranges import LEAST_TEMPERATURE, WHY_LEAST_TEMPERATURE
from vime.config.yaml_file import read_yaml
from vime.errors import ConfigError

if TYPE_CHECKING:
    from vime.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One held-out set: where it is, how it is read, how its samples are drawn and scored."""

    name: str
    path: str
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    min_new_tokens: int
    max_response_len: int
    max_prompt_len: int | None
    """Longer prompts are dropped and counted; None drops none."""
    max_context_len: int | None
    """Tokens of prompt and response together; None is what the model has."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    rm_type: str | None
    """The built-in reward of this set; None is the run's reward. A sample's own metadata.rm_type gives way to it."""
    reward_key: str | None
    custom_generate_function_path: str | None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    """Put into each sample's metadata, over what the file says."""


def eval_sets(config: Config) -> tuple[EvalSet, ...]:
    """All held-out sets, those of --eval-prompt-data first; empty if there are none. Reads the file of --eval-config.

    Raises: ConfigError with everything wrong with them. Data files are not looked at.
    """
    problems: list[str] = []
    entries = list(_pairs(config.eval.eval_prompt_data, problems))
    if config.eval.eval_config is not None:
        entries += _read(config.eval.eval_config, problems)
    names = [entry["name"] for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"two held-out sets are called {', '.join(twice)}; metrics are named after them")
    if problems:
        raise ConfigError(problems)
    inherited = _inherited(config)
    return tuple(EvalSet(**{**inherited, **entry}) for entry in entries)


def has_eval_sets(config: Config) -> bool:
    """Whether the run has held-out sets at all."""
    return bool(config.eval.eval_prompt_data) or config.eval.eval_config is not None


def check_settings(
    sets: Sequence[EvalSet],
    *,
    reward_names: Sequence[str],
    without_label: Sequence[str],
    max_positions: int | None,
    vocab_size: float,
) -> Iterator[str]:
    """Settings of the sets that contradict each other or the model; one sentence for each set and mistake.

    Args:
        reward_names: what rm_type may be; empty where that is not known.
        without_label: those of them that compare with no label.
        max_positions, vocab_size: of the checkpoint.
    """
    for s in sets:
        where = f"held-out set {s.name}:"
        if s.temperature == 0 and s.n_samples_per_eval_prompt > 1:
            yield (
                f"{where} n_samples_per_eval_prompt is {s.n_samples_per_eval_prompt}, but temperature 0 is greedy and "
                "gives one answer; use 1 sample or a temperature"
            )
        if 0 < s.temperature < LEAST_TEMPERATURE:
            yield f"{where} temperature is {s.temperature}, but {WHY_LEAST_TEMPERATURE}, or 0, which is greedy"
        if s.min_new_tokens > s.max_response_len:
            yield f"{where} min_new_tokens is {s.min_new_tokens}, above max_response_len {s.max_response_len}"
        if s.rm_type is not None and reward_names and s.rm_type not in reward_names:
            close = difflib.get_close_matches(s.rm_type, reward_names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"built in are {', '.join(sorted(reward_names))}"
            yield f"{where} rm_type is {s.rm_type!r}, which is no built-in reward; {hint}"
        if s.rm_type is not None and s.rm_type not in without_label and s.label_key is None:
            yield f"{where} rm_type {s.rm_type} compares with a label; name its key by label_key or --eval-label-key"
        yield from _check_lengths(s, where, max_positions)
        if outside := [i for i in s.stop_token_ids if not 0 <= i < vocab_size]:
            yield f"{where} stop token {outside[0]} is no token: the checkpoint's vocabulary has {vocab_size}"


def _check_lengths(s: EvalSet, where: str, max_positions: int | None) -> Iterator[str]:
    limit = s.max_context_len if s.max_context_len is not None else max_positions
    if limit is None:
        return
    if max_positions is not None and limit > max_positions:
        yield f"{where} max_context_len is {limit}, but the model has {max_positions} positions"
    elif s.max_response_len >= limit:
        yield f"{where} max_response_len is {s.max_response_len}, which leaves no room for a prompt in {limit} tokens"
    elif s.max_prompt_len is not None and s.max_prompt_len >= limit:
        yield f"{where} max_prompt_len is {s.max_prompt_len}, which leaves no room for a response in {limit} tokens"


def _pairs(words: Sequence[str], problems: list[str]) -> Iterator[dict[str, Any]]:
    if len(words) % 2:
        problems.append(f"--eval-prompt-data takes pairs of NAME PATH, but got {len(words)} words: {' '.join(words)}")
        return
    for name, path in zip(words[::2], words[1::2], strict=True):
        if problem := _name_problem(name):
            problems.append(f"--eval-prompt-data: {problem} (pairs of NAME PATH)")
        yield {"name": name, "path": path}


def _inherited(config: Config) -> dict[str, Any]:
    """What a set has that says nothing itself: the --eval-* flags, or the rollout's settings."""
    settings, data, rollout = config.eval, config.data, config.rollout

    def either(value: Any, otherwise: Any) -> Any:
        return otherwise if value is None else value

    return {
        "input_key": either(settings.eval_input_key, data.input_key),
        "label_key": either(settings.eval_label_key, data.label_key),
        "metadata_key": data.metadata_key,
        "tool_key": either(settings.eval_tool_key, data.tool_key),
        "apply_chat_template": data.apply_chat_template,
        "apply_chat_template_kwargs": data.apply_chat_template_kwargs,
        "n_samples_per_eval_prompt": settings.n_samples_per_eval_prompt,
        "temperature": either(settings.eval_temperature, rollout.rollout_temperature),
        "top_p": either(settings.eval_top_p, rollout.rollout_top_p),
        "top_k": either(settings.eval_top_k, rollout.rollout_top_k),
        "min_new_tokens": settings.eval_min_new_tokens,
        "max_response_len": either(settings.eval_max_response_len, rollout.rollout_max_response_len),
        "max_prompt_len": settings.eval_max_prompt_len,
        "max_context_len": either(settings.eval_max_context_len, rollout.rollout_max_context_len),
        "stop": tuple(rollout.rollout_stop),
        "stop_token_ids": tuple(rollout.rollout_stop_token_ids),
        "rm_type": None,
        "reward_key": either(settings.eval_reward_key, config.reward.reward_key),
        "custom_generate_function_path": rollout.custom_generate_function_path,
    }


_PARTS = ("defaults", "datasets")
_MINIMA = {
    "n_samples_per_eval_prompt": 1,
    "temperature": 0,
    "min_new_tokens": 0,
    "max_response_len": 1,
    "max_prompt_len": 1,
    "max_context_len": 2,
}


def _read(path: str, problems: list[str]) -> list[dict[str, Any]]:
    """The sets of an --eval-config file, its defaults filled in; only well-formed values."""
    try:
        content = read_yaml(path, "--eval-config")
    except ConfigError as error:
        problems += error.problems
        return []
    where = f"--eval-config {path}"
    if isinstance(content, Mapping) and content and not difflib.get_close_matches("eval", map(str, content)):
        problems.append(f"{where} has no `eval`, under which the sets stand (docs/evaluation.md shows one)")
        return []
    before = len(problems)
    whole = _mapping(content, where, ("eval",), problems)
    body = whole if len(problems) > before else _mapping(whole.get("eval"), f"{where}, eval", _PARTS, problems)
    if len(problems) > before:
        return []
    own = {f.name for f in fields(EvalSet)}
    defaults = _entry(body.get("defaults") or {}, f"{where}, defaults", own - {"name", "path"}, problems)
    datasets = body.get("datasets")
    if isinstance(datasets, Mapping):  # name: {path: …}
        datasets = [{"name": name, **(entry if isinstance(entry, Mapping) else {})} for name, entry in datasets.items()]
    if not isinstance(datasets, list) or not datasets:
        problems.append(f"{where} names no sets; eval.datasets must be a list of entries with name and path")
        return []
    found = []
    for number, raw in enumerate(datasets, 1):
        name = raw.get("name") if isinstance(raw, Mapping) else None
        place = f"{where}, set {name if name is not None else number}"
        entry = _entry(raw, place, own, problems)
        if missing := [key for key in ("name", "path") if key not in entry]:
            if isinstance(raw, Mapping) and (absent := [key for key in missing if key not in raw]):
                problems.append(f"{place} has no {' and no '.join(absent)}")
            continue
        if problem := _name_problem(entry["name"]):
            problems.append(f"{place}: {problem}")
        found.append({**defaults, **entry})
    return found


def _mapping(value: Any, where: str, known: Sequence[str], problems: list[str]) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        problems.append(f"{where} must hold {' and '.join(f'`{name}:`' for name in known)}, not {_kind(value)}")
        return {}
    problems += _unknown(value, where, known)
    return value


def _entry(raw: Any, where: str, known: set[str], problems: list[str]) -> dict[str, Any]:
    """The well-formed values of one entry."""
    if not isinstance(raw, Mapping):
        problems.append(f"{where} must be `name: value` lines, not {_kind(raw)}")
        return {}
    problems += _unknown(raw, where, sorted(known))
    hints = typing.get_type_hints(EvalSet)
    entry: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            continue
        try:
            entry[key] = _convert(value, hints[key])
        except ValueError as error:
            problems.append(f"{where}: {key} is {value!r}, but needs {error}")
            continue
        if problem := _out_of_range(key, entry[key]):
            problems.append(f"{where}: {key} is {value!r}, but must be {problem}")
    return entry


def _unknown(value: Mapping[Any, Any], where: str, known: Sequence[str]) -> Iterator[str]:
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            yield f"{where}: {key} is not a setting" + (
                f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
            )


def _convert(value: Any, hint: Any) -> Any:
    """A YAML value as the field's type. Raises: ValueError with what is needed."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    (kind,) = [option for option in options if option is not type(None)]
    origin = typing.get_origin(kind) or kind
    if origin is tuple:
        element = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise ValueError(f"a list of {_NEEDS[element]}")
        return tuple(_convert(each, element) for each in value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        raise ValueError(_NEEDS[origin])
    if (isinstance(value, float) and not math.isfinite(value)) or value == "":
        raise ValueError(_NEEDS[origin])
    return value


_NEEDS: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    dict: "`name: value` lines",
}


def _out_of_range(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if key in _MINIMA and value < _MINIMA[key]:
        return f"at least {_MINIMA[key]}"
    if key == "top_p" and not 0 < value <= 1:
        return "above 0 and at most 1"
    if key == "top_k" and (value < -1 or value == 0):
        return "-1 (off) or at least 1"
    return None


def _name_problem(name: str) -> str | None:
    if not name or "/" in name:
        return f"the name {name!r} of a held-out set is empty or holds a slash; metrics are called after it"
    return None


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
