"""Text encoders of the families: conversation, tokens, states. May import `programs`, but no other part of `models`."""

# The default prompt of image-to-video models; it describes the examples' image.
IMAGE_PROMPT = (
    "A small sailing boat glides over a calm sea at sunset. The sail sways gently, sunlight glitters on the waves, "
    "clouds drift slowly behind the hills. The camera stays still."
)
