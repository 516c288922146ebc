"""This tree and an older one compared: whole benches in turns, and short loads alternately."""
