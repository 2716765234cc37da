"""One rank of the parallel matrix: python rank_worker.py RANK WORLD_SIZE FOLDER CASES PLATFORM LIMIT_S.

CASES is a pickle in FOLDER: a list of `layout_case.Case` with their batches.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not at the top: the process that helps megatron-core to write a checkpoint reads this file again.
    from vime.trainer.megatron.patches.lean_import import lean_import

    with lean_import():
        from tests.trainer.megatron.rank_cases import main

    rank, world_size, folder, cases, platform, limit_s = sys.argv[1:]
    main(int(rank), int(world_size), Path(folder), cases, platform, float(limit_s))
