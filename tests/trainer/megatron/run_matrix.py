"""Run the parallel matrix and print it: python -m tests.trainer.megatron.run_matrix [--only WORDS] [--device cuda].

Exit 0 only if every row of the table was run, compared and is within its bounds.
"""

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.trainer.conftest import write_model
from tests.trainer.megatron.critics import write_critic
from tests.trainer.megatron.layout_case import MODELS, with_batches
from tests.trainer.megatron.matrix import CUDA_ONLY, MATRIX
from tests.trainer.megatron.rank_differences import NUMBERS, differences
from tests.trainer.megatron.rank_processes import LIMIT_S, Outcome, Ranks

COLUMNS = ("ranks", "layout", "model", "with", "loss", *NUMBERS, "bound", "s", "")


def run_cases(folder, cases, *, platform="cpu", limit_s=LIMIT_S, tell=lambda case, outcome: None):
    """Outcome of each case and of the references they need, by name.

    One process computes the references meanwhile. Cases of one rank come last: they load what several have saved.
    """
    for name in dict.fromkeys(case.model for case in cases):
        write_model(Path(folder) / name, **MODELS[name])
    for name in dict.fromkeys(case.model for case in cases if case.loss == "ppo"):
        write_critic(Path(folder) / f"critic {name}", Path(folder) / name)
    by_size = {size: [c for c in cases if c.world_size == size] for size in sorted({c.world_size for c in cases} - {1})}
    late = [c for c in cases if c.world_size == 1]
    outcomes = {}

    def run(size, of_size):
        ranks = Ranks(folder, size, [with_batches(c, size) for c in of_size], platform=platform, limit_s=limit_s)
        for case, outcome in ranks.outcomes():
            outcomes[str(case)] = outcome
            tell(case, outcome)

    references = threading.Thread(target=run, args=(1, list(dict.fromkeys(c.reference for c in cases))))
    references.start()
    for size, of_size in by_size.items():
        run(size, of_size)
    references.join()
    run(1, late)
    return outcomes


def rows_of(cases, outcomes, folder, *, platform="cpu"):
    """(table row, problems) of each expected case, whatever became of it."""
    for case in cases:
        found, reference = outcomes.get(str(case)), outcomes.get(str(case.reference))
        extra = (case.option, case.replay and f"replay {case.replay}", case.loads and f"from {case.loads}")
        row = [str(case.world_size), case.layout, case.model, " ".join(filter(None, extra))]
        missing = [
            f"{what}: {outcome.failure if outcome else 'was not run'}"
            for what, outcome in (("ranks", found), ("one process", reference))
            if outcome is None or outcome.failure
        ]
        if missing:
            yield [*row, case.loss, *["-"] * len(NUMBERS), "", "", "NO RESULT"], missing
            continue
        result = differences(case, found.ranks, reference.ranks[0], folder, platform=platform)
        numbers = ["" if (value := getattr(result, name)) is None else f"{value:.1e}" for name in NUMBERS]
        bound = "/".join(dict.fromkeys(f"{b:g}" for b in result.bounds.values()))
        verdict = "ok" if result.is_within else "BEYOND"
        yield [*row, case.loss, *numbers, bound, f"{found.seconds:.0f}", verdict], result.all_problems()


def table(rows):
    """The rows below their columns' names, as text."""
    lines = [list(COLUMNS), *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(argv=None):
    """Returns: the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold all of these words")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="*", help="only cases of these numbers of ranks")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that one case may take")
    args = parser.parse_args(argv)
    known = MATRIX + (CUDA_ONLY if args.device == "cuda" else [])
    cases = chosen(known, args.only, args.ranks)
    if not cases:
        print("no row has all of these words and numbers of ranks; the rows' words are:", file=sys.stderr)
        print(*sorted({word for case in known for word in str(case).split()}), file=sys.stderr)
        return 1
    start = time.monotonic()

    def tell(case: object, outcome: Outcome) -> None:
        print(f"{case}: {outcome.failure or f'{outcome.seconds:.1f} s'}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="vime-matrix-") as folder:
        outcomes = run_cases(Path(folder), cases, platform=args.device, limit_s=args.limit, tell=tell)
        rows = list(rows_of(cases, outcomes, Path(folder), platform=args.device))
    print(table([row for row, _ in rows]))
    bad = [(case, problems) for case, (_, problems) in zip(cases, rows, strict=True) if problems]
    for case, problems in bad:
        print(f"\n{case}:", *problems, sep="\n  ")
    print(f"\n{len(rows) - len(bad)} of {len(rows)} rows within their bounds, {time.monotonic() - start:.0f} s")
    return 1 if bad or not rows else 0


def chosen(cases, words, ranks=None):
    """The cases whose names hold all of these words, and those whose checkpoints they load."""
    fits = [c for c in cases if all(w in str(c).split() for w in words) and (not ranks or c.world_size in ranks)]
    names = {str(c) for c in fits}
    for case in reversed(cases):
        if str(case) in names and case.loads:
            names.add(case.loads)
    return [c for c in cases if str(c) in names]


if __name__ == "__main__":
    sys.exit(main())
