"""The miniatures of models that draw pictures."""
