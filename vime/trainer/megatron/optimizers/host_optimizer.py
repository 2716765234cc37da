"""Optimizer state in host memory: megatron-core 0.16.1's HybridDeviceOptimizer, mended so that it trains without TE.

The host keeps float32 weights, both moments and a copy of the gradient of the offloaded part, and updates it there; the
device keeps the model's weights and Megatron's gradients. tests/trainer/megatron/optimizers/test_host_optimizer.py
shows the faults that are mended:

* It is built twice, first over the whole rank's parameters, with host copies of them all.
* On float32 weights it cannot be built (views that autograd knows), and updates no parameter that stays on the device.
* A fresh one has no state to save; loading fills it by a step along a random gradient, which changes the weights.
* Loaded masters and moments are put beside the tensors it works on; weights loaded alone leave old float32 masters.
* Its classes and streams go into checkpoints, which other runs could then not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

_OWN_SETTINGS = (
    *("offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32"),
    *("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d", "bias_correction", "fused"),
)
_STATE = ("exp_avg", "exp_avg_sq")
_BLOCK = 1 << 31  # numbers in a block of pinned gradients, 8 GiB


class HostOptimizer(HybridDeviceOptimizer):  # type: ignore[misc]
    """AdamW whose state is partly on the host. Parameters are this rank's shards of the model's; built by Megatron."""

    def _init_sub_optimizers(self) -> None:
        super()._init_sub_optimizers()
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    step = torch.zeros((), dtype=torch.float32, device=p.device)
                    optimizer.state[p] = {"step": step, **{name: torch.zeros_like(p) for name in _STATE}}
        pinned = self.pin_cpu_grads and any(p.is_cuda for p in self.cpu_copys_map_gpu_param.values())
        masters = list(self.cpu_copys_map_gpu_param)
        self.cpu_copy_map_grad = dict(
            zip(masters, host_buffers([p.shape for p in masters], pinned=pinned), strict=True)
        )
        self._sync_sub_optimizers_state_to_hdo()

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        """The first parameters up to the fraction go to the host; float32 copies where those are the masters."""
        total = sum(p.numel() for group in self.param_groups for p in group["params"])
        host_groups, device_groups = [], []
        to_host, to_device, to_master = {}, {}, {}
        taken = 0
        for group in self.param_groups:
            on_host, on_device = [], []
            for p in group["params"]:
                if taken < total * offload_fraction:
                    taken += p.numel()
                    master = p.detach().to("cpu", torch.float32, copy=True)
                    to_host[p], to_device[master] = master, p
                    on_host.append(master)
                else:
                    master = p if p.dtype == torch.float32 else p.detach().float()
                    on_device.append(master)
                if p.dtype != torch.float32:
                    to_master[p] = master
            host_groups += [{**group, "params": on_host}] if on_host else []
            device_groups += [{**group, "params": on_device}] if on_device else []
        return host_groups, device_groups, to_host, to_device, to_master

    def step(self, closure: Any = None) -> None:
        """Update the device's part, and the host's part by way of its copies."""
        for p, master in self.param_to_inner_param.items():
            if p not in self.gpu_params_map_cpu_copy:
                grad = _gradient(p)
                master.grad = None if grad is None else grad.to(master.dtype)
        super().step(closure)

    def _set_sub_optimizer_grads(self) -> None:
        """Start the copies of gradients to the host, with an event behind those of each optimizer there."""
        for optimizer in self.cpu_optimizers:
            for master in (p for group in optimizer.param_groups for p in group["params"]):
                grad = _gradient(self.cpu_copys_map_gpu_param[master])
                if grad is None:
                    master.grad = None
                    continue
                self.cpu_copy_map_grad[master].copy_(grad, non_blocking=True)
                master.grad = self.cpu_copy_map_grad[master]
            self._cpu_optimizer_map_data_event[optimizer] = self._d2h_stream.record_event()

    # Checkpoints: in the form that torch's AdamW has, so that either resumes the other's.

    def state_dict(self) -> dict[str, Any]:
        """As torch's; groups without the settings that are this class's own."""
        state: dict[str, Any] = super().state_dict()
        groups = [{k: v for k, v in group.items() if k not in _OWN_SETTINGS} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Settings of the groups, and step counts. Masters and moments come by `restore`."""
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in given.items() if k not in ("params", *_OWN_SETTINGS)})
            for number, p in zip(given["params"], group["params"], strict=True):
                step, master = state_dict["state"][number]["step"], self.param_to_inner_param[p]
                self.state[p]["step"] = torch.as_tensor(step, dtype=torch.float32).to(master.device, copy=True)

    @torch.no_grad()
    def restore(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write a parameter's float32 master ("param") and moments into place."""
        self.param_to_inner_param[parameter].copy_(tensors["param"])
        for name in _STATE:
            self.state[parameter][name].copy_(tensors[name])

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Take the masters from the model's weights, after these were loaded alone."""
        for p, master in self.param_to_inner_param.items():
            if master is not p:
                master.copy_(p)

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Nothing to do: `restore` wrote into the tensors that are worked on."""


class _NotYetBuilt(HostOptimizer):
    """What Megatron makes over whole parameters first, to build one over shards from its settings."""

    def __init__(self, params: Any, **settings: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults=settings)


def host_buffers(shapes: Sequence[torch.Size], *, pinned: bool, block: int = _BLOCK) -> list[Tensor]:
    """A float32 tensor of each shape, several to one block of memory.

    torch rounds each block of pinned memory up to a power of two, so blocks have such sizes and are filled.

    Args: block: numbers in a block; less where fewer are left, more for a larger tensor.
    """
    buffers: list[Tensor] = []
    rest = torch.empty(0)
    left = sum(shape.numel() for shape in shapes)
    for shape in shapes:
        n = shape.numel()
        if n > rest.numel():
            size = max(n, min(block, left))
            rest = torch.empty(1 << (size - 1).bit_length(), dtype=torch.float32, pin_memory=pinned)
        buffers.append(rest[:n].view(shape))
        rest, left = rest[n:], left - n
    return buffers


def install() -> None:
    """Put the mended class in the place of megatron-core's; a second call does nothing."""
    cls = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HybridDeviceOptimizer is HostOptimizer:
        return
    megatron_optimizer.HybridDeviceOptimizer = _NotYetBuilt
    distrib_optimizer.HybridDeviceOptimizer = HostOptimizer
    set_states, build_groups = cls._set_main_param_and_optimizer_states, cls._build_model_and_main_param_groups

    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Tensor]) -> None:
        if not isinstance(self.optimizer, HostOptimizer):
            set_states(self, model_param, tensors)
            return
        group, order = self.model_param_group_index_map[model_param]
        self.optimizer.restore(self.optimizer.param_groups[group]["params"][order], tensors)

    def build_model_and_main_param_groups(*args: Any, **kwargs: Any) -> Any:
        # torch's optimizers refuse views that autograd knows.
        with torch.no_grad():
            return build_groups(*args, **kwargs)

    cls._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states
    cls._build_model_and_main_param_groups = staticmethod(build_model_and_main_param_groups)


def _gradient(parameter: Tensor) -> Tensor | None:
    """Megatron keeps a float32 gradient beside a parameter of another dtype, which torch would not allow in `grad`."""
    decoupled: Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled
