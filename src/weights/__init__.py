"""The one place where quantised values meet layouts: `Weight` -> `Quantized` -> `Packed`."""

from epicute.weights.packed import LAYOUT_VERSION, Packed
from epicute.weights.quantized import DTYPES, Quantized
from epicute.weights.weight import Weight

__all__ = ["DTYPES", "LAYOUT_VERSION", "Packed", "Quantized", "Weight"]
