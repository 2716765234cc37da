"""`vime init-model`: a tiny random checkpoint with tokenizer and chat template, made by transformers' own classes."""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vime.cli.tiny_model import FAMILIES, HEAD_SIZES, OF_EXPERTS, TinyModel, add_mtp_layers
from vime.errors import ConfigError
from vime.models import ModelSettings, family_of
from vime.models.memory import GIB
from vime.models.parameters import parameters
from vime.platform.cpu import CpuPlatform

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
END_OF_TURN, PAD = "<|im_end|>", "<|endoftext|>"
MARK = "vime_init_model.json"
"""Says what the folder was made with; a folder with it may be written again."""
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | map('tojson') | join('\n') + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def init_model(out: Path, model: TinyModel) -> int:
    """Write the checkpoint (config, weights, tokenizer, generation config) to the folder `out`.

    Returns: its number of parameters, without layers of multi-token prediction.
    Raises: ConfigError for a shape that cannot be, or a folder that holds something.
    """
    problems = model.problems()
    if out.exists() and not (out / MARK).is_file() and (not out.is_dir() or any(out.iterdir())):
        problems.append(f"{out} exists and is neither empty nor made by `vime init-model`; give another folder")
    if problems:
        raise ConfigError(problems)
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = make_tokenizer(model.vocab, model.max_positions)
    config = model.hf_config(tokenizer)
    settings = family_of(config.to_dict()).settings(config.to_dict())  # says what could not be trained or served
    _check_memory(settings)
    torch.manual_seed(model.seed)
    network: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    network = network.to(getattr(torch, model.dtype))
    network.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    out.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(out)
    if num_mtp_layers := model.of_experts("num_mtp_layers"):
        add_mtp_layers(out, num_layers=model.num_layers, num_mtp_layers=num_mtp_layers, seed=model.seed)
    tokenizer.save_pretrained(out)
    (out / MARK).write_text(json.dumps(asdict(model), indent=2) + "\n", encoding="utf-8")
    return sum(p.numel() for p in network.parameters())


def _check_memory(settings: ModelSettings) -> None:
    """Refuse a model that this machine would die of. Raises: ConfigError."""
    size, there = parameters(settings).total, CpuPlatform().total_memory_bytes()
    if 4 * size > there:
        raise ConfigError(
            f"a model of {size:,} parameters is made in {4 * size / GIB:.1f} GiB of float32, but this machine has "
            f"{there / GIB:.1f} GiB; make a smaller one"
        )


def make_tokenizer(vocab: str, max_positions: int) -> Any:
    """A transformers tokenizer of single characters (printable ASCII and newline) or of bytes; every text round-trips
    with bytes, and with characters every text over them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab == "chars":
        # 96 characters and 4 special tokens: ids 0..99, a multiple of 4 so that small tensor-parallel sizes divide it.
        characters = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
        ids = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
        core = Tokenizer(models.WordLevel(ids, unk_token="<|unknown|>"))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        ids = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
        core = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=None))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        unk_token="<|unknown|>" if vocab == "chars" else None,
        model_max_length=max_positions,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    tiny = TinyModel()
    parser.add_argument("out", type=Path, help="folder to write; must be new, empty or made by this command before")
    parser.add_argument("--family", choices=FAMILIES, default=tiny.family, help="architecture (default: %(default)s)")
    for name, text in (
        ("hidden_size", "width"),
        ("num_layers", "decoder layers"),
        ("num_heads", "attention heads"),
        ("num_kv_heads", "key-value heads"),
        ("head_size", "width of a head: " + ", ".join(map(str, HEAD_SIZES))),
        ("ffn_size", "width inside the MLP"),
        ("max_positions", "longest sequence in tokens"),
        ("seed", "seed of the random weights"),
    ):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(tiny, name), help=f"{text} (default: %(default)s)")
    for name, (default, families, text) in OF_EXPERTS.items():
        words = f"{text} ({', '.join(families)}; default: {default})"
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=words)
    parser.add_argument("--tie-embeddings", action="store_true", help="one matrix for embedding and head")
    parser.add_argument(
        "--vocab",
        choices=("chars", "bytes"),
        default=tiny.vocab,
        help="what a token is: a printable ASCII character, or a byte, which any text has (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=tiny.dtype, help="of the weights (default: %(default)s)"
    )


def from_arguments(arguments: argparse.Namespace) -> tuple[Path, TinyModel]:
    """The parsed subcommand as what `init_model` takes."""
    names = TinyModel.__dataclass_fields__
    return arguments.out, TinyModel(**{name: getattr(arguments, name) for name in names})


def run(argv: Sequence[str]) -> int:
    """`vime init-model …`. Returns: the exit code."""
    parser = argparse.ArgumentParser(
        prog="vime init-model",
        description="Make a tiny random model to try things with.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    out, model = from_arguments(parser.parse_args(argv))
    size = init_model(out, model)
    print(f"{out}: {model.family}, {size:,} parameters in {model.dtype}")
    return 0
