"""Kill the processes of small runs at random moments, resume, and check that nothing was lost.

    python -m tests.chaos --rounds 20 [--engine stub|vllm|mixed] [--seed 7] [--victims engine,router]

Every round prints its seed and plan; `--rounds 1 --seed N --engine E` plays one again (which signal goes to which kind
of process after which step and how many seconds later; what else happens in those seconds is the machine's). The last
line counts rounds, kills, prompts lost, prompts doubled and runs without a cause; the exit code is 0 only if the last
three are 0 and no FAULT was printed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos import accounts
from tests.chaos.plan import LOOPS, VICTIMS, Plan, draw_plan
from tests.chaos.round import Result, play
from tests.chaos.task import write_task

_REAL_EVERY = 4  # of mixed rounds


class Chaos:
    """Rounds, and what they add up to.

    Args: folder: where tasks and runs go.
    """

    def __init__(self, folder: Path, *, keeps: bool = False) -> None:
        self._folder, self._keeps = folder, keeps
        self._task = folder / "task"
        self._references: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.num_rounds = self.num_kills = self.num_lost = self.num_doubled = self.num_without_cause = 0
        self.num_faults = 0

    def round(self, plan: Plan) -> bool:
        """Play one and say what came of it. Returns: whether all was well."""
        if not self._task.exists():
            write_task(self._task)
        begin = time.monotonic()
        print(f"seed {plan.seed}: {plan}", flush=True)
        reference = self._reference(plan)
        run_dir = self._folder / f"round-{plan.engine}-{plan.seed}"
        result = play(plan, self._task, run_dir)
        found = accounts.check(plan, self._task, run_dir, reference) if result.finished else accounts.Accounts()
        faults = result.faults + found.faults
        self.num_rounds += 1
        self.num_kills += len(result.hits)
        self.num_lost += len(found.lost)
        self.num_doubled += len(found.doubled)
        self.num_without_cause += len(result.without_cause)
        self.num_faults += len(faults)
        for hit in result.hits:
            print(f"  {hit}")
        problems = [("LOST", found.lost), ("DOUBLED", found.doubled), ("NO CAUSE", result.without_cause)]
        for word, lines in [*problems, ("FAULT", faults)]:
            for line in lines:
                print(f"  {word} {line}")
        is_well = not any(lines for _, lines in problems) and not faults
        how = (
            "well"
            if is_well
            else f"play it again: --rounds 1 --seed {plan.seed} --engine {plan.engine} and the other options"
        )
        print(f"  {result.num_starts} starts, {time.monotonic() - begin:.0f} s: {how}", flush=True)
        if is_well and not self._keeps:
            _remove(result)
        return is_well

    def _reference(self, plan: Plan) -> list[dict[str, Any]] | None:
        """The curve of the same run without kills, where the curve must be the same."""
        if plan.engine != "stub" or not plan.is_plain:
            return None  # other engines' sums depend on what runs beside, other loops' samples on what was faster
        key = (plan.engine, plan.num_rollouts)
        if key not in self._references:
            calm = Plan(0, plan.engine, plan.loop, plan.partial, plan.num_rollouts, 0.0, ())
            result = play(calm, self._task, self._folder / f"never-killed-{plan.engine}-{plan.num_rollouts}")
            if not result.finished or result.faults:
                raise SystemExit(f"the run without kills failed: {result.without_cause} {result.faults}")
            self._references[key] = accounts.last_records(result.run_dir)
        return self._references[key]

    def summary(self) -> str:
        """The last line."""
        return (
            f"rounds {self.num_rounds}, kills {self.num_kills}, prompts lost {self.num_lost}, prompts doubled "
            f"{self.num_doubled}, runs without a cause {self.num_without_cause}"
        )

    @property
    def is_well(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.num_lost or self.num_doubled or self.num_without_cause or self.num_faults)


def _remove(result: Result) -> None:
    shutil.rmtree(result.run_dir, ignore_errors=True)
    for log in result.run_dir.parent.glob(f"{result.run_dir.name}.attempt*.log"):
        log.unlink()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, help="of the first round; the others count up from it; default: random")
    parser.add_argument("--engine", choices=("stub", "vllm", "mixed"), default="mixed")
    parser.add_argument("--victims", help=f"comma-separated, of {', '.join(VICTIMS)}; default: all")
    parser.add_argument("--loop", choices=tuple(LOOPS), help="default: drawn per round")
    parser.add_argument("--kills", type=int, help="of a round; default: 3 to 5 with stubs, 2 or 3 with vLLM")
    parser.add_argument("--rollouts", type=int, help="of a round's run; default: 8 with stubs, 5 with vLLM")
    parser.add_argument("--out", type=Path, help="keep the runs here; default: those that went well are removed")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    victims = tuple(options.victims.split(",")) if options.victims else tuple(VICTIMS)
    folder = options.out or Path(tempfile.mkdtemp(prefix="vime-chaos-"))
    chaos = Chaos(folder, keeps=options.out is not None)
    print(f"chaos in {folder}: {options.rounds} rounds from seed {seed}", flush=True)
    for number in range(options.rounds):
        engine = options.engine
        if engine == "mixed":
            engine = "vllm" if number % _REAL_EVERY == _REAL_EVERY - 1 else "stub"
        plan = draw_plan(
            seed + number,
            engine,
            victims=victims,
            num_kills=options.kills,
            num_rollouts=options.rollouts,
            loop=options.loop,
        )
        chaos.round(plan)
    if chaos.is_well and options.out is None:
        shutil.rmtree(folder)
    print(chaos.summary(), flush=True)
    return 0 if chaos.is_well else 1


if __name__ == "__main__":
    sys.exit(main())
