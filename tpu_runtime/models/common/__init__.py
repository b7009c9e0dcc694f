"""Networks and functions that several families share. May import `formats`, `programs` and the leaves."""

# The default prompt of image-to-video models; it describes the examples' image.
IMAGE_PROMPT = (
    "A small sailing boat glides over a calm sea at sunset. The sail sways gently, sunlight glitters on the waves, "
    "clouds drift slowly behind the hills. The camera stays still."
)
