"""`vime init-model`: a tiny random checkpoint with tokenizer and chat template, made by transformers' own classes."""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vime.errors import ConfigError

# What vLLM's attention on CPUs takes; GPUs take these too.
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
END_OF_TURN, PAD = "<|im_end|>", "<|endoftext|>"
MARK = "vime_init_model.json"
"""Says what the folder was made with; a folder with it may be written again."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """The shape of a model to make; the defaults give 0.8M parameters."""

    family: str = "qwen3"
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    ffn_size: int = 384
    max_positions: int = 1024
    tie_embeddings: bool = False
    vocab: str = "chars"
    dtype: str = "float32"
    seed: int = 0

    def problems(self) -> list[str]:
        """What is wrong with this shape, one sentence each."""
        found = []
        if self.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            found.append(f"--head-size is {self.head_size}, but vLLM's CPU attention takes only {sizes}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            found.append(f"--num-kv-heads is {self.num_kv_heads}, which does not divide --num-heads {self.num_heads}")
        for name in ("hidden_size", "num_layers", "num_heads", "ffn_size", "max_positions"):
            if getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be at least 1")
        return found


def init_model(out: Path, model: TinyModel) -> int:
    """Write the checkpoint (config, weights, tokenizer, generation config) to the folder `out`.

    Returns: its number of parameters.
    Raises: ConfigError for a shape that cannot be, or a folder that holds something.
    """
    problems = model.problems()
    if out.exists() and not (out / MARK).is_file() and (not out.is_dir() or any(out.iterdir())):
        problems.append(f"{out} exists and is neither empty nor made by `vime init-model`; give another folder")
    if problems:
        raise ConfigError(problems)
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = make_tokenizer(model.vocab, model.max_positions)
    config, model_class = _hf_config(model, tokenizer)
    torch.manual_seed(model.seed)
    network = model_class(config).to(getattr(torch, model.dtype))
    network.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    out.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / MARK).write_text(json.dumps(asdict(model), indent=2) + "\n", encoding="utf-8")
    return sum(p.numel() for p in network.parameters())


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


def _hf_config(model: TinyModel, tokenizer: Any) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[model.family]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_size,
        max_position_embeddings=model.max_positions,
        tie_word_embeddings=model.tie_embeddings,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=model.dtype,
    )
    return config, model_class


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    tiny = TinyModel()
    parser.add_argument("out", type=Path, help="folder to write; must be new or empty")
    parser.add_argument(
        "--family", choices=("qwen3", "llama"), default=tiny.family, help="architecture (default: %(default)s)"
    )
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
        description="Make a tiny random model to try things with. Its chat template shows no tool definitions.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    out, model = from_arguments(parser.parse_args(argv))
    size = init_model(out, model)
    print(f"{out}: {model.family}, {size:,} parameters in {model.dtype}")
    return 0
