"""The state that a model's recurrent layers keep, from its configuration.

The fields tell the kind: gated delta networks, Kimi's delta attention, both generations of Mamba,
short convolutions. Sizes are those of vLLM's ``mamba_utils``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvoffload.errors import describe

from .model_fields import HIDDEN, Fields
from .model_groups import State

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def has_states(fields: Fields) -> bool:
    """Return whether a configuration has fields for layers with a state."""
    return fields.given(*STATE_FIELDS) is not None


def state_of(fields: Fields) -> State:
    """Return the state of a configuration's recurrent layers; ValueError if no known kind fits."""
    found = fields.given(*STATE_FIELDS)
    if found is None:
        fields.refuse("its recurrent layers are of a kind that is not known")
    return _READERS[found](fields)


def _gated_delta(fields: Fields) -> State:
    keys, values = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    key, value = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    state = State(
        values,
        key * value,
        channels=2 * keys * key + values * value,
        taps=_taps(fields, "linear_conv_kernel_dim"),
    )
    if not fields.model_type.startswith("qwen3_5"):
        return state
    return replace(state, element_bytes=_element_bytes(fields, "mamba_ssm_dtype", 2))


def _kimi_delta(fields: Fields) -> State:
    part = fields.part("linear_attn_config")
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    if part is None:
        part, names = fields, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    heads, size = part.integer(names[0]), part.integer(names[1])
    taps = _taps(part, names[2])
    return State(heads, size * size, channels=3 * heads * size, taps=taps, element_bytes=4)


def _mamba(fields: Fields) -> State:
    inner = fields.integer("mamba_expand") * fields.integer(*HIDDEN)
    taps = _taps(fields, "mamba_d_conv")
    return State(inner, fields.integer("mamba_d_state"), channels=inner, taps=taps)


def _mamba2(fields: Fields) -> State:
    if fields.given("mamba_d_ssm"):
        inner = fields.integer("mamba_d_ssm")
    else:
        inner = fields.integer("mamba_expand") * fields.integer(*HIDDEN)
    heads = fields.integer("mamba_n_heads", "n_mamba_heads")
    size = inner // heads
    if fields.config.get("mamba_d_head") != "auto":
        size = fields.optional("mamba_d_head", "mamba_headdim", default=size)
    state = fields.integer("mamba_d_state")
    return State(
        heads,
        size * state,
        channels=inner,
        taps=_taps(fields, "mamba_d_conv"),
        groups=fields.integer("mamba_n_groups", "mamba_ngroups"),
        group_channels=2 * state,
    )


def _nemotron(fields: Fields) -> State:
    heads, size = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    state = fields.integer("ssm_state_size")
    return State(
        heads,
        size * state,
        channels=heads * size,
        taps=_taps(fields, "conv_kernel"),
        groups=fields.integer("n_groups"),
        group_channels=2 * state,
        element_bytes=_element_bytes(fields, "mamba_ssm_cache_dtype", 4),
    )


def _convolution(fields: Fields) -> State:
    return State(channels=fields.integer("conv_dim", *HIDDEN), taps=_taps(fields, "conv_L_cache"))


def _taps(fields: Fields, name: str) -> int:
    """Return the elements of a channel that a convolution keeps: all of its kernel but one."""
    taps = fields.integer(name) - 1
    if not taps:
        raise ValueError(f"{fields.path}: {name} must be > 1, got 1")
    return taps


def _element_bytes(fields: Fields, name: str, default: int) -> int:
    value = fields.config.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or value not in _ELEMENT_BYTES:
        known = ", ".join(_ELEMENT_BYTES)
        raise ValueError(f"{fields.path}: {name} must be one of {known}, got {describe(value)}")
    return _ELEMENT_BYTES[value]


_READERS: dict[str, Callable[[Fields], State]] = {
    "linear_num_value_heads": _gated_delta,
    "linear_attn_config": _kimi_delta,
    "linear_num_heads": _kimi_delta,
    "mamba_num_heads": _nemotron,
    "mamba_n_heads": _mamba2,
    "n_mamba_heads": _mamba2,
    "mamba_d_state": _mamba,
    "conv_L_cache": _convolution,
}
STATE_FIELDS = tuple(_READERS)
"""Fields each of which tells a kind of state."""
