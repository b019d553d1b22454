"""Importable where there is a vLLM that computes on the CPU: a package with compiled kernels.

Test modules skip themselves where it is not. It does not import vLLM, which takes long.
"""

from importlib.util import find_spec
from pathlib import Path

vllm = find_spec("vllm")
if vllm is None or not any(Path(vllm.origin or "").parent.glob("_C*.so")):
    raise ModuleNotFoundError("no vLLM with kernels for a CPU")
