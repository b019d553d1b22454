"""From a trace to a configuration: which policy, how much memory, and why."""

from .advice import Advice, Cell, Setup, advise
from .models import ModelShape, model_names, model_shape

__all__ = ["Advice", "Cell", "ModelShape", "Setup", "advise", "model_names", "model_shape"]
