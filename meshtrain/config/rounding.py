"""Fractions of a number that a config gives in decimals, without the error of binary ones."""


def to_12_digits(value: float) -> float:
    """Returns a value rounded to 12 significant digits, to be rounded up or down to a whole number.

    In floating point 100 * 0.07 is 7.000000000000001, and 100 * 0.29 is 28.999999999999996.
    """
    return float(f"{value:.12g}")
