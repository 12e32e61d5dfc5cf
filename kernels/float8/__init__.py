"""float8: the 8-bit float e4m3 (Micikevicius et al. 2022) of keys, values and weights: 1 sign, 4 exponent bits of bias 7, 3 of mantissa.

The code 0x7F is NaN, there is no infinity, the largest number is 448. `encode` rounds to the nearest, halves to even, and gives the
largest number of the sign to anything beyond it. No scale is kept for keys and values: they are stored as they are.
"""

LARGEST = 448.0
