"""What ComfyUI's samplers ask of its networks, in our terms: the rows of guidance, the inputs of each model, and what
does not fit a network. May import `pipeline`.
"""
