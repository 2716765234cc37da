"""Each cause of a difference, caused on a tiny model, and named."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.agreement.models import write_model
from vime.agreement.analysis import Analysis, Means, Weights, analyse
from vime.agreement.comparison import Comparison
from vime.agreement.explain import Flips, Unexplained, precision_bound, verdict_on_engine, verdict_on_trainer
from vime.agreement.hf_model import HfModel
from vime.agreement.tokens import select
from vime.config import Config, RolloutConfig
from vime.platform.cpu import CpuPlatform
from vime.support import SamplingSupport
from vime.types import Sample

ROUNDING = 1e-6
"""Of the sampler's log-probs, as another float32 program would have."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The right weights; those a few steps before; a model of experts."""
    root = tmp_path_factory.mktemp("causes")
    now = write_model(root / "now", "qwen3", tied=False)
    changed(now, root / "before", lambda name, t: t + 0.01 * torch.randn(t.shape, generator=torch.manual_seed(1)))
    write_model(root / "experts", "qwen3_moe", tied=False)
    return {"now": now, "before": root / "before", "experts": root / "experts"}


def changed(source: Path, target: Path, change: Any) -> Path:
    """A copy of a checkpoint with each tensor replaced by `change` (name, tensor)."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    save_file({name: change(name, t) for name, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    return target


def sequences(num: int = 24) -> list[tuple[int, ...]]:
    """8 tokens of prompt, 16 of response."""
    return [tuple(np.random.default_rng(i).integers(3, 320, 24).tolist()) for i in range(num)]


def supports() -> list[SamplingSupport]:
    """Of each sequence's responses: the token itself and 15 more; every fourth token had the whole vocabulary."""
    numbers = np.random.default_rng(4)
    return [
        SamplingSupport.of(
            {token, *numbers.integers(0, 320, 15).tolist()} if k >= 8 and k % 4 else []
            for k, token in enumerate(tokens)
        )
        for tokens in sequences()
    ]


def sampled_by(scores: list[Any], supports: list[SamplingSupport] | None = None) -> list[Sample]:
    """Samples whose engine had these log-probs, and rounded in its own way."""
    noise = np.random.default_rng(9)
    samples = []
    for i, (tokens, score) in enumerate(zip(sequences(), scores, strict=True)):
        support = None if supports is None else SamplingSupport.of(supports[i].rows()[8:])
        sample = Sample(tokens=tokens[:8], group_id=i, sample_id=i, trajectory_id=i)
        log_probs = np.minimum(score[8:] + noise.normal(0, ROUNDING, 16), 0.0)
        sample.append_response(tokens[8:], log_probs.tolist(), version=3, support=support)
        samples.append(sample)
    return samples


def hf(folder: Path) -> HfModel:
    return HfModel(folder, dtype="float32", device="cpu")


def judged(
    samples: list[Sample], sampled: Path, others: Mapping[str, Path], *, temperature: float = 1.0, trainer: bool = False
) -> Analysis:
    tokens = select(samples, 3)
    means = Means(
        config=Config(rollout=RolloutConfig(rollout_temperature=temperature)),
        platform=CpuPlatform(),
        with_trainer=trainer,
        num_inside=4,
    )
    return analyse(
        tokens,
        Weights(sampled=sampled, others=others, dtype="float32"),
        means,
        make=lambda scores, t: Comparison(2, 3, "test", tokens, t, scores, None),
    )


def test_nothing_but_rounding(models: dict[str, Path]) -> None:
    samples = sampled_by(hf(models["now"]).log_probs(sequences()))
    analysis = judged(samples, models["now"], {"version 2": models["before"]})
    assert analysis.verdicts["engine"].word == "precision"
    assert not any(x.holds for x in analysis.explanations)


def test_the_weights_of_another_version(models: dict[str, Path]) -> None:
    samples = sampled_by(hf(models["before"]).log_probs(sequences()))
    verdict = judged(samples, models["now"], {"version 2": models["before"]}).verdicts["engine"]
    assert verdict.word == "stale weights" and verdict.sentence.startswith("it had version 2: it accounts for 100%")


def test_weights_between_two_saved_versions(models: dict[str, Path], tmp_path: Path) -> None:
    now, before = (load_file(models[n] / "model.safetensors") for n in ("now", "before"))
    between = changed(models["now"], tmp_path / "between", lambda n, t: now[n] + 0.05 * (before[n] - now[n]))
    samples = sampled_by(hf(between).log_probs(sequences()))
    (best, *_) = judged(samples, models["now"], {"version 2": models["before"]}).explanations
    assert best.cause == "stale weights: it had version 2" and best.multiple == pytest.approx(0.05, rel=0.3)


def test_one_tensor_that_was_not_brought_up_to_date(models: dict[str, Path], tmp_path: Path) -> None:
    before, name = load_file(models["before"] / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    skipped = changed(models["now"], tmp_path / "skipped", lambda n, t: before[n] if n == name else t)
    samples = sampled_by(hf(skipped).log_probs(sequences()))
    verdict = judged(samples, models["now"], {"version 2": models["before"]}).verdicts["engine"]
    assert verdict.word == "stale tensor" and verdict.sentence.startswith(f"{name} was of version 2")


def test_a_prefix_cache_that_was_not_reset(models: dict[str, Path]) -> None:
    now, before = hf(models["now"]), hf(models["before"])
    samples = sampled_by(now.log_probs_after(before, sequences(), [7] * 24))
    verdict = judged(samples, models["now"], {"version 2": models["before"]}).verdicts["engine"]
    assert verdict.word == "stale cache" and "of version 2" in verdict.sentence


def test_log_probs_of_before_the_temperature(models: dict[str, Path]) -> None:
    samples = sampled_by(hf(models["now"]).log_probs(sequences()))
    verdict = judged(samples, models["now"], {}, temperature=0.7).verdicts["engine"]
    assert verdict.word == "temperature"


def test_log_probs_over_what_could_be_sampled(models: dict[str, Path]) -> None:
    given = supports()
    samples = sampled_by(hf(models["now"]).log_probs(sequences(), temperature=0.7, supports=given), given)
    analysis = judged(samples, models["now"], {"version 2": models["before"]}, temperature=0.7, trainer=True)
    assert {who: verdict.word for who, verdict in analysis.verdicts.items()} == dict.fromkeys(
        ("engine", "trainer"), "precision"
    )
    assert not any(x.holds for x in analysis.explanations)


@pytest.mark.parametrize(
    ("temperature", "sentence"), [(0.7, "over the whole vocabulary"), (1.0, "without the temperature and over the")]
)
def test_log_probs_of_before_top_p(models: dict[str, Path], temperature: float, sentence: str) -> None:
    samples = sampled_by(hf(models["now"]).log_probs(sequences(), temperature=temperature), supports())
    verdict = judged(samples, models["now"], {}, temperature=0.7).verdicts["engine"]
    assert verdict.word == "support" and sentence in verdict.sentence


def test_the_weights_of_another_version_under_top_p(models: dict[str, Path]) -> None:
    given = supports()
    samples = sampled_by(hf(models["before"]).log_probs(sequences(), supports=given), given)
    verdict = judged(samples, models["now"], {"version 2": models["before"]}).verdicts["engine"]
    assert verdict.word == "stale weights" and verdict.sentence.startswith("it had version 2: it accounts for 100%")


def test_an_engine_with_a_wrong_tensor_that_no_version_had(models: dict[str, Path], tmp_path: Path) -> None:
    wrong = changed(
        models["now"], tmp_path / "wrong", lambda n, t: t.flip(0) if n.endswith("1.mlp.up_proj.weight") else t
    )
    samples = sampled_by(hf(wrong).log_probs(sequences()))
    assert judged(samples, models["now"], {"version 2": models["before"]}).verdicts["engine"].word == "bug"


@pytest.mark.parametrize("kind", ["now", "experts"])
def test_the_trainer_agrees_layer_by_layer_and_in_its_routers(models: dict[str, Path], kind: str) -> None:
    samples = sampled_by(hf(models[kind]).log_probs(sequences()))
    analysis = judged(samples, models[kind], {}, trainer=True)
    assert analysis.verdicts["trainer"].word == "precision"
    assert len(analysis.layers["trainer - HF float64"]) == 4 and max(analysis.layers["trainer - HF float64"]) < 1e-5
    flips = analysis.flips.get("trainer - HF float64", {})
    assert sorted(flips) == ([0, 1, 2] if kind == "experts" else []) and not any(flips.values())


def test_a_trainer_with_a_wrong_tensor_is_caught_in_its_layer(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vime.trainer.megatron.weights import hf_io

    wrong = changed(models["now"], tmp_path / "wrong", lambda n, t: t.flip(0) if "layers.1.self_attn.v" in n else t)
    load = hf_io.load_hf
    monkeypatch.setattr(hf_io, "load_hf", lambda chunks, folder, *rest: load(chunks, wrong, *rest))
    samples = sampled_by(hf(models["now"]).log_probs(sequences()))
    verdict = judged(samples, models["now"], {}, trainer=True).verdicts["trainer"]
    assert verdict.word == "bug" and verdict.sentence.endswith("hidden states first differ in layer 1")


def test_differences_where_routers_differ_are_routing() -> None:
    flips = Flips(share=0.1, mean_with=0.2, mean_without=0.001)
    assert verdict_on_engine(0.021, 0.004, None, flips, None).word == "routing"
    assert verdict_on_trainer(0.021, 0.004, flips, "layer 1").word == "routing"
    even = Flips(share=0.1, mean_with=0.02, mean_without=0.02)
    assert verdict_on_engine(0.02, 0.004, None, even, None).word == "bug"
    assert verdict_on_engine(0.001, 0.004, None, flips, None).word == "precision"


def test_a_new_engine_tells_whose_fault_it_is() -> None:
    assert "the run's engine held others" in verdict_on_engine(0.5, 0.01, None, None, 0.005).sentence
    assert "another model" in verdict_on_engine(0.5, 0.01, None, None, 0.4).sentence


def test_noise_is_no_explanation() -> None:
    numbers = np.random.default_rng(0)
    expected, noise, cause = (numbers.normal(size=1000) for _ in range(3))
    asked = Unexplained(expected + noise, expected, noise, np.arange(1000) // 10)
    found = asked.by("stale weights: x", expected + cause)
    assert not found.holds and abs(found.multiple) < 0.15
    assert precision_bound(1e-9, "float32") == 1e-5 and precision_bound(1e-3, "bfloat16") == 4e-3


def sensitive(seed: int, num_tokens: int = 3000) -> tuple[np.random.Generator, np.ndarray]:
    """A generator, and how much each token's log-prob moves: most hardly, few a lot, as those of a trained model."""
    numbers = np.random.default_rng(seed)
    return numbers, 1e-3 * np.exp(numbers.normal(0, 2, num_tokens))


def test_rounding_in_few_tokens_is_no_explanation_however_many_causes_are_tried() -> None:
    prompt = np.arange(3000) // 50
    by_chance = []
    for seed in range(20):
        numbers, scale = sensitive(seed)
        engine, own = (scale * numbers.normal(size=3000) for _ in range(2))
        asked = Unexplained(engine, np.zeros(3000), own, prompt)
        causes = [scale * numbers.normal(size=3000) for _ in range(60)]
        by_chance.append(max(float(engine @ d) ** 2 / float(engine @ engine) / float(d @ d) for d in causes))
        assert not any(asked.by("stale tensor: x", d).holds for d in causes)
    assert max(by_chance) > 0.1  # of the squares, by the multiple that fits all tokens at once


def test_a_cause_is_seen_in_rounding_of_few_tokens() -> None:
    numbers, scale = sensitive(1)
    engine, own, cause = (scale * numbers.normal(size=3000) for _ in range(3))
    asked = Unexplained(engine + cause, np.zeros(3000), own, np.arange(3000) // 50)
    found = asked.by("stale weights: x", cause)
    assert found.holds and 0.5 < found.multiple < 1.1 and found.explained > 0.2
    # Rounding takes from the multiple; that is not called a part of the way.
    assert "of the way there" not in verdict_on_engine(0.02, 0.1, found, None, None).sentence
    part = Unexplained(engine + 0.4 * cause, np.zeros(3000), own, np.arange(3000) // 50).by("stale weights: x", cause)
    assert "of the way there" in verdict_on_engine(0.02, 0.1, part, None, None).sentence


def test_what_explains_hfs_own_rounding_as_well_is_no_cause() -> None:
    numbers = np.random.default_rng(2)
    lean, *noise = (numbers.normal(size=3000) for _ in range(3))
    engine, own = (x + 0.5 * lean for x in noise)
    prompt = np.arange(3000) // 50
    found = Unexplained(engine, np.zeros(3000), own, prompt).by("stale weights: x", lean)
    assert found.explained == pytest.approx(0.2, abs=0.1) and found.of_rounding == pytest.approx(0.2, abs=0.1)
    assert not found.holds
    assert Unexplained(engine, np.zeros(3000), noise[1], prompt).by("stale weights: x", lean).holds


def test_layers_are_not_tried_one_by_one_where_rounding_accounts_for_it(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = sampled_by(hf(models["now"]).log_probs(sequences()))

    def refused(*_: Any) -> None:
        raise AssertionError("a layer was tried")

    monkeypatch.setattr(HfModel, "with_tensors_of", refused)
    judged(samples, models["now"], {"version 2": models["before"]})


def test_prefixes_of_other_weights_that_go_through_the_model_together(models: dict[str, Path]) -> None:
    now, before = hf(models["now"]), hf(models["before"])
    given = [s[: 24 - i % 5] for i, s in enumerate(sequences(8))]
    prefixes = [0, 4, 7, 7, 4, 7, 7, 4]
    together = now.log_probs_after(before, given, prefixes)
    alone = [now.log_probs_after(before, [s], [p])[0] for s, p in zip(given, prefixes, strict=True)]
    for one, other, prefix in zip(together, alone, prefixes, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert np.isnan(one).sum() == (prefix + 1 if prefix else len(one))
    same = now.log_probs_after(now, given, prefixes)
    for one, other, prefix in zip(same[1:], now.log_probs(given)[1:], prefixes[1:], strict=True):
        np.testing.assert_allclose(one[prefix + 1 :], other[prefix + 1 :], atol=1e-5)
