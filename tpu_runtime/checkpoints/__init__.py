"""Finding, downloading, faking and loading weights. May import `models`, `programs` and the leaves."""
