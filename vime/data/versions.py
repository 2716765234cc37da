"""Which policy versions a sample is of."""

from __future__ import annotations

from vime.types import PolicyVersion, Sample


def trainable_versions(sample: Sample) -> list[PolicyVersion]:
    """Of the spans that hold a token under mask 1."""
    mask = bytes(sample.loss_mask)  # millions of entries: bytes search fast
    return [span.version for span in sample.weight_versions if mask.find(1, span.start, span.end) >= 0]


def num_without_version(sample: Sample) -> int:
    """Tokens under mask 1 of which nobody has said by which version they were sampled."""
    mask = bytes(sample.loss_mask)
    return mask.count(1) - sum(mask.count(1, span.start, span.end) for span in sample.weight_versions)


def mask_before(sample: Sample, version: PolicyVersion) -> int:
    """Take the gradient from tokens of earlier versions than this one. Returns: from how many that had it."""
    mask, masked = bytes(sample.loss_mask), 0
    for span in sample.weight_versions:
        if span.version < version and (trainable := mask.count(1, span.start, span.end)):
            sample.mask_response(span.start, span.end)
            masked += trainable
    return masked
