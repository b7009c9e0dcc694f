"""Text encoders of the families: conversation, tokens, states. May import nothing of `models`."""

# The default of models that begin with a picture, which the examples' picture shows.
PICTURE_PROMPT = (
    "A small sailing boat glides over a calm sea at sunset. The sail sways gently, sunlight glitters on the waves, "
    "clouds drift slowly behind the hills. The camera stays still."
)
