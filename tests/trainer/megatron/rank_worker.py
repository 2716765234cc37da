"""One rank of test_ranks.py: python rank_worker.py RANK WORLD_SIZE FOLDER CASES.

CASES is a pickle in FOLDER: dicts as test_ranks.py makes them.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not at the top: the process that helps megatron-core to write a checkpoint reads this file again.
    from tests.trainer.megatron.rank_cases import main

    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
