"""Compiles for a described TPU and reports. May import `cost_model`, `programs`, `models` and the leaves."""
