"""ResourceSlices and ResourceClaims of Kubernetes, as its API server writes them."""

from typing import Any

DRIVER = "gpu.nvidia.com"
GIB = 2**30


def gpu(name: str, memory: str = "80Gi", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "attributes": {
            "uuid": {"string": f"GPU-{name}"},
            "productName": {"string": "NVIDIA A100-SXM4-80GB"},
        },
        "capacity": {"memory": {"value": memory}},
        **more,
    }


def shared(name: str, policy: dict[str, Any] | None = None) -> dict[str, Any]:
    """A GPU that several claims may share, by memory and cores."""
    device = gpu(name, allowMultipleAllocations=True)
    device["capacity"]["cores"] = {"value": "100"}
    if policy is not None:
        device["capacity"]["memory"]["requestPolicy"] = policy
    return device


def published(node: str, *devices: Any, generation: int = 1, count: int = 1, **more: Any) -> Any:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{generation}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
            "devices": list(devices),
            **more,
        },
    }


def allocated(node: str, device: str, **consumed: str) -> dict[str, Any]:
    result = {"request": "device", "driver": DRIVER, "pool": node, "device": device}
    if consumed:
        result |= {"consumedCapacity": consumed, "shareID": f"share-of-{device}"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": f"claim-{node}-{device}"},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }
