"""The kernels' names in a compiled program's text, by which `cost_model` knows how to count them."""

WITH_RERUN = "_with_rerun"  # ends the name of a kernel that repeats a step's work where its faster form has failed
SKIPPED = "skipped_turns"  # of a kernel's longest loop, in its metadata: so many need not be taken
ATTENTION = "attention"
ATTENTION_WITH_RERUN = ATTENTION + WITH_RERUN
ATTENTION_INT8 = "attention_int8"
ATTENTION_INT8_WITH_RERUN = ATTENTION_INT8 + WITH_RERUN
TURN = "turn"
PROLOGUE = "attention_prologue"
JOIN = "attention_join"
RESIDUAL_NORM = "residual_norm"
CONVOLUTION = "convolution"
MODULATION = "modulation"
LINEAR_INT8 = "linear_int8"
ROUND_TOKENS = "round_tokens"

# Those that a machine may do without, each by one name for all that it consists of, by the words that switch them off.
SWITCHES = {
    "attention": ATTENTION,
    "attention_int8": ATTENTION_INT8,
    "convolution": CONVOLUTION,
    "linear_int8": LINEAR_INT8,
    "modulation": MODULATION,
    "prologue": PROLOGUE,
    "residual_norm": RESIDUAL_NORM,
}
KERNELS = tuple(SWITCHES.values())
# What else stands in a program's text for one of them.
PARTS = {
    ATTENTION_WITH_RERUN: ATTENTION,
    ATTENTION_INT8_WITH_RERUN: ATTENTION_INT8,
    TURN: ATTENTION,
    JOIN: PROLOGUE,
    ROUND_TOKENS: LINEAR_INT8,
}
