"""Costs computed from shapes alone, for a device that need not be here.

    time of an operator = sum over its kernels of
        max(FLOPs / (efficiency * peak), bytes / (efficiency * bandwidth)) + launch

The kernels come from `workload`, the peaks and efficiencies from `device_kinds`; a `Calibration`
puts efficiencies that were fitted to measured profiles in place of the table's. Sizes that a trace
tells are taken from it, exactly as `profile` does, so that computed and measured graphs differ in
their costs and never in their structure.

Complexity: O(distinct operators), some milliseconds each; no tensor is allocated.
"""

import os

import torch

from baechi.costs.workload import Workload, workloads
from baechi.errors import InputError
from baechi.records.device_kinds import Calibration, DeviceKind, Kernel, find
from baechi.records.op_costs import OpCost, Profile
from baechi.torch_support.torch_devices import fp32_precisions
from baechi.traced.traced_model import Traced
from baechi.validation import check_is


def estimate(
    traced: Traced,
    kind: str,
    *,
    kinds_file: str | os.PathLike[str] | None = None,
    calibration: Calibration | None = None,
    tf32: bool | None = None,
) -> Profile:
    """The computed cost of every operator of a traced model on one kind of device.

    Deterministic: it reads shapes and tables, and no clock.

    Args:
        traced: From `trace`, in this process; its model may be on the meta device.
        kind: A name or alias of the table, such as `"H100-SXM-80GB"` or what
            `torch.cuda.get_device_name` says. The profile carries it as it is written here, so
            that it meets the `Device.kind` of a probed cluster.
        kinds_file: A TOML file with more kinds, in the form of `device_kinds.toml`.
        calibration: From `calibrate`, of this kind.
        tf32: Whether fp32 products run as tf32 where the kind can; `None` takes what torch is set
            to in this process: convolutions do, products of matrices do not.

    Raises:
        InputError: The traced model was loaded from a file, the kind is unknown, a row of the
            table is wrong, or the calibration is of another kind.
    """
    check_is(traced, Traced, "traced")
    row = find(kind, kinds_file)
    if calibration is not None:
        if not isinstance(calibration, Calibration):
            raise InputError(f"calibration is {calibration!r}; give a baechi.Calibration or None.")
        row = row.calibrated(calibration)
    rounded = rounded_classes(row, tf32)
    costs = {key: _op_cost(load, row, rounded) for key, load in workloads(traced).items()}
    rows = []
    for op, output_bytes in zip(traced.ops, traced.made_bytes, strict=True):
        forward_ns, backward_ns, workspace, backward_workspace, remark = costs[op.key]
        rows.append(
            OpCost(
                forward_ns,
                backward_ns if op.differentiable else 0,
                parameter_bytes=op.trained_bytes + op.frozen_bytes,
                output_bytes=output_bytes,
                saved_bytes=op.saved_bytes,
                workspace_bytes=workspace,
                backward_workspace_bytes=backward_workspace,
                remark=remark,
            )
        )
    how = "calibrated" if calibration is not None else "uncalibrated"
    environment = f"torch {torch.__version__}, {row.name} {how}, tf32 for {_list(rounded)}"
    return Profile(traced.digest, kind, tuple(rows), "computed", environment)


def rounded_classes(kind: DeviceKind, tf32: bool | None) -> frozenset[str]:
    """The classes of operators whose fp32 products run as tf32 on a kind."""
    if "tf32" not in kind.flops_per_s:
        return frozenset()
    if tf32 is not None:
        return frozenset({"matmul", "convolution", "recurrent"} if tf32 else ())
    classes = ("matmul", "convolution", "recurrent")
    chosen = fp32_precisions()
    return frozenset(name for name in classes if chosen[f"cuda {name}"] == "tf32")


def as_run(kernel: Kernel, rounded: frozenset[str]) -> Kernel:
    """The kernel in the type that it runs in."""
    if kernel.dtype != "fp32" or kernel.op_class not in rounded:
        return kernel
    return Kernel(kernel.op_class, "tf32", kernel.flops, kernel.nbytes)


def _op_cost(
    load: Workload, kind: DeviceKind, rounded: frozenset[str]
) -> tuple[int, int, int, int, str]:
    forward_ns = kind.run_ns([as_run(kernel, rounded) for kernel in load.forward])
    backward_ns = kind.run_ns([as_run(kernel, rounded) for kernel in load.backward])
    workspace = (load.workspace_bytes, load.backward_workspace_bytes)
    return forward_ns, backward_ns, *workspace, load.remark


def _list(classes: frozenset[str]) -> str:
    return ", ".join(sorted(classes)) or "nothing"
