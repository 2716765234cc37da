"""Layers of a vLLM model that a sync filled only in part.

vLLM keeps several tensors of a checkpoint in one parameter: query, key and value; gate and up; all experts of a layer.
What its loader says is which parameters it touched, so one expert that it passes over shows nowhere, and its place
holds whatever the memory held. Here the elements are counted.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_DECLARED = "weight_loader_numel"  # set where a parameter is larger than what belongs in it


def partly_loaded(model: Any) -> list[str]:
    """Names of the fused layers that got some of their elements since the reload began and not all, with both counts.

    Called before the reload is finalized. Layers are looked at whose size is that of their checkpoint: linear ones
    without quantization, and experts whose parameters declare what of them is padding.
    """
    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.load_numel_total is None or not 0 < info.load_numel < info.load_numel_total:
            continue
        parameters = list(layer.parameters(recurse=False))
        is_linear = isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)
        if is_linear or all(hasattr(parameter, _DECLARED) for parameter in parameters):
            found.append(f"{name} ({info.load_numel} of {info.load_numel_total} elements)")
    return found
