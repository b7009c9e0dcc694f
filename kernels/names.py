"""The kernels' names in a compiled program's text, by which `cost_model` knows how to count them."""

WITH_RERUN = "_with_rerun"  # ends the name of a kernel that repeats a step's work where its faster form has failed
ATTENTION = "attention"
ATTENTION_WITH_RERUN = ATTENTION + WITH_RERUN
TURN = "turn"
PROLOGUE = "attention_prologue"
JOIN = "attention_join"
RESIDUAL_NORM = "residual_norm"
CONVOLUTION = "convolution"
MODULATION = "modulation"

# Those that a machine may do without, each by one name for all that it consists of, by the words that switch them off.
SWITCHES = {
    "attention": ATTENTION,
    "convolution": CONVOLUTION,
    "modulation": MODULATION,
    "prologue": PROLOGUE,
    "residual_norm": RESIDUAL_NORM,
}
KERNELS = tuple(SWITCHES.values())
# What else stands in a program's text for one of them.
PARTS = {ATTENTION_WITH_RERUN: ATTENTION, TURN: ATTENTION, JOIN: PROLOGUE}
