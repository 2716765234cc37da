"""What happens before the engines of a run start."""

from __future__ import annotations

import subprocess
import sys


def test_neither_torch_nor_transformers_is_imported_before_the_engines_start() -> None:
    code = (
        "import sys; import vime.orchestration.launch; "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'vllm', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
