"""The one place where quantised values meet layouts: `Weight` -> `Quantized` -> `Packed`."""

from epicute.weights.fragment_pack import FRAGMENT_VERSION, FragmentPacked
from epicute.weights.packed import LAYOUT_VERSION, Packed
from epicute.weights.quantized import DTYPES, Quantized
from epicute.weights.quantized_int4 import QuantizedInt4
from epicute.weights.weight import FORMATS, Weight

__all__ = [
    "DTYPES",
    "FORMATS",
    "FRAGMENT_VERSION",
    "LAYOUT_VERSION",
    "FragmentPacked",
    "Packed",
    "Quantized",
    "QuantizedInt4",
    "Weight",
]
