"""Whether the tensors of an HF checkpoint are those of its model: names, shapes, dtypes. Reads heads of files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from vime.config.hf_weights import StoredTensor, is_buffer, read_weights, shown
from vime.errors import ConfigError
from vime.models.names import CORRECTION_BIAS, NameMap
from vime.models.settings import ModelSettings

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CHUNK_BYTES = 4 << 20


def checked_weights(
    folder: Path,
    names: NameMap,
    model: ModelSettings,
    *,
    dtype: str | None = None,
    remedy: str = "",
    reads_head: bool = False,
) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder by its name, all of them as the model's should be.

    Args:
        dtype: what all weights must be stored in; None: each in its own.
        remedy: how the user may choose one dtype for all of them.
        reads_head: whether a tied model's stored head is compared with its embedding: the only contents looked at.
    Raises: ConfigError with everything that is wrong.
    """
    tensors = read_weights(folder)
    problems = [*weight_problems(folder, tensors, names, model)]
    if dtype is not None and not problems:
        problems += filter(None, [dtype_problem(folder, tensors, names, dtype, remedy=remedy)])
    if reads_head and not problems:
        problems += filter(None, [head_problem(folder, tensors, model)])
    if problems:
        raise ConfigError(problems)
    return tensors


def weight_problems(
    folder: Path, tensors: Mapping[str, StoredTensor], names: NameMap, model: ModelSettings
) -> Iterator[str]:
    """Tensors that are missing, of no known place, or of another shape or dtype than the model's, in sentences.

    Layers of multi-token prediction may hold anything; where the family knows a tensor of theirs, its shape counts.
    A tied model may repeat its embedding as its head.

    Args:
        folder: named in the sentences.
        tensors: as `read_weights` gives them.
    """
    shapes = names.shapes()
    optional = {HEAD: shapes[EMBEDDING]} if model.tie_word_embeddings else {}
    known = {**names.kept_shapes(), **optional, **shapes}
    if missing := [name for name in shapes if name not in tensors]:
        yield f"{folder} lacks {_some(missing)}" + (
            f"; for a head that is the embedding, say tie_word_embeddings in {folder / 'config.json'}"
            if missing == [HEAD]
            else "; config.json and the weights are of different models, or files are missing"
        )
    unexpected = [n for n in tensors if n not in known and not names.is_kept(n) and not is_buffer(n)]
    if unexpected:
        yield (
            f"{folder} has {_some(unexpected)}, of no known place in a model as config.json describes it; correct "
            "config.json, or remove them"
        )
    others = [name for name, tensor in tensors.items() if name in known and tensor.shape != known[name]]
    if others:
        found = (f"{shown(n)} {list(tensors[n].shape)}, not {list(known[n])}" for n in others[:3])
        yield (
            f"{folder} has {_count(others)} of other shapes than config.json describes, such as "
            f"{'; '.join(found)}: the two are of different models"
        )
    numbers = [n for n in tensors if (n in shapes or n in optional) and tensors[n].dtype not in _DTYPES]
    if numbers:
        found = (f"{shown(n)} {tensors[n].dtype}" for n in numbers[:3])
        yield (
            f"{folder} has {_count(numbers)} of dtypes that cannot be trained, such as {', '.join(found)}: only "
            f"{', '.join(_DTYPES)} can; take the checkpoint in bfloat16"
        )


def dtype_problem(
    folder: Path, tensors: Mapping[str, StoredTensor], names: NameMap, dtype: str, *, remedy: str
) -> str | None:
    """A sentence if weights are stored in other dtypes than their config.json says; None if they are not.

    Routers' correction biases and layers of multi-token prediction keep dtypes of their own.

    Args:
        dtype: what config.json says: "float32", "bfloat16" or "float16".
        remedy: how the user may choose one dtype for all of them.
    """
    trained = [n for n in names.hf_names() if not n.endswith(CORRECTION_BIAS)]
    stored = Counter(_DTYPES.get(tensors[n].dtype, tensors[n].dtype) for n in trained if n in tensors)
    if stored.keys() <= {dtype}:
        return None
    counts = ", ".join(f"{count} {name}" for name, count in stored.most_common())
    odd = next(n for n in trained if n in tensors and _DTYPES.get(tensors[n].dtype) != dtype)
    return (
        f"{folder}: config.json says {dtype}, but its tensors are {counts} (such as {odd}); {remedy}, or correct "
        "config.json"
    )


def head_problem(folder: Path, tensors: Mapping[str, StoredTensor], model: ModelSettings) -> str | None:
    """A sentence if a tied model's checkpoint has a head that differs from the embedding, or they cannot be read."""
    if not model.tie_word_embeddings or HEAD not in tensors or EMBEDDING not in tensors:
        return None
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    try:
        if (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and _same_bytes(head, embedding):
            return None
    except OSError as error:
        return f"{folder}: {HEAD} and {EMBEDDING} cannot be read: {error}"
    return (
        f"{folder}: config.json says tie_word_embeddings, but {HEAD} is there and differs from {EMBEDDING}, which "
        'would be taken for it; say "tie_word_embeddings": false to use the head, or remove it'
    )


def reference_problem(
    folder: Path, reference: ModelSettings, policy: ModelSettings, *, policy_folder: Path, flag: str = "--ref-load"
) -> str | None:
    """A sentence if a model cannot get the policy's micro-batches, or its table of names; None if it can.

    Args: flag: by which it was given: a reference, or what a critic begins with.
    """
    if problem := vocabulary_problem(folder, reference, policy, flag=flag):
        return problem
    if differing := _differences(reference, policy):
        return f"{flag} {folder} has another architecture than {policy_folder}: {differing}"
    return None


def vocabulary_problem(folder: Path, other: ModelSettings, policy: ModelSettings, *, flag: str) -> str | None:
    """A sentence if token ids of the policy's cannot be another model's; None if they can."""
    if other.vocab_size != policy.vocab_size:
        return f"{flag} {folder} has a vocabulary of {other.vocab_size}, the policy of {policy.vocab_size}"
    return None


def same_architecture(other: ModelSettings, policy: ModelSettings) -> bool:
    """Whether one's weights fit the other's layers, and compute the same there."""
    return not _differences(other, policy)


def _differences(reference: ModelSettings, policy: ModelSettings) -> str:
    """What makes two models compute differently, each with both values, the reference's first."""
    names = ("tie_word_embeddings", "rotary_base", "rotary_percent", "rope_scaling")
    left, right = (
        {**model.transformer, **{name: getattr(model, name) for name in names}} for model in (reference, policy)
    )
    of_computing = sorted((left.keys() | right.keys()) - {"init_method_std"})
    changes = (name for name in of_computing if left.get(name) != right.get(name))
    return ", ".join(f"{name} {left.get(name)} and {right.get(name)}" for name in changes)


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    with a.file.open("rb") as left, b.file.open("rb") as right:
        left.seek(a.begin)
        right.seek(b.begin)
        for done in range(0, a.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, a.num_bytes - done)
            if left.read(size) != right.read(size):
                return False
    return True


def _some(names: Iterable[str]) -> str:
    """How many, and the first of them."""
    found = sorted(names)
    return f"{_count(found)}{'' if len(found) <= 3 else ', among them'} {', '.join(map(shown, found[:3]))}"


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"
