"""The miniatures of models that make videos."""
