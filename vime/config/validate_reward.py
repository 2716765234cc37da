"""Checks of the reward's settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from urllib.parse import urlsplit

from vime.config import Config
from vime.config.modes import evaluates_without_trainer, generates, reads_prompts

TOTAL = "total"
"""The entry of a reward of several parts that holds their weighted sum."""
_REMOTE = ("remote_rm", "boxed_remote_rm")


def check_reward(config: Config, known: Collection[str], without_label: Collection[str]) -> Iterator[str]:
    """What is wrong with the settings of rewards.

    Args:
        known: what --rm-type may say; empty where that is not known.
        without_label: those of them that compare with no label.
    """
    reward = config.reward
    named = [reward.rm_type] if reward.rm_type is not None else [name for name in reward.rm_parts if "." not in name]
    if reward.rm_type is not None and known and reward.rm_type not in known:
        yield f"--rm-type is {reward.rm_type!r}, but the built-in rewards are {', '.join(sorted(known))}"
    yield from (f"--rm-parts: {problem}" for problem in _check_parts(reward.rm_parts, known))
    given = [
        f"--{name.replace('_', '-')} {value}"
        for name in ("rm_type", "rm_parts", "custom_rm_path")
        if (value := getattr(reward, name))
    ]
    if len(given) > 1:
        yield f"{' and '.join(given)} are both given; keep one, or give all of them as parts (--rm-parts)"
    if reward.rm_url is None and (remote := [name for name in named if name in _REMOTE]):
        yield f"{remote[0]} asks a server for rewards; give its address by --rm-url"
    if reward.rm_url is not None and (problem := url_problem(reward.rm_url)):
        yield f"--rm-url {problem}"
    if not generates(config) or evaluates_without_trainer(config):
        return
    if config.rollout.custom_generate_function_path is not None:
        return
    if not config.rollout.rollout_function_path.startswith("vime."):
        return
    if config.data.label_key is None and reads_prompts(config):
        for name in named:
            if name not in without_label:
                flag = "--rm-type" if name == reward.rm_type else "--rm-parts:"
                yield f"{flag} {name} compares with a label; name its key in the data by --label-key"
    if not given:
        yield "a reward is required: --rm-type, --rm-parts or --custom-rm-path (sample metadata may then override it)"


def url_problem(text: str) -> str | None:
    """What is wrong with an address, in words after its flag; None if nothing is."""
    try:
        url = urlsplit(text)
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is none, half of a bracket
        is_address = False
    if not is_address:
        return f"is {text!r}, but must be an address such as http://127.0.0.1:8000/score"
    if url.username is not None:
        return "holds a user name or password, which the run's folder would keep and errors would show; leave it out"
    return None


def part_names(paths: Iterable[str]) -> list[str]:
    """The name of each part: a built-in's own, or the last word of a dotted path."""
    return [path.rpartition(".")[2] for path in paths]


def _check_parts(parts: dict[str, float], known: Collection[str]) -> Iterator[str]:
    for path in parts:
        if "." not in path and known and path not in known:
            yield f"{path!r} is neither a dotted path nor one of the built-in rewards {', '.join(sorted(known))}"
    names = part_names(parts)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two parts are called {name!r}; give one of the functions another name"
    if TOTAL in names:
        yield f"a part is called {TOTAL!r}, which is the name of the sum; give the function another name"
    if parts and not any(parts.values()):
        yield "all weights are 0, so that every reward would be 0; give at least one part a weight"
