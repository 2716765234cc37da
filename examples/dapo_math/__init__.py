"""DAPO-Math-17k and AIME 2024: competition problems with whole-number answers."""
