"""The checkpoint of a critic: a language model's, whose head does not count, with or without a value head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vime.models.names import NameMap, Rule
from vime.models.settings import ModelSettings
from vime.models.stored import HEAD

STORED = {"weight": "score.weight", "bias": "score.bias"}
"""A value head's tensors, named as in transformers' token classifiers and reward models."""
_CLASSES = ("ForTokenClassification", "ForSequenceClassification")


class CriticNames(NameMap):
    """A family's name table without its vocabulary head; a stored head of either kind is no surprise."""

    def __init__(self, family: NameMap, model: ModelSettings) -> None:
        shapes = family.shapes()
        super().__init__(
            Rule(name, (names := family.to_hf(name)).hf, tuple(shapes[n] for n in names.hf), names.kind)
            for name in family.megatron_names()
            if family.to_hf(name).hf != (HEAD,)
        )
        hidden = model.transformer["hidden_size"]
        self._kept_shapes = {
            **family.kept_shapes(),
            HEAD: (model.vocab_size, hidden),
            STORED["weight"]: (1, hidden),
            STORED["bias"]: (1,),
        }
        self._family = family

    def is_kept(self, hf_name: str) -> bool:
        """Whether an HF tensor is no part of the critic's layers."""
        return hf_name in (HEAD, *STORED.values()) or self._family.is_kept(hf_name)


def untied(model: ModelSettings) -> ModelSettings:
    """The settings of a critic, which has no head that could be its embedding."""
    return replace(model, tie_word_embeddings=False)


def trunk_config(hf: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json of a critic's checkpoint as that of the language model with the same layers.

    Args: tied: whether the policy's head is its embedding, which makes no difference to a critic.
    """
    names = [_language_model(name) for name in hf.get("architectures") or []]
    return {**hf, "architectures": names, "tie_word_embeddings": tied}


def _language_model(class_name: str) -> str:
    for head in _CLASSES:
        class_name = class_name.replace(head, "ForCausalLM")
    return class_name
