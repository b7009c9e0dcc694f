"""Denoisers as data: sizes, how weights are cut, placed and called by their makers; `layers` is what several share. May
import `programs`.
"""
