"""Earlier versions of parts of the decode step, built to be timed beside what took their place (FuTransformer 4.6).

What shares a layout with the library's kernels is a switch of those: the table of byte codes
(``DecodeSchedule.unpack``), the conversion of weights (``FewRowSchedule.conversion``), the rotation
(``Int4Cache.width``), who quantises the new row (``DecodeSpec.append``). The others are here, each a small kernel that
differs from the library's in that one thing:

    natural-k          keys expanded by the table of byte codes into a tile in shared memory, fragments by ldmatrix
    natural-k-nibbles  the same, and every nibble of keys and values converted by itself
    row-kernel         the new row of an INT4 cache rotated, quantised and stored by a kernel in front of attention
    fma-attention      dot products and sums of values by FMA, a token in half a warp, without tensor cores
    skinny             BF16 projections from row-major weights, fragments from global memory, no packs, no ring
"""
