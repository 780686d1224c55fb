"""Published specifications of GPUs. Must not import torch."""

from dataclasses import dataclass
from typing import Literal

Name = Literal[
    "rtx4070-12gb", "rtx3090-24gb", "rtx4090-24gb", "l4-24gb", "a10-24gb", "rtx5090-32gb", "a100-40gb", "l40s-48gb",
    "a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb",
]  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """Specification of a GPU.

    `peak`: dense bf16 FLOP/s with fp32 accumulation. `memory`: nominal bytes (1 GB = 10^9). In bytes per second:
    `bandwidth` of its memory, `link` to the other GPUs of a machine and `bus` to main memory (both one direction).
    `together`: GPUs per machine, the limit of groups that share weights.
    """

    peak: float
    memory: float
    bandwidth: float
    link: float
    bus: float
    together: int = 8


PCIE4, PCIE5 = 32e9, 64e9  # 16 lanes

# Source: NVIDIA's publications. Figures with sparsity, and bidirectional NVLink figures, are halved. Without NVLink,
# GPUs of a machine communicate over PCIe.
GPUS: dict[Name, Gpu] = {
    # Ampere GA102 and Ada white papers, appendix A: bf16 with fp32 accumulation; RTX Blackwell white paper, the same
    "rtx4070-12gb": Gpu(58.3e12, 12e9, 504e9, PCIE4, PCIE4),  # 46 of the units of which the RTX 4090 has 128, 2.475 GHz
    "rtx3090-24gb": Gpu(71e12, 24e9, 936e9, PCIE4, PCIE4),
    "rtx4090-24gb": Gpu(165.2e12, 24e9, 1008e9, PCIE4, PCIE4),
    "rtx5090-32gb": Gpu(209.5e12, 32e9, 1792e9, PCIE5, PCIE5),
    # data sheets: L4 242 TFLOPS with sparsity, A10 125, L40S 362 (733 with sparsity)
    "l4-24gb": Gpu(121e12, 24e9, 300e9, PCIE4, PCIE4),
    "a10-24gb": Gpu(125e12, 24e9, 600e9, PCIE4, PCIE4),
    "l40s-48gb": Gpu(362e12, 48e9, 864e9, PCIE4, PCIE4),
    # A100 data sheet, SXM: 312 TFLOPS, NVLink 600 GB/s
    "a100-40gb": Gpu(312e12, 40e9, 1555e9, 300e9, PCIE4),
    "a100-80gb": Gpu(312e12, 80e9, 2039e9, 300e9, PCIE4),
    # H100 and H200 data sheets, SXM: 1,979 TFLOPS with sparsity, NVLink 900 GB/s
    "h100-80gb": Gpu(989.4e12, 80e9, 3350e9, 450e9, PCIE5),
    "h200-141gb": Gpu(989.4e12, 141e9, 4800e9, 450e9, PCIE5),
    # Blackwell data sheet, a GPU of the HGX B200: 4.5 PFLOPS with sparsity, NVLink 1.8 TB/s
    "b200-180gb": Gpu(2250e12, 180e9, 7700e9, 900e9, PCIE5),
}
