"""What is kept on disk between runs, and who may have written it. May import the leaves and
`model_spec`.
"""
