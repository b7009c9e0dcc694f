"""Plans: compile for a described TPU and report. May import `cost_model`, `programs`, `models` and the leaves."""
